"""Validation data that the user names: it is held out whole, and nothing of the training data is."""

from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.data.build import build_packed_data
from fullshard.data.packed import PackedData
from fullshard.errors import DataError, SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.data_section import IGNORED_LABEL
from fullshard.spec.settings.run_checks import unused_setting_notes
from tests.data.samples import CHAT, run_of, save_tokenizer, text, texts_file, write_json_lines

TEXTS = {"source": "jsonl", "packing": "concat"}


def plan_on(run: Run) -> Plan:
    return Plan.from_run(run.with_overrides(["train.global_batch=2", "train.microbatch=2"]), world_size=1)


def tokens_of(data: PackedData, run: Run, *, part: str) -> list[list[int]]:
    """The tokens of each row that is trained or validated on, without padding; sorted."""
    if part == "validation":
        batches = [*data.validation(rank=0, plan=plan_on(run))]
        rows = sum(pool.held_out.row_count for pool in data.pools)
    else:
        rows, plan = data.training_sequences, plan_on(run)
        batches = [one for step in range(-(-rows // 2)) for one in data.microbatches(step, rank=0, plan=plan)]
    found = [row for batch in batches for row in batch["tokens"].tolist()]
    return sorted(found[:rows])


def trained_on(directory: Path, path: str, **settings: object) -> list[list[int]]:
    run = run_of(directory / "cache", **{**TEXTS, **settings}, paths=(path,), validation_fraction=0)
    return tokens_of(build_packed_data(run), run, part="training")


@pytest.mark.parametrize("packing", ["concat", "best_fit", "none"])
@pytest.mark.parametrize("weights", [(), (3, 1)])
def test_the_named_files_are_the_validation_set_and_all_else_is_trained_on(
    tmp_path: Path, packing: str, weights: tuple[int, ...]
) -> None:
    train, held_out = (texts_file(tmp_path / f"{i}.jsonl", 30, first=100 * i) for i in range(2))
    one: dict[str, object] = {"source": "jsonl", "paths": (train,), "validation_paths": (held_out,)}
    run = run_of(tmp_path / "cache", packing=packing, **one)
    if weights:
        other = texts_file(tmp_path / "other.jsonl", 30, first=300)
        plain = {"source": "jsonl", "paths": (other,), "weight": weights[1]}
        run = run_of(tmp_path / "cache", packing=packing, sources=[{**one, "weight": weights[0]}, plain])
    data = build_packed_data(run)
    whole = "".join(f"{text(100 + i)}\0" for i in range(30)).encode()  # in the order of the file
    joined = sorted([*whole[i : i + 16]] for i in range(0, len(whole) - 16, 16))
    expected = joined if packing == "concat" else trained_on(tmp_path, held_out, packing=packing)
    assert tokens_of(data, run, part="validation") == expected
    if not weights:
        assert tokens_of(data, run, part="training") == trained_on(tmp_path, train, packing=packing)
    assert run.data.validation_fraction == 0
    assert run.train.validate_sequences == 0, "all are read"
    assert Run.parse(run.model_dump(mode="json"), source="a plan") == run
    assert unused_setting_notes(run.with_overrides(["train.validate_every=7"])) == []


def test_conversations_to_validate_on_have_the_template_and_the_mask_of_training(tmp_path: Path) -> None:
    rows = [
        [{"role": "user", "content": f"the cat {i}"}, {"role": "assistant", "content": "sat"}] for i in (1, 2)
    ]
    train, held_out = (
        write_json_lines(tmp_path / f"{i}.jsonl", [{"messages": one}]) for i, one in enumerate(rows)
    )
    settings = {
        "source": "jsonl",
        "records": "messages",
        "train_on": "assistant",
        "packing": "best_fit",
        "tokenizer": save_tokenizer(tmp_path / "tokenizer", template=CHAT),
        "sequence_length": 64,
    }
    run = run_of(tmp_path / "cache", **settings, paths=(train,), validation_paths=(held_out,))
    [batch] = build_packed_data(run).validation(rank=0, plan=plan_on(run))
    labels = batch["labels"][batch["labels"] != IGNORED_LABEL]
    assert 0 < len(labels) < 20, "the answer alone, of one conversation"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_fraction": 0.1}, "the whole validation set: set validation_fraction = 0"),
        ({"paths": ("b",)}, "'b' is in paths and in validation_paths"),
        ({"source": "stdlib", "paths": ()}, 'set source = "text"'),
        ({"source": "python", "factory": "a:b"}, "validates on its own `validation`"),
        (
            {"sources": [{"source": "jsonl", "paths": ["c"]}], "source": None, "paths": ()},
            "either validation_paths",
        ),
    ],
)
def test_what_contradicts_named_validation_data_is_refused(settings: dict[str, Any], message: str) -> None:
    section = {"source": "jsonl", "paths": ("a",), "validation_paths": ("b",), **settings}
    with pytest.raises(SpecError, match=message):
        Run.parse({"data": section}, source="test")


def test_a_file_that_is_trained_on_too_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for i in range(2):
        held_out = texts_file(tmp_path / "data" / f"{i}.jsonl", 9, first=9 * i)
    run = run_of(tmp_path / "cache", **TEXTS, paths=(str(tmp_path / "data"),), validation_paths=(held_out,))
    with pytest.raises(DataError, match=r"1\.jsonl is in both the training and the validation data"):
        build_packed_data(run)


def test_validation_data_too_short_for_a_sequence_is_refused_by_name(tmp_path: Path) -> None:
    train, short = texts_file(tmp_path / "a.jsonl", 30), texts_file(tmp_path / "short.jsonl", 1)
    run = run_of(tmp_path / "cache", **TEXTS, paths=(train,), validation_paths=(short,))
    with pytest.raises(DataError, match=r"the held-out part of short\.jsonl does not fill one"):
        build_packed_data(run)


def test_other_validation_data_leaves_the_row_order_and_has_another_digest(tmp_path: Path) -> None:
    train = texts_file(tmp_path / "train.jsonl", 30)
    found: list[PackedData] = []
    for first in (100, 200):
        held_out = texts_file(tmp_path / f"{first}.jsonl", 9, first=first)
        run = run_of(tmp_path / "cache", **TEXTS, paths=(train,), validation_paths=(held_out,))
        found.append(build_packed_data(run))
    assert found[0].row_order == found[1].row_order
    assert None is not found[0].validation_digest != found[1].validation_digest
    alone = build_packed_data(run_of(tmp_path / "cache", **TEXTS, paths=(train,), validation_fraction=0))
    assert alone.row_order == found[0].row_order
    assert alone.validation_digest is None


def test_data_prepare_names_the_validation_files(tmp_path: Path, capsys: Any) -> None:
    paths = [texts_file(tmp_path / f"{name}.jsonl", 30) for name in ("train", "held_out")]
    settings = (
        *("data.source=jsonl", f'data.paths=["{paths[0]}"]', f'data.validation_paths=["{paths[1]}"]'),
        *(f"data.cache={tmp_path}/cache", "data.sequence_length=16"),
    )
    assert main(["data", "prepare", *(part for one in settings for part in ("--set", one))]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["source"].endswith(" train.jsonl")
    assert lines["validated"].endswith(" held_out.jsonl")
