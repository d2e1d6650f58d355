"""build_data gives what [data] names, the same on all ranks, and refuses what cannot be trained on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fullshard.cli.main import main
from fullshard.data.build import build_data, build_packed_data, resolve_epochs, tokenizer_vocabulary_size
from fullshard.data.packed import PackedData
from fullshard.errors import DataError, FullshardError, SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import check_own_model_has_data
from tests.data.samples import END, plan_of, run_of, save_tokenizer, texts_file, write_json_lines

THIS = "tests.data.test_build"


class Ones:
    """Batches without a size or a description."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[int]:
        yield from [1] * plan.accumulation


def make_ones(run: Run) -> Ones:
    return Ones()


class TenSequences(Ones):
    training_sequences = 10


def make_ten_sequences(run: Run) -> TenSequences:
    return TenSequences()


def make_nothing(run: Run) -> None:
    return None


def first_rows(cache: str, path: str) -> list[int]:
    """Returns the first row of this rank, from a cache that is empty for all ranks."""
    data = build_data(run_of(Path(cache), source="jsonl", paths=(path,), packing="best_fit"))
    rank, world = dist.get_rank(), dist.get_world_size()
    return next(data.microbatches(0, rank=rank, plan=plan_of(world, 1)))["tokens"].flatten().tolist()


def test_ranks_that_start_together_make_the_tokens_once_and_share_them(ranks, tmp_path: Path):
    path = texts_file(tmp_path / "a.jsonl", 60)
    found = ranks(3).run(first_rows, str(tmp_path / "cache"), path)
    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 1
    alone = build_data(run_of(tmp_path / "cache", source="jsonl", paths=(path,), packing="best_fit"))
    (batch,) = alone.microbatches(0, rank=0, plan=plan_of(1, 3))
    assert found == batch["tokens"].tolist()


def test_sources_without_weights_are_one(tmp_path: Path):
    sources = [
        {"source": "jsonl", "paths": (texts_file(tmp_path / f"{i}.jsonl", 20, first=100 * i),)}
        for i in (0, 1)
    ]
    data = build_data(run_of(tmp_path / "cache", sources=sources, packing="best_fit"))
    assert isinstance(data, PackedData)
    assert (len(data.pools), data.document_count) == (1, 40)


def test_epochs_are_the_steps_that_train_on_each_sequence_so_often(tmp_path: Path):
    run = run_of(tmp_path, source="python", factory=f"{THIS}:make_ten_sequences")
    for epochs, steps in ((0.1, 1), (1, 4), (1.2, 4), (1.21, 5), (3, 10)):
        asked = run.with_overrides(["train.global_batch=3", f"train.epochs={epochs}"])
        resolved = resolve_epochs(asked, build_data(asked))
        assert resolved == run.with_overrides(["train.global_batch=3", f"train.steps={steps}"])
    continued = resolve_epochs(asked, build_data(asked), step=4, rows=16)  # of 30, with another batch before
    assert continued.train.step_count == 4 + 5
    assert resolve_epochs(run, build_data(run)) is run
    unsized = run.with_overrides([f"data.factory={THIS}:make_ones", "train.epochs=1"])
    with pytest.raises(DataError, match="training_sequences"):
        resolve_epochs(unsized, build_data(unsized))


def test_a_factory_of_the_user_makes_the_batches(tmp_path: Path):
    data = build_data(run_of(tmp_path, source="python", factory=f"{THIS}:make_ones"))
    assert list(data.microbatches(0, rank=0, plan=plan_of(1, 1, 3))) == [1, 1, 1]
    assert (data.vocabulary, data.validation_tokens) == (None, 0)
    assert list(data.validation(rank=0, plan=plan_of(1, 1))) == []
    assert "make_ones" in data.describe()


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
def test_a_part_without_a_sequence_is_refused(tmp_path: Path, packing: str):
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": "a" * 30}])
    settings = {"source": "jsonl", "paths": (path,), "packing": packing}
    if packing == "concat":
        with pytest.raises(DataError, match=r"(?s)sequence too long: the training.*got: 31.*needs 65"):
            build_data(run_of(tmp_path, **settings, sequence_length=64, validation_fraction=0))
    with pytest.raises(DataError, match=r"(?s)held-out part.*validation_fraction"):
        build_data(run_of(tmp_path, **settings, sequence_length=16, validation_fraction=0.01))


def test_sequences_of_mostly_padding_are_reported(tmp_path: Path):
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": "a" * i} for i in range(5, 30)])
    settings = {"source": "jsonl", "paths": (path,), "packing": "none", "validation_fraction": 0}
    for length, reported in ((40, True), (30, False)):  # documents of 18 tokens on average
        data = build_packed_data(run_of(tmp_path, **settings, sequence_length=length))
        assert data.document_count == 25
        assert ("token positions are padding" in data.describe()) == reported


def test_tokens_that_the_tokenizer_does_not_know_are_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(1000))
    settings = {"source": "memmap", "paths": (f"{tmp_path}/a.npy",)}
    assert build_data(run_of(tmp_path / "cache", **settings)).vocabulary == 1000
    with pytest.raises(DataError, match=r"(?s)not made with.*token 999; the tokenizer has"):
        build_data(run_of(tmp_path / "cache", **settings, tokenizer=save_tokenizer(tmp_path / "tok")))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "jsonl"}, "needs paths"),
        ({"source": "datasets"}, "paths = .* or name"),
        ({"source": "datasets", "paths": ("a",), "subset": "b"}, "name = .* and maybe a subset"),
        ({"source": "jsonl", "paths": ("a", "b", "a")}, "paths has 'a' twice"),
        ({"sources": [{"source": "jsonl", "paths": ("a",)}], "factory": "a:b"}, "factory is given"),
        ({"source": "jsonl", "paths": ("a",), "name": "b"}, "name, subset and split are for"),
        ({"source": "jsonl", "paths": ("a",), "split": "test"}, "name, subset and split are for"),
        ({"source": "jsonl", "paths": ("a",), "messages_field": "b"}, 'records = "messages"'),
        ({"source": "jsonl", "paths": ("a",), "records": "tokens", "text_field": "b"}, 'records = "text"'),
        ({"source": "text", "paths": ("a",), "text_field": "b"}, "it is for jsonl, parquet or datasets"),
        ({"options": {"a": 1}}, "options is given; set source"),
        ({"source": "text", "paths": ("a",), "dtype": "uint16"}, "for source = .memmap"),
        ({"source": "text", "paths": ("a",), "records": "completion"}, "for jsonl, parquet and datasets"),
        ({"source": "jsonl", "paths": ("a",), "records": "messages"}, "needs a tokenizer"),
        ({"source": "jsonl", "paths": ("a",), "train_on": "completion"}, 'needs records = "messages" or'),
        ({"eos_token": "a"}, "needs a tokenizer"),
        ({"source": "python"}, "needs factory"),
        ({"factory": "a:b"}, "set source"),
        ({"sources": [{"source": "jsonl", "paths": ("a",)}], "paths": ("b",)}, "either paths"),
        ({"sources": [{"source": "jsonl", "paths": ("a",)}], "text_field": "b"}, "either text_field"),
        ({"sources": [{"source": "jsonl", "paths": ("a",)}], "source": "stdlib"}, "either source"),
        (
            {
                "sources": [
                    {"source": "jsonl", "paths": ("a",), "weight": 1},
                    {"source": "text", "paths": ("a",)},
                ]
            },
            "all sources, or to none",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, data: dict[str, object], message: str):
    with pytest.raises(SpecError, match=message):
        run_of(tmp_path, **data)


def test_a_factory_without_batches_is_refused(tmp_path: Path):
    with pytest.raises(FullshardError, match="gave no batches"):
        build_data(run_of(tmp_path, source="python", factory=f"{THIS}:make_nothing"))


@pytest.mark.parametrize("setting", ["model.hf=/absent", "model.python=a:b", "data.tokenizer=/absent"])
def test_a_model_or_a_tokenizer_without_a_data_source_is_refused(setting: str):
    run = Run.load(overrides=[setting])
    for same in (run, Run.model_validate_json(run.model_dump_json())):
        with pytest.raises(SpecError, match="the run has no data"):
            build_data(same)
    check_own_model_has_data(Run.load(overrides=[setting, "data.source=stdlib"]))
    check_own_model_has_data(Run.load())


def test_a_run_with_sources_is_read_back_from_json(tmp_path: Path):
    sources = [
        {"source": "jsonl", "paths": ("a",), "weight": 0.7},
        {"source": "text", "paths": ("b",), "weight": 1},
    ]
    run = run_of(tmp_path, sources=sources)
    assert Run.model_validate_json(run.model_dump_json()) == run


def test_texts_that_already_have_the_end_token_are_counted(tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    rows = write_json_lines(
        tmp_path / "rows.jsonl", [{"text": "one two " * 20}] * 20 + [{"text": f"one two{END}"}]
    )
    data = build_data(
        run_of(tmp_path / "cache", source="jsonl", paths=(str(rows),), tokenizer=str(tokenizer))
    )
    (warning,) = data.summary_values()["warnings"]
    assert warning.startswith("1 texts of rows.jsonl already begin or end with the tokens")


def test_rows_without_tokens_are_counted_in_one_line(tmp_path):
    rows = [{"input_ids": list(range(40))}] * 20 + [
        {"input_ids": []},
        {"input_ids": []},
        {"input_ids": [1, 2]},
    ]
    path = write_json_lines(tmp_path / "rows.jsonl", rows)
    run = run_of(tmp_path / "cache", source="jsonl", records="tokens", paths=(str(path),))
    for _ in range(2):  # the second time from the cache
        data = build_data(run)
        assert data.document_count == 21
        assert "warning: 2 documents of rows.jsonl are empty, and left out" in data.describe().splitlines()


BYTES_LENGTH = 5


def data_of(directory: Path, pattern: str = "*", **settings: object) -> PackedData:
    section = {
        "source": "text",
        "paths": (f"{directory}/{pattern}",),
        "sequence_length": BYTES_LENGTH,
        **settings,
    }
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


def test_the_default_run_writes_no_token_cache(tmp_path: Path):
    data = build_packed_data(Run.parse({"data": {"cache": str(tmp_path / "cache")}}, source="test"))
    assert not (tmp_path / "cache").exists()
    assert data.training_token_count > 5_000_000
    assert 0.04 < data.validation_tokens / (data.validation_tokens + data.training_token_count) <= 0.05
    assert b"import " in data.token_stores[0].tokens[:100_000].tobytes()


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
