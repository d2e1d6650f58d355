"""Inputs that would fill the memory, or have no end, end with a DataError; other inputs keep their tokens."""

import gzip
import json
import os
import pickle
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.data.build import build_data
from fullshard.data.files import SourceFile
from fullshard.data.readers import split_file
from fullshard.data.sources import open_token_stores
from fullshard.data.token_store import no_heartbeat
from fullshard.data.tokenize import TokenizedTask, TokenizeSettings, tokenize_tasks
from fullshard.data.worker import Limits, call_in_worker
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data import hostile
from tests.data.samples import run_of, save_tokenizer, write_json_lines

MIB = hostile.MIB
SMALL = Limits(memory_bytes=384 * MIB)
LONG_LINE = 130  # MiB, above the longest line


def tokenize(settings: dict[str, Any], **changes: object) -> list[TokenizedTask]:
    """Tokenizes the files of `settings` under SMALL limits."""
    given: dict[str, Any] = {"limits": SMALL, "on_error": "stop", "processes": 1, **changes}
    processes, kind = given.pop("processes"), settings["source"]
    fields = DataSourceFields(records=settings.get("records", "text"))
    recipe = TokenizeSettings(
        fields, settings.get("tokenizer"), None, train_on="all", dtype="uint16", **given
    )
    files = [SourceFile(path, Path(path).stat().st_size) for path in settings["paths"]]
    parts = [part for file in files for part in split_file(kind, file)]
    return list(tokenize_tasks([[part] for part in parts], recipe, processes=processes))


@pytest.mark.parametrize("name", sorted(hostile.TEMPLATES.keys() - {"power"}))
def test_a_template_that_writes_too_much_or_has_no_end_is_refused(tmp_path: Path, name: str):
    with pytest.raises(
        DataError, match=r"(?si)a\.jsonl.*(template.*memory|template.*time|recursion|MemoryError)"
    ):
        tokenize(hostile.hostile_template(name, tmp_path), limits=replace(SMALL, seconds=1.0))


def test_a_text_that_a_tokenizer_makes_too_long_is_refused(tmp_path: Path):
    settings = hostile.hostile_tokenizer("replace", tmp_path)
    with pytest.raises(
        DataError, match=r"(?s)a\.jsonl from 0 to \d+.*the tokenizer .*/tokenizer.*try: .*3 MiB"
    ):
        tokenize(settings, on_error="skip")


def test_a_tokenizer_that_cannot_be_opened_within_the_limits_is_refused(tmp_path: Path):
    settings = hostile.hostile_tokenizer("prepend", tmp_path)
    with pytest.raises(DataError, match=r"(?s)the tokenizer .*/tokenizer cannot be opened.*memory"):
        build_data(run_of(tmp_path / "cache", **settings))


@pytest.mark.long
def test_a_tokenizer_with_a_million_special_tokens_is_refused_by_smaller_limits(tmp_path: Path):
    settings = hostile.hostile_tokenizer("special tokens", tmp_path)
    with pytest.raises(DataError, match=r"(?s)chat template .*/tokenizer cannot be opened.*(memory|time)"):
        tokenize(settings)


@pytest.mark.parametrize("ending", hostile.PACKED)
@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_packed_file_with_a_line_that_is_too_long_is_refused(tmp_path: Path, kind: str, ending: str):
    path = hostile.write_packed(tmp_path / f"a.{ending}", mebibytes=LONG_LINE)
    with pytest.raises(DataError, match=rf"(?s)a\.{ending} .*128 MiB"):
        tokenize({"source": kind, "paths": (path,)}, limits=Limits())


@pytest.mark.parametrize(
    ("name", "head", "unit", "message"),
    [
        ("a.json.gz", b'[{"text": "', b"x", r"128 MiB"),
        ("a.jsonl.gz", b"", b"\n", "time"),
        ("a.jsonl.gz", b'{"text": "a"}', b"\n", "time"),
    ],
)
def test_packed_json_without_end_is_refused(
    tmp_path: Path, name: str, head: bytes, unit: bytes, message: str
):
    path = hostile.write_packed(tmp_path / name, mebibytes=LONG_LINE, head=head, unit=unit)
    with pytest.raises(DataError, match=rf"(?s){name}.*({message})"):
        tokenize({"source": "jsonl", "paths": (path,)}, limits=Limits(memory_bytes=896 * MIB, seconds=1.0))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_very_many_values_take_no_more_than_the_limit(tmp_path: Path, name: str):
    (tmp_path / name).write_text(json.dumps([[]] * 8_000_000))
    settings = {"source": "jsonl", "paths": (str(tmp_path / name),)}
    with pytest.raises(DataError, match=rf"(?s){name} from 0.*memory"):
        tokenize(settings)


def test_a_row_that_would_take_too_much_memory_as_a_whole_is_tokenized_in_parts(tmp_path: Path):
    tokenizer, limits = save_tokenizer(tmp_path / "tok"), Limits(memory_bytes=160 * MIB)
    line = "the cat sat on a mat and saw the dog run far away\n"
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": line * (2 * MIB // len(line))}])
    settings = {"source": "jsonl", "paths": (path,), "tokenizer": tokenizer}
    found = tokenize(settings, limits=limits)
    assert len(found) > 4
    assert sum(len(one.ends) for one in found) == 1
    write_json_lines(tmp_path / "a.jsonl", [{"text": "x" * (2 * MIB)}])
    with pytest.raises(DataError, match=r"(?s)a\.jsonl.*memory"):
        tokenize(settings, limits=limits)


@pytest.mark.long
def test_a_row_of_8_mib_is_trained_on(tmp_path: Path):
    line = "the cat sat on a mat and saw the dog run far away\n"
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": line * (8 * MIB // len(line))}])
    settings = {"source": "jsonl", "paths": (path,), "tokenizer": save_tokenizer(tmp_path / "tok")}
    data = build_data(run_of(tmp_path / "cache", **settings))
    assert data.token_stores[0].document_count == 1
    assert data.training_token_count > MIB


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_a_long_sparse_line_is_refused_where_the_limit_ends(tmp_path: Path, kind: str):
    path = hostile.write_sparse(tmp_path / "a", 1 << 34, head=b'{"text": "a"}\n')
    with pytest.raises(DataError, match=r"(?s)/a has.*128 MiB"):
        tokenize({"source": kind, "paths": (path,)})


def test_parquet_rows_that_take_too_much_memory_are_refused(tmp_path: Path):
    pytest.importorskip("pyarrow")
    path = hostile.write_parquet_of_one_text(tmp_path / "a.parquet", rows=20, characters=MIB // 2)
    found = tokenize({"source": "parquet", "paths": (path,)})
    assert sum(len(one.ends) for one in found) == 20
    path = hostile.write_parquet_of_one_text(tmp_path / "a.parquet", rows=1000, characters=2 * MIB)
    with pytest.raises(DataError, match=r"(?s)a\.parquet.*(memory|malloc|alloc)"):
        tokenize({"source": "parquet", "paths": (path,)})


def test_one_text_very_many_times_is_refused(tmp_path: Path):
    pytest.importorskip("pyarrow")
    path = hostile.write_parquet_of_one_text(tmp_path / "a.parquet", rows=20_000, characters=MIB // 8)
    with pytest.raises(DataError, match=r"a\.parquet has over 64 tokens for each of its bytes"):
        build_data(run_of(tmp_path / "cache", source="parquet", paths=(path,)))


@pytest.mark.parametrize(
    "shape", ["(-5,)", "(-2, -3)", f"({2**62},)", f"({2**62}, 4)", "(True,)", "()", "(0,)"]
)
@pytest.mark.parametrize("dtype", ["<u2", "|O"])
def test_a_header_of_a_strange_array_is_refused(tmp_path: Path, shape: str, dtype: str):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    path = hostile.write_npy(tmp_path / "a.npy", header)
    with pytest.raises(DataError, match="not an array of tokens"):
        build_data(run_of(tmp_path / "cache", source="memmap", paths=(path,)))


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path):
    head = b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little")
    path = hostile.write_sparse(tmp_path / "a.npy", 1 << 33, head=head)
    with pytest.raises(DataError, match="not an array of tokens.*\n.*a header of more than"):
        build_data(run_of(tmp_path / "cache", source="memmap", paths=(path,)))


def test_an_error_in_a_worker_is_a_data_error_and_what_it_prints_is_no_answer(capfd: Any):
    with pytest.raises(DataError, match=r"it is wrong\.\n  got: maximum recursion depth"):
        call_in_worker(partial(json.loads, "[" * 100_000), what="it is wrong.")
    assert "Traceback" not in capfd.readouterr().err
    assert call_in_worker(partial(os.write, 1, pickle.dumps("not an answer")), what="") == []


def test_very_many_documents_of_almost_no_token_are_refused(tmp_path: Path):
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (10000000, 1), }"
    path = hostile.write_npy(tmp_path / "a.npy", header, size=10_000_000)
    np.zeros(10_000_000, np.uint8).tofile(tmp_path / "b.bin")
    for source in (
        {"paths": (path,)},
        {"paths": (str(tmp_path / "b.bin"),), "dtype": "uint8", "eod_token": 0},
    ):
        section = run_of(tmp_path / "cache", source="memmap", **source).data
        with pytest.raises(DataError, match="too many documents"):
            open_token_stores(section, section, root=tmp_path / "cache", alive=no_heartbeat)


def test_a_large_packed_file_has_the_tokens_of_the_plain_one_by_any_number_of_workers(tmp_path: Path):
    rows = [json.dumps({"text": text}) for text in ["the cat sat " * 40, "é" * 3000, "a\nb"] * 1000]
    data = "\n".join(rows).encode()
    (tmp_path / "0.jsonl").write_bytes(data)
    for name in ("1", "2"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(data, 1))
    plain, *packed = sorted(str(path) for path in tmp_path.glob("*.*"))

    def joined(paths: list[str], processes: int) -> bytes:
        found = tokenize({"source": "jsonl", "paths": paths}, processes=processes)
        assert len(found) > len(paths)  # in pieces
        assert sum(one.size for one in found) == sum(Path(path).stat().st_size for path in paths)
        return b"".join(one.tokens.tobytes() for one in found)

    tokens = joined([plain], processes=0)
    assert joined(packed, processes=1) == tokens * 2
    assert joined([*packed, plain], processes=2) == tokens * 3


def test_the_limits_are_those_of_one_call(tmp_path: Path):
    rows = [{"text": "the cat"}] * 30
    settings = {"source": "jsonl", "paths": (write_json_lines(tmp_path / "b.jsonl", rows),)}
    settings["tokenizer"] = save_tokenizer(tmp_path / "tok")
    expected = tokenize(settings, processes=0)
    with pytest.raises(DataError, match="memory"):
        tokenize(hostile.hostile_tokenizer("replace", tmp_path))
    (found,), (again,) = tokenize(settings), expected
    assert found.tokens.tobytes() == again.tokens.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("name", ["power", "long text", "loops"])
def test_templates_end_at_the_real_limits(tmp_path: Path, name: str):
    settings = hostile.hostile_template(name, tmp_path)
    with pytest.raises(DataError, match=r"(?si)a\.jsonl.*(memory|20 s of processor time)"):
        build_data(run_of(tmp_path / "cache", **settings))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_maxrss < 1400 << 10  # KiB, with the packages
