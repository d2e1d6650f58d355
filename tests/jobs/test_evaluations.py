"""Runs with [[evaluate]]: what they record, and the checkpoint with the best result, which is kept."""

import io
import json
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.location import location_of
from fullshard.checkpoint.manifest import read_manifest
from fullshard.cli.main import main
from fullshard.errors import DataError, SpecError
from fullshard.jobs.train import run_job
from fullshard.spec.plan import Plan
from fullshard.spec.records.measurement import Measurement
from fullshard.spec.run import Run
from fullshard.spec.settings.evaluate_section import results_text
from tests.data.samples import save_tokenizer, write_json_lines
from tests.jobs.test_train import TINY
from tests.training.test_harness import METRICS, save_tasks

calls = WeakKeyDictionary[nn.Module, Iterator[int]]()
TASK = ('evaluate=[{name="a", task="lm_eval:d"}]', "data.tokenizer=t", "data.source=text", "data.paths=['a']")
QUIZ = 'call="tests.jobs.test_evaluations:quiz"'


def quiz(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """The accuracies that stand in `accuracies.json` beside the run, one for each call; halves for ranks."""
    accuracies = json.loads(Path(plan.run.run.dir).with_name("accuracies.json").read_text())
    value = accuracies[next(calls.setdefault(model, count()))]
    return {"accuracy": (value * (1 + dist.get_rank()), 1 + dist.get_rank()), "asked": 7}


def resume_run(directory: str, *settings: str) -> str:
    return train_run(directory, *settings, resume=True)


def train_run(directory: str, *settings: str, resume: bool = False) -> str:
    """Trains, and returns what is printed."""
    run = Run.load(overrides=[*TINY, f"run.dir={directory}", "log.trace_every=0", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    with redirect_stderr(io.StringIO()) as printed:
        run_job(plan.run, resume=resume, plan=plan, command_started=time.time())
    return printed.getvalue()


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def texts(directory: Path, name: str, *, rows: int) -> str:
    return write_json_lines(directory / name, ({"text": f"{name} {i} " * 9} for i in range(rows)))


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, ...]:
    paths = [texts(tmp_path, name, rows=rows) for name, rows in (("train.jsonl", 60), ("held.jsonl", 5))]
    cache = f"data.cache={tmp_path / 'cache'}"
    source = ("data.source=jsonl", f"data.paths=['{paths[0]}']", f"data.validation_paths=['{paths[1]}']")
    return cache, *source


def test_results_are_those_of_the_validation_and_are_recorded(
    ranks: Any, tmp_path: Path, data: tuple[str, ...]
) -> None:
    (tmp_path / "accuracies.json").write_text("[0.25, 0.5, 0.75]")
    same = f'name="same", paths=["{tmp_path}/held.jsonl"], sequences=4, every=2'
    evaluate = f'evaluate=[{{{same}, at_start=true}}, {{name="quiz", {QUIZ}, every=2}}]'
    directory = tmp_path / "run"
    printed, _ = ranks(2).run(
        train_run, str(directory), *data, "train.steps=4", "train.validate_every=2", evaluate
    )
    start, *lines = lines_of(directory)
    assert start.keys() == {"step", "same.loss"}
    assert (start["step"], [one["step"] for one in lines]) == (0, [1, 2, 3, 4])
    for line in lines:
        assert ("same.loss" in line) == ("validation_loss" in line) == (line["step"] % 2 == 0)
        assert line.get("same.loss") == line.get("validation_loss")
    assert [(one["quiz.accuracy"], one["quiz.asked"]) for one in lines[1::2]] == [(0.25, 7.0), (0.5, 7.0)]
    loss = lines[-1]["same.loss"]
    assert 0 < loss < start["same.loss"]
    for text in (f"step 0: same loss {start['same.loss']:.4f}", f"step 4: same loss {loss:.4f}"):
        assert text in printed
    assert "step 4: quiz accuracy 0.5000, asked 7.0000" in printed
    results = Measurement.load(directory / "measurement.json").results
    assert results == {
        key: lines[-1][key] for key in ("validation_loss", "same.loss", "quiz.accuracy", "quiz.asked")
    }


def test_an_evaluation_is_of_the_averages_or_of_the_trained_weights(
    ranks: Any, tmp_path: Path, data: tuple[str, ...]
) -> None:
    held = f'paths=["{tmp_path}/held.jsonl"], sequences=4'
    evaluate = f'evaluate=[{{name="kept", {held}, weights="ema"}}, {{name="trained", {held}}}]'
    average = ("ema.decay=0.9", "ema.validation=true")
    settings = ("train.steps=4", "train.validate_every=4", "optimizer.learning_rate=0.01")
    printed, _ = ranks(2).run(train_run, str(tmp_path / "run"), *data, *settings, *average, evaluate)
    last = lines_of(tmp_path / "run")[-1]
    assert last["kept.loss"] == last["validation_loss"] > last["trained.loss"]
    assert "sequences, of the averages; at the end" in printed


def test_metrics_of_tasks_are_recorded_and_name_the_best_checkpoint(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tokenizer, task = save_tokenizer(tmp_path / "tokenizer"), save_tasks(tmp_path, documents=3)
    path = texts(tmp_path, "train.jsonl", rows=60)
    data = (
        "data.source=jsonl",
        f"data.paths=['{path}']",
        f"data.cache={tmp_path}",
        f"data.tokenizer={tokenizer}",
    )
    evaluate = f'evaluate=[{{name="quiz", task="{task}", at_start=true}}]'
    kept, directory = "checkpoint.keep_best=highest quiz.choice.acc", tmp_path / "run"
    settings = (*data, "data.validation_fraction=0", "model.vocabulary=300", "train.steps=2", evaluate, kept)
    printed, _ = ranks(2).run(train_run, str(directory), *settings)
    start, _, last = lines_of(directory)
    assert start.keys() - {"step"} == {f"quiz.{task}.{metric}" for task, metric in METRICS}
    assert start["quiz.text.bits_per_byte"] != last["quiz.text.bits_per_byte"]
    assert f"evaluation quiz: {task}; at the start, at the end" in printed
    manifest = read_manifest(directory / "checkpoints" / "step-00000002")
    assert manifest.values["best"]["quiz.choice.acc"]["value"] == last["quiz.choice.acc"]


def saved_steps(directory: Path) -> list[int]:
    return sorted(step for step, _ in location_of(directory / "checkpoints").list_checkpoints())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_checkpoint_is_kept_through_pruning_and_resume(
    ranks: Any, tmp_path: Path, mode: str, capsys: Any
) -> None:
    evaluate = f'evaluate=[{{name="quiz", {QUIZ}, every=1}}]'
    kept = ("checkpoint.keep=1", "checkpoint.keep_best=highest quiz.accuracy", f"checkpoint.mode={mode}")
    settings = (*kept, "checkpoint.every=3", "data.validation_fraction=0", evaluate)
    directory, values = tmp_path / "run", tmp_path / "accuracies.json"
    values.write_text("[0.1, 0.5, 0.2, 0.5, 0.4]")  # step 2, at which no save is due, is the best
    ranks(2).run(train_run, str(directory), *settings, "train.steps=5")
    assert saved_steps(directory) == [2, 5]
    values.write_text("[0.5, 0.45]")  # as good as the older one
    ranks(2).run(resume_run, str(directory), *settings, "train.steps=7")
    assert saved_steps(directory) == [2, 7]
    values.write_text("[0.1, 0.6, 0.1]")
    ranks(2).run(resume_run, str(directory), *settings, "train.steps=10")
    assert saved_steps(directory) == [9, 10]
    manifest = read_manifest(directory / "checkpoints" / "step-00000009")
    assert manifest.values["results"] == {
        "quiz.accuracy": {"value": 0.6, "step": 9, "data": None},
        "quiz.asked": {"value": 7.0, "step": 9, "data": None},
    }
    capsys.readouterr()
    assert main(["ckpt", "list", str(directory)]) == 0
    nine, ten = capsys.readouterr().out.splitlines()
    assert nine.endswith("quiz.accuracy 0.6000 (best)  quiz.asked 7.0000")
    assert ten.endswith("quiz.accuracy 0.1000  quiz.asked 7.0000")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (['evaluate=[{name="a"}]'], SpecError, "either paths"),
        (['evaluate=[{name="a", call="b:c", paths=["d"]}]'], SpecError, "either paths"),
        (['evaluate=[{name="a", call="b:c", sequences=3}]'], SpecError, "sequences = 3 is for paths"),
        (['evaluate=[{name="a", call="b:c", at_end=false}]'], SpecError, "never evaluated"),
        (['evaluate=[{name="a", call="b:c", weights="ema"}]'], SpecError, "set ema.decay"),
        (['evaluate=[{name="a.b", call="b:c"}]'], SpecError, "a letter, then letters"),
        (['evaluate=[{name="a", call="b:c"}, {name="a", call="b:d"}]'], SpecError, "'a' is used twice"),
        (['evaluate=[{name="validation", call="b:c"}]'], SpecError, "name of the validation"),
        (['evaluate=[{name="a", paths=["b"]}]'], SpecError, "source has no files"),
        (['evaluate=[{name="a", call="no_such_module:c"}]'], SpecError, "no_such_module"),
        (['evaluate=[{name="a", call="b:c", task="lm_eval:d"}]'], SpecError, "either paths"),
        (['evaluate=[{name="a", task="d"}]'], SpecError, 'not "lm_eval:NAME"'),
        (['evaluate=[{name="a", task="lm_eval:d"}]'], SpecError, "needs a tokenizer"),
        ([*TASK, "checkpoint.keep_best=a"], SpecError, "highest a.accuracy"),
        ([*TASK, "sharding.context_parallel=2"], SpecError, "sharding.context_parallel"),
        ([*TASK, "sharding.tensor_parallel=2"], SpecError, "sharding.tensor_parallel"),
        (["checkpoint.keep_best=a"], SpecError, "names no evaluation: validation"),
        (["checkpoint.keep_best=highest validation"], SpecError, "the lowest is best"),
        (['evaluate=[{name="a", call="b:c"}]', "checkpoint.keep_best=a.b"], SpecError, "lowest a.b"),
        (
            ["data.source=text", "data.paths=['README.md']", 'evaluate=[{name="a", paths=["missing/*"]}]'],
            DataError,
            "missing",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    settings: list[str], error: type[Exception], message: str, ranks: Any, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        ranks(1).run(train_run, str(tmp_path / "run"), *settings, f"data.cache={tmp_path}")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_names_that_begin_like_the_validation_stay_apart() -> None:
    found = {"validation_loss": 1.0, "validation_long.loss": 2.0, "my_validation_x.loss": 3.0}
    assert results_text(found) == [
        "validation loss 1.0000",
        "validation_long loss 2.0000",
        "my_validation_x loss 3.0000",
    ]
