"""A training that saves after every step, is ended in mid-course, and must go on as if nothing had been.

What it leaves beside the checkpoints, each line down to the disk before the next step begins:
`acknowledged` (steps whose save was told to be through), `curve` (step and loss, bit for bit), `starts`.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from fullshard.checkpoint.agreement import everyone
from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.load import load
from fullshard.checkpoint.place import LocalPlace
from fullshard.checkpoint.save import Saving, take_snapshot
from fullshard.errors import CheckpointError
from fullshard.training.loop import train
from fullshard.training.state import TrainState
from tests.training.runs import mean_square, run_of, sharded

Mode = Literal["sync", "async"]
STEPS = 100_000  # never reached: a fault or `until` ends it


@dataclass(frozen=True)
class Kill:
    """SIGKILL of these ranks, after their first step and save and `steps` (a fraction, too) times as long."""

    victims: tuple[int, ...]
    steps: float


@dataclass(frozen=True)
class Course:
    """`directory`: of checkpoints. `record`: where the lines go, which no fault touches."""

    directory: Path
    record: Path
    mode: Mode = "sync"
    until: int = STEPS
    kill: Kill | None = None
    largest_disk: bool = False  # the space check is passed over, so that the disk itself must refuse


def go_on(course: Course) -> int:
    """Loads what there is and trains to step `until`, saving after every step. Returns where it began."""
    run = run_of(f"train.steps={STEPS}", "sharding.strategy=full_shard", "schedule.kind=constant")
    state, plan = sharded(run)
    load(state, course.directory, missing_ok=True)
    started_at = state.step
    note(course, "starts", f"{started_at}")
    free = (lambda path: 1 << 50) if course.largest_disk else None
    place = LocalPlace(course.directory) if free is None else LocalPlace(course.directory, free_bytes=free)
    saving = Saving(place, keep=2, plan=plan)
    with BackgroundSaver(place, keep=2, plan=plan) if course.mode == "async" else nullcontext() as saver:
        steps = train(state, plan, loss=mean_square)
        while state.step < course.until:
            began = time.monotonic()
            step = next(steps)
            note(course, "curve", f"{step.index} {step.loss.hex()}")
            if saver is None:
                save_now(saving, state)
                note(course, "acknowledged", f"{state.step}")
            else:
                saver.save(state)
                told(course, saver)
            if (
                course.kill is not None
                and dist.get_rank() in course.kill.victims
                and state.step == started_at + 2
            ):
                seconds = course.kill.steps * (time.monotonic() - began)
                threading.Thread(target=_die, args=(seconds,), daemon=True).start()
        if saver is not None:
            saver.wait()
            told(course, saver)
    return started_at


def save_now(saving: Saving, state: TrainState) -> None:
    saving.run(everyone(lambda: take_snapshot(state), doing="taking the state to save"))


def told(course: Course, saver: BackgroundSaver) -> None:
    for outcome in saver.outcomes():
        if outcome.error is not None:
            raise outcome.error
        note(course, "acknowledged", f"{outcome.step}")


def note(course: Course, name: str, line: str) -> None:
    if dist.get_rank() == 0:
        with (course.record / name).open("a") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())


def _die(after_seconds: float) -> None:
    time.sleep(after_seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(until: int) -> dict[int, float]:
    """The losses of a run that nothing befalls, by step."""
    run = run_of(f"train.steps={STEPS}", "sharding.strategy=full_shard", "schedule.kind=constant")
    state, plan = sharded(run)
    return {step.index: step.loss for step in _first(until, train(state, plan, loss=mean_square))}


def _first(count: int, steps: Iterator) -> Iterator:
    return (step for step, _ in zip(steps, range(count), strict=False))


def lines(record: Path, name: str) -> list[str]:
    """A line that a kill cut off is left out."""
    path = record / name
    return path.read_text().split("\n")[:-1] if path.exists() else []


def last_acknowledged(record: Path) -> int:
    return max((int(line) for line in lines(record, "acknowledged")), default=0)


def assert_the_curve_is_undisturbed(ranks, record: Path, *, world_size: int = 2) -> None:
    """Every loss of every attempt, bit for bit."""
    curve = [line.split() for line in lines(record, "curve")]
    (expected, *_) = ranks(world_size).run(undisturbed, max(int(step) for step, _ in curve))
    for step, loss in curve:
        assert float.fromhex(loss) == expected[int(step)], f"step {step}"


def next_start(ranks, course: Course, *, world_size: int = 2) -> str:
    """What the next start does: `resumed at step …`, or the error that it stops with."""
    until = max((int(line.split()[0]) for line in lines(course.record, "curve")), default=0) + 2
    try:
        (started_at, *_) = ranks(world_size).run(go_on, Course(course.directory, course.record, until=until))
    except CheckpointError as error:
        return f"stopped: {error.what}"
    return f"resumed at step {started_at}"
