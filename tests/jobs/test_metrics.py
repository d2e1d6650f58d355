"""metrics.jsonl: one whole line a step, whatever happened to the runs that wrote it."""

import json
import math
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import TrainError
from fullshard.observe.run_log import PREVIOUS_METRICS, MetricsLog
from fullshard.observe.step_metrics import StepMetrics
from fullshard.spec.records.run_files import METRICS


def metrics(step: int, *, loss: float = 2.5, skipped: bool = False) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=100,
        trained_tokens=20,
        seconds=0.5,
        skipped=skipped,
    )


def write(directory: Path, steps: range, *, after_step: int = 0) -> None:
    log = MetricsLog(directory, after_step=after_step)
    for step in steps:
        log.write_step(metrics(step))
    log.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_line_has_the_figures_of_its_step_at_once(tmp_path: Path):
    log = MetricsLog(tmp_path / "runs" / "new")
    log.write_step(metrics(1))
    assert json.loads(log.path.read_text()) == {
        "step": 1,
        "loss": 2.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 100,
        "trained_tokens": 20,
        "seconds": 0.5,
        "skipped": False,
        "tokens_per_second": 200.0,
    }
    log.close()


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path):
    log = MetricsLog(tmp_path)
    log.write_step(metrics(1, loss=math.nan, skipped=True))
    log.close()
    assert json.loads(log.path.read_text())["loss"] is None


@given(done=st.integers(0, 8), resumed=st.integers(1, 8), cut=st.integers(0, 300))
def test_after_a_crash_and_a_resume_every_step_has_one_line(
    tmp_path_factory: pytest.TempPathFactory, done: int, resumed: int, cut: int
):
    directory = tmp_path_factory.mktemp("run")
    path = directory / METRICS
    write(directory, range(1, done + 1))
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - cut)])  # the crash
    whole = steps_in_whole_lines(path)
    write(directory, range(resumed + 1, 10), after_step=resumed)
    assert steps_in(path) == [step for step in whole if step <= resumed] + list(range(resumed + 1, 10))
    assert [entry.name for entry in directory.iterdir()] == [METRICS]


def steps_in_whole_lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().split(b"\n")[:-1]]


def test_a_new_run_keeps_the_file_of_the_last(tmp_path: Path):
    write(tmp_path, range(1, 4))
    write(tmp_path, range(1, 3))
    assert steps_in(tmp_path / METRICS) == [1, 2]
    assert steps_in(tmp_path / PREVIOUS_METRICS) == [1, 2, 3]


def test_a_disk_that_takes_no_more_ends_the_run_with_a_reason(tmp_path: Path):
    log = MetricsLog(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(TrainError, match="100 of .* bytes were written"):
            log.write_step(metrics(1))
        with pytest.raises(TrainError, match="File too large"):
            log.write_step(metrics(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.close()
