"""Small text read as bytes is data like any other, but in memory: no cache, no process, no wait."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fullshard.cli.main import main
from fullshard.data.build import build_packed_data, tokenizer_vocabulary_size
from fullshard.data.packed import PackedData
from fullshard.errors import DataError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.data.samples import plan_of, run_of

S = 5


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


def test_the_default_run_needs_no_cache(tmp_path: Path):
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


def test_rows_do_not_depend_on_the_directory_of_the_files(tmp_path: Path):
    rows = []
    for place in ("first", "second/below"):
        (tmp_path / place).mkdir(parents=True)
        rows.append(rows_of(data_of(letters(tmp_path / place)), range(9), plan_of(1, 4)))
    assert rows[0] == rows[1]


def test_fraction_zero_has_no_validation_rows(tmp_path: Path):
    data = data_of(letters(tmp_path), validation_fraction=0)
    assert data.validation_tokens == 0
    assert list(data.validation(rank=0, plan=plan_of(2, 2))) == []
    assert "none held out" in data.describe()


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
