"""events.jsonl: what happened to a run, kept through rollbacks and resumes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.errors import DataError
from fullshard.jobs.train import run_job
from fullshard.launch.outcome import FailureReport, LaunchEventLog, OwnFaultRecorder
from fullshard.spec.plan import Plan
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run
from fullshard.system.process import watchdog_exit_receivers
from tests.jobs.test_train import TINY


def train(directory: str, settings: tuple[str, ...], resume: bool) -> None:
    run = Run.load(overrides=[*TINY, "log.trace_every=0", f"run.dir={directory}", *settings])
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    run_job(plan.run, resume=resume, plan=plan, command_started=time.time())


def kinds(directory: Path) -> list[tuple[int, str, int | None]]:
    return [(one.attempt, one.event, one.step) for one in read_events(directory / EVENTS)]


def test_a_resumed_run_keeps_the_events_of_its_earlier_attempts(ranks, tmp_path: Path):
    pool, directory = ranks(2), tmp_path / "run"
    pool.run(train, str(directory), ("train.steps=4", "checkpoint.every=2"), False)
    first = (directory / EVENTS).read_bytes()
    pool.run(train, str(directory), ("train.steps=5",), True)
    assert (directory / EVENTS).read_bytes().startswith(first)
    assert kinds(directory) == [
        (1, "start", None),
        (1, "plan", None),
        (1, "save", 2),
        (1, "save", 4),
        (1, "end", 4),
        (2, "start", None),
        (2, "plan", None),
        (2, "resume", 4),
        (2, "save", 5),
        (2, "end", 5),
    ]
    plan = read_events(directory / EVENTS)[1].details["plan"]
    assert Plan.model_validate(plan).run.train.steps == 4


def started(directory: Path, **details: object) -> LaunchEventLog:
    """The log of the launch `a`, in a directory in which an attempt with `details` started."""
    RunEvent.now("start", attempt=3, details=details).append_to(directory / EVENTS)
    (directory / "metrics.jsonl").write_text('{"step": 6}\n{"step": 7}\n{"ste')
    return LaunchEventLog(directory, own={"launch": "a"})


def test_a_launcher_records_a_fault_with_the_attempt_and_the_last_step(tmp_path: Path):
    log = started(tmp_path, launch="a")
    log.record_fault(FailureReport.from_exception(DataError("the well is dry.")), rank=1)
    fault = read_events(tmp_path / EVENTS)[-1]
    assert (fault.event, fault.attempt, fault.step) == ("fault", 3, 7)
    expected: dict[str, Any] = {"rank": 1, "error": "DataError", "exit_code": DataError.exit_code}
    assert expected.items() <= dict(fault.details).items()


def test_a_launcher_records_nothing_in_the_directory_of_another_run(tmp_path: Path):
    started(tmp_path, launch="b").record("signal", {"signal": "SIGINT"})
    assert kinds(tmp_path) == [(3, "start", None)]
    LaunchEventLog(tmp_path / "absent", own={"launch": "a"}).record("signal", {})
    assert not (tmp_path / "absent").exists()


def test_rank_of_another_launcher_records_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    for process in ("elsewhere:1", OwnFaultRecorder(tmp_path).process):
        started(tmp_path, process=process)
        with pytest.raises(DataError), OwnFaultRecorder(tmp_path):
            raise DataError("the well is dry.")
    assert [event for _, event, _ in kinds(tmp_path)] == ["start", "start", "fault"]


def test_watchdog_of_a_rank_of_another_launcher_prints_its_error(tmp_path: Path):
    with OwnFaultRecorder(tmp_path):
        assert [shows_error for _, shows_error in watchdog_exit_receivers()] == [False]
