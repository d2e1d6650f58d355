"""Rank 0 shows and keeps every step, the other ranks nothing; a tracker that is lost does not end a run."""

import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.errors import MissingExtraError, TrainError
from fullshard.observe.progress import ProgressPrinter, RunProgress
from fullshard.observe.run_log import RunLog, open_run_log
from fullshard.observe.trackers import TrackerThread
from fullshard.spec.records.run_files import METRICS
from fullshard.spec.run import Run
from fullshard.training.figures import PendingResult, StepResult
from fullshard.training.loop import Step


def step(index: int) -> Step:
    figures = StepResult(loss=2.5, grad_norm=1.0, tokens=100, trained_tokens=20, skipped=False)
    result = PendingResult(lambda: figures)
    timer: Any = SimpleNamespace(seconds=0.5)
    return Step(index=index, learning_rate=1e-3, data_seconds=0.0, result=result, timer=timer)


def run(directory: Path, **log: object) -> Run:
    return Run.parse({"run": {"dir": str(directory)}, "train": {"steps": 4}, "log": log}, source="the test")


class Remembering:
    """A tracker that keeps what it gets, until it is lost after `lost_after` steps."""

    run_id = None

    def __init__(self, lost_after: int = 100) -> None:
        self.steps: list[int] = []
        self.exit_code: int | None = None
        self._lost_after = lost_after

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if len(self.steps) >= self._lost_after:
            raise TrainError("the tracker is gone.")
        self.steps.append(step)

    def close(self, *, exit_code: int) -> None:
        self.exit_code = exit_code


def test_rank_0_shows_and_keeps_every_step(tmp_path: Path):
    file = io.StringIO()
    with open_run_log(
        run(tmp_path, every=2), rank=0, world_size=2, peak_tokens_per_second=2000, file=file
    ) as log:
        for index in (1, 2, 3, 4):
            log.record_step(step(index), results={"validation_loss": 2.0} if index == 4 else {})
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["mfu"] == pytest.approx(200 / 2000)
    assert lines[3]["validation_loss"] == 2.0
    shown = file.getvalue().splitlines()
    assert [line.split()[1] for line in shown[:3]] == ["1/4", "2/4", "4/4"]
    assert shown[3] == "step 4: validation loss 2.0000"


def test_other_ranks_show_and_keep_nothing(tmp_path: Path):
    file = io.StringIO()
    with open_run_log(run(tmp_path / "run"), rank=1, world_size=2, file=file) as log:
        log.record_step(step(1), results={"validation_loss": 2.0})
        log.print_message("saved")
    assert file.getvalue() == ""
    assert list(tmp_path.iterdir()) == []


def test_trackers_get_every_nth_step_and_those_that_were_validated():
    tracker = Remembering()
    log = RunLog(every=3, trackers=[TrackerThread("one", tracker)])
    for index in range(1, 8):
        log.record_step(step(index), results={"validation_loss": 2.0} if index == 4 else {})
    log.close_trackers(exit_code=1)
    assert tracker.steps == [3, 4, 6]
    assert tracker.exit_code == 1


def test_failed_tracker_is_reported_once():
    file = io.StringIO()
    shown = ProgressPrinter(RunProgress(steps=9, world_size=1), every=9, file=file)
    lost, other = Remembering(lost_after=1), Remembering()
    log = RunLog(
        every=1, progress=shown, trackers=[TrackerThread("lost", lost), TrackerThread("other", other)]
    )
    for index in (1, 2, 3):
        log.record_step(step(index))
    log.close_trackers()
    assert (lost.steps, other.steps) == ([1], [1, 2, 3])
    assert file.getvalue().count("the tracker is gone") == 1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_tracker_is_refused_on_every_rank(tmp_path: Path, name: str, rank: int):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with (
        pytest.raises(MissingExtraError, match=rf"fullshard\[{name}\]"),
        open_run_log(run(tmp_path, trackers=[name]), rank=rank, world_size=2),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
