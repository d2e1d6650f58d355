"""Directories of made-up runs, as `fullshard report --html` reads them."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fullshard.spec.plan import Plan
from fullshard.spec.records.event import RunEvent
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run
from tests.report.test_comparison import measured, prediction

STARTED = datetime(2026, 11, 24, 10, tzinfo=UTC)


def plan(*settings: str, steps: int = 100, is_predicted: bool = True) -> Plan:
    made = Plan.from_run(Run.load(overrides=[f"train.steps={steps}", *settings]), world_size=2)
    return made.model_copy(update={"prediction": prediction() if is_predicted else None})


def write_steps(
    directory: Path, steps: int, *, skipped: frozenset[int] = frozenset(), trained: int | None = None
) -> None:
    """`metrics.jsonl`, with a validation after every tenth step; of an earlier version without `trained`."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            seconds = 0.5 + 0.01 * math.sin(step)
            line = {
                "step": step,
                "loss": None if step in skipped else 2.0 + 3.0 / math.sqrt(step) + 0.05 * math.sin(7 * step),
                "grad_norm": 1.0 / step + 0.1,
                "learning_rate": 3e-3 * (1 - step / (steps + 1)),
                "tokens": 1000,
                "tokens_per_second": 1000 / seconds,
                "seconds": seconds,
                "data_seconds": 1e-3,
                "skipped": step in skipped,
            }
            line |= {} if trained is None else {"trained_tokens": trained}
            line |= {"peak_bytes": 400} if step == 2 else {}
            line |= {"validation_loss": 2.1 + 3.0 / step} if step % 10 == 0 else {}
            file.write(f"{json.dumps(line)}\n")


EventFields = tuple[str, int, int | None, Mapping[str, object]]


def write_events(directory: Path, *events: EventFields) -> None:
    """`events.jsonl` with (kind, attempt, step, details) of each event, ten seconds apart."""
    for index, (kind, attempt, step, details) in enumerate(events):
        at = STARTED + timedelta(seconds=10 * index)
        event = RunEvent.model_validate(
            {**details, "at": at, "event": kind, "attempt": attempt, "step": step}
        )
        event.append_to(directory / EVENTS)


def start(attempt: int, made: Plan) -> tuple[EventFields, EventFields]:
    who = {"ranks": 2, "device": "cpu", "process": "host:1", "launch": "a"}
    return ("start", attempt, None, who), ("plan", attempt, None, {"plan": made.model_dump(mode="json")})


def finished(directory: Path, *settings: str, steps: int = 100) -> Path:
    made = plan(*settings, steps=steps)
    write_steps(directory, steps)
    write_events(
        directory, *start(1, made), ("save", 1, steps, {"path": "p"}), ("end", 1, steps, {"loss": 2.0})
    )
    made.save(directory / "plan.json")
    measured().save(directory / "measurement.json")
    return directory


def disturbed(directory: Path) -> Path:
    """Resumed after a fault, with a spike, a rollback and skipped steps, and stopped."""
    made = plan()
    write_steps(directory, 60, skipped=frozenset({33, 34}))
    fault = {"rank": 1, "error": "LaunchError", "message": "rank 1 was killed by SIGKILL.\n  why: …"}
    write_events(
        directory,
        *start(1, made),
        ("save", 1, 20, {"path": "p/step-20", "seconds": 1.5, "stalled_seconds": 0.5}),
        ("spike", 1, 31, {"loss": 9.0, "grad_norm": 99.0}),
        ("rollback", 1, 31, {"to_step": 20, "loss": 9.0, "grad_norm": 99.0}),
        ("fault", 1, 29, fault),
        ("restart", 1, 29, {"count": 1, "allowed": 2}),
        *start(2, made),
        ("resume", 2, 20, {"ranks": 2}),
        ("skip", 2, 33, {"loss": None, "grad_norm": None}),
        ("skip", 2, 34, {"loss": None, "grad_norm": None}),
        ("signal", 2, 59, {"signal": "SIGINT"}),
        ("save", 2, 60, {"path": "p/step-60"}),
        ("stop", 2, 60, {"saved": True}),
    )
    made.save(directory / "plan.json")
    measured().save(directory / "measurement.json")
    return directory


def died(directory: Path) -> Path:
    """Killed with its launcher in its second attempt; the measurement is that of the first."""
    made = plan()
    write_steps(directory, 40)
    first = (*start(1, made), ("save", 1, 30, {"path": "p"}), ("stop", 1, 30, {"saved": True}))
    write_events(directory, *first, *start(2, made), ("resume", 2, 30, {"ranks": 2}))
    made.save(directory / "plan.json")
    measured().save(directory / "measurement.json")
    return directory


def begun(directory: Path) -> Path:
    """The attempt has started and planned, and no step is done."""
    directory.mkdir(parents=True)
    write_events(directory, *start(1, plan()))
    return directory
