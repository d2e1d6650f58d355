"""Small text read as bytes is data like any other, but in memory: no cache, no process, no wait."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.cli.main import main
from fullshard.data.build import build_packed_data, tokenizer_vocabulary_size
from fullshard.data.packed import PackedData
from fullshard.errors import DataError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.data.samples import plan_of, run_of

S = 5
laws = settings(max_examples=25)


def data_of(directory: Path, pattern: str = "*", **settings: object) -> PackedData:
    section = {"source": "text", "paths": (f"{directory}/{pattern}",), "sequence_length": S, **settings}
    return build_packed_data(run_of(directory / "cache", **section))


def letters(directory: Path, *, count: int = 26, size: int = 20) -> Path:
    """Files of one letter each."""
    for i in range(count):
        (directory / f"{i:02}.txt").write_bytes(bytes([ord("A") + i]) * size)
    return directory


def rows_of(data: PackedData, steps: range, plan: Plan) -> list[list[int]]:
    shares = [
        [batch for step in steps for batch in data.microbatches(step, rank=rank, plan=plan)]
        for rank in range(plan.world_size)
    ]
    return [row for turn in zip(*shares, strict=True) for batch in turn for row in batch["tokens"].tolist()]


@laws
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from(["concat", "best_fit"]), st.integers(0, 100))
def test_any_number_of_ranks_sees_the_same_samples_from_any_step_on(tmp_path_factory, world, packing, step):
    data = data_of(letters(tmp_path_factory.mktemp("text")), packing=packing)
    alone = rows_of(data, range(step, step + 2), plan_of(1, 12))
    assert rows_of(data, range(step, step + 2), plan_of(world, 12 // world)) == alone


def test_the_default_run_needs_no_cache_and_knows_its_text(tmp_path: Path):
    data = build_packed_data(Run.parse({"data": {"cache": str(tmp_path / "cache")}}, source="test"))
    assert not (tmp_path / "cache").exists()
    assert data.training_token_count > 5_000_000
    assert 0.04 < data.validation_tokens / (data.validation_tokens + data.training_token_count) <= 0.05
    assert "import " in data.decode(torch.from_numpy(data.token_stores[0].tokens[:100_000].astype(np.int64)))


def test_text_in_memory_has_the_tokens_and_rows_of_the_cache(tmp_path: Path):
    letters(tmp_path)
    here = data_of(tmp_path, "*.txt")
    lines = "".join(f'{{"text": "{chr(ord("A") + i) * 20}"}}\n' for i in range(26))
    (tmp_path / "a.jsonl").write_text(lines)
    mapped = data_of(tmp_path, "a.jsonl", source="jsonl")
    assert isinstance(mapped.token_stores[0].tokens, np.memmap)
    assert not isinstance(here.token_stores[0].tokens, np.memmap)
    plan = plan_of(2, 3, validate_sequences=4)
    assert rows_of(here, range(20), plan) == rows_of(mapped, range(20), plan)
    for rank in range(2):
        both = (data.validation(rank=rank, plan=plan) for data in (here, mapped))
        assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(*both, strict=True))


def test_no_document_is_on_both_sides(tmp_path: Path):
    data = data_of(letters(tmp_path), validation_fraction=0.25)
    plan = plan_of(1, 1, validate_sequences=1000)
    epoch = rows_of(data, range(data.pools[0].training.row_count), plan)
    held_out = {
        token for batch in data.validation(rank=0, plan=plan) for token in batch["tokens"].ravel().tolist()
    }
    trained = {token for row in epoch for token in row}
    assert trained & held_out == {0}
    assert len(trained | held_out) == 27
    assert (data.document_count, len(held_out)) == (26, 7)


def test_data_does_not_depend_on_where_it_lies(tmp_path: Path):
    found = []
    for place in ("here", "there/below"):
        (tmp_path / place).mkdir(parents=True)
        found.append(data_of(letters(tmp_path / place)))
    here, there = (rows_of(data, range(9), plan_of(1, 4)) for data in found)
    assert here == there


def test_nothing_is_held_out_at_fraction_zero(tmp_path: Path):
    data = data_of(letters(tmp_path), validation_fraction=0)
    assert data.validation_tokens == 0
    assert list(data.validation(rank=0, plan=plan_of(2, 2))) == []
    assert "none held out" in data.describe()


@pytest.mark.parametrize(
    ("size", "fraction", "message"),
    [
        (S - 1, 0.0, r"training part(?s:.)*got: 5 tokens(?s:.)*needs 6(?s:.)*shorter data.sequence_length"),
        (100, 0.05, r"held-out part(?s:.)*got: 5 tokens(?s:.)*larger data.validation_fraction"),
        (100, 0.002, r"held-out part(?s:.)*got: 0 tokens"),
        (100, 0.95, r"training part(?s:.)*got: 5 tokens"),
    ],
)
def test_text_too_short_for_one_sequence_is_refused(tmp_path: Path, size: int, fraction: float, message: str):
    (tmp_path / "a.txt").write_text("a" * size)
    with pytest.raises(DataError, match=f"sequence too long: the {message}"):
        data_of(tmp_path, validation_fraction=fraction)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"ab\0cd", r"(?s)a\.txt\..*a text holds a NUL byte"),
        (b"ab\xffcd", r"(?s)a\.txt at byte 2.*no UTF-8.*skip"),
    ],
)
def test_files_that_are_no_text_are_refused_by_name(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        data_of(tmp_path)


def test_a_model_without_room_for_bytes_is_refused(capsys):
    assert tokenizer_vocabulary_size(Run().data) == 256
    assert main(["data", "prepare", "--set", "model.vocabulary=255"]) == 2
    assert "a vocabulary of 255" in capsys.readouterr().err
