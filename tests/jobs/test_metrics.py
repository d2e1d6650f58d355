"""metrics.jsonl: one whole line a step, whatever happened to the runs that wrote it."""

import errno
import json
import math
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.location import newest_complete_step
from fullshard.errors import FullshardError, TrainError
from fullshard.observe.run_log import PREVIOUS_METRICS, MetricsLog
from fullshard.observe.step_metrics import StepMetrics
from fullshard.spec.records.event import read_events
from fullshard.spec.records.run_files import EVENTS, METRICS
from tests.faults.disks import powerless_disk
from tests.jobs.test_train import leaves_a_measurement
from tests.ranks import RankFailed


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
        with pytest.raises(TrainError, match="a file may not grow so large there"):
            log.write_step(metrics(1))
        with pytest.raises(TrainError, match="File too large"):
            log.write_step(metrics(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        log.close()


def test_a_flush_reaches_the_lines_the_events_and_their_directory(tmp_path: Path):
    log, flushed = MetricsLog(tmp_path), list[int]()
    (tmp_path / EVENTS).touch()
    log.write_step(metrics(1))
    log.flush_to_disk(fsync=lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    log.close()
    assert flushed == [one.stat().st_ino for one in (tmp_path / METRICS, tmp_path / EVENTS, tmp_path)]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EIO, "run.dir on another disk, and a look at the system's log"),
        (errno.ENOSPC, "free some space there, or run.dir on a disk with room"),
        (errno.EDQUOT, "free some space there, or run.dir on a disk with room"),
        (errno.EROFS, "run.dir that can be written"),
        (errno.ESTALE, "the mount, then again, or run.dir on a local disk"),
        (errno.EUCLEAN, "fsck, or run.dir on another disk"),
        (errno.EBADF, "a look at the disk"),
    ],
)
def test_a_disk_that_fails_ends_the_run_with_the_advice_that_helps(tmp_path: Path, number: int, advice: str):
    def fsync(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    log = MetricsLog(tmp_path)
    with pytest.raises(TrainError) as raised:
        log.flush_to_disk(fsync=fsync)
    log.close()
    assert raised.value.got == os.strerror(number)
    assert raised.value.fix == f"{advice}; then fullshard train --resume"


def test_a_power_cut_takes_no_line_that_a_checkpoint_acknowledges(ranks: Any, tmp_path: Path):
    with powerless_disk(tmp_path) as disk:
        run = disk.mounted_at / "run"

        def cut() -> None:
            while not list(run.glob("checkpoints/step-*6")):
                time.sleep(0.001)
            disk.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises((FullshardError, RankFailed, OSError, RuntimeError)):
            ranks(1).run(leaves_a_measurement, str(run), 1000, "checkpoint.every=3")
        thread.join()
        disk.restart()
        saved = newest_complete_step(run / "checkpoints") or 0
        assert saved >= 3  # the power may go between the rename of step 6 and its acknowledgement
        assert set(range(1, saved + 1)) <= set(steps_in_whole_lines(run / METRICS))
        assert [one.step for one in read_events(run / EVENTS, kind="save")][:1] == [3]
