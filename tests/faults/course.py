"""A training that saves every few steps, is ended in between, and must resume without a trace.

Its files beside the checkpoints, each line flushed to the disk before the next step begins:
`acknowledged` (steps whose save was acknowledged), `curve` (step and loss, bit for bit), `starts`.
Of each rank: `committed-<rank>` (steps whose state is whole on its drive), and `killed-<rank>`
(what it was doing).
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.save import CheckpointSaver, take_snapshot
from fullshard.distributed.agreement import run_on_all_ranks
from fullshard.errors import CheckpointError
from fullshard.offload.drive import SYSTEM, DriveSystemCalls
from fullshard.offload.state import find_offloaded_state
from fullshard.spec.plan import Plan
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.resume import restore_train_state
from fullshard.training.shard import close_offloaded_state, offload_settings, shard
from fullshard.training.state import TrainState
from tests.training.runs import WIDTH, Pairs, Regression, mean_square, meta, run_of, sharded

# live: steps so long that a save in the background is written from the shards themselves
Mode = Literal["sync", "async", "live"]
STEPS = 100_000  # never reached: a fault or `until` ends it
FEW = 40  # an attempt's steps are mostly fewer: what nothing befalls is trained once for many tests
# By (ranks, whether it is the model of a tier): the losses by step, which are the same each time.
_UNDISTURBED: dict[tuple[int, bool], dict[int, float]] = {}
GROUPS = "offload.sub_group_parameters=1"  # of 1,024 elements: more of them than are in memory at once


class Wide(nn.Module):
    """x (batch, 5) -> (batch, 2), of four units and ten groups a rank, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        widths = (WIDTH, 700, WIDTH, 700, 2)
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Kill:
    """SIGKILL of these ranks: after their first steps and a save, and `steps` (a fraction, too) times as long
    as a step takes. `starting_seconds`: not then, but so long after they begin to start."""

    victims: tuple[int, ...]
    steps: float
    starting_seconds: float | None = None


@dataclass(frozen=True)
class Course:
    """`directory`: of checkpoints. `record`: where the lines go, which no fault touches. `every`: steps from
    a save to the next. `tier`: which of its state is where."""

    directory: Path
    record: Path
    mode: Mode = "sync"
    until: int = STEPS
    kill: Kill | None = None
    largest_disk: bool = False  # the space check is passed over, so that the disk itself must refuse
    every: int = 1
    tier: str = "none"
    fault: Callable[[], None] | None = None  # strikes once, on rank 0, when two saves are acknowledged
    drive: Callable[[], DriveSystemCalls] | None = None  # what rank 1 reaches it by; of the others it is well


def train_course(course: Course) -> int:
    """Resumes and trains to step `until`, saving after every step or few. Returns the step of its start."""
    victim, fault = _Victim(course), course.fault if dist.get_rank() == 0 else None
    state, plan = _begun(course)
    state.phase = victim.where
    restore_train_state(state, plan, weights=None, saved=course.directory, must_resume=False)
    started_at = state.step
    note(course, "starts", f"{started_at}")
    free = (lambda path: 1 << 50) if course.largest_disk else None
    place = (
        LocalLocation(course.directory) if free is None else LocalLocation(course.directory, free_bytes=free)
    )
    with ExitStack() as stack:
        offloaded = find_offloaded_state(state.model)
        if offloaded is not None:
            stack.callback(offloaded.close)  # a rank that fails ends, and its drive is free; here it lives on
        saving = CheckpointSaver(place, keep=2, plan=plan)
        if course.mode != "sync":
            victim.saver = stack.enter_context(BackgroundSaver(place, keep=2, plan=plan))
        steps = train(state, plan, loss=slowly if course.mode == "live" else mean_square)
        while state.step < course.until:
            victim.look(steps_done=state.step - started_at)
            if fault is not None and len(lines(course.record, "acknowledged")) >= 2:
                fault()
                fault = None
            step = next(steps)
            note(course, "curve", f"{step.index} {step.loss.hex()}")
            _note_commit(course, state)
            if state.step % course.every == 0:
                state.phase.enter(RunPhase.SAVING)
                _save(course, state, saving=victim.saver or saving)
        if victim.saver is not None:
            victim.saver.wait()
            note_outcomes(course, victim.saver)
        close_offloaded_state(state.model, plan=plan, finished=False)
    return started_at


def _begun(course: Course) -> tuple[TrainState, Plan]:
    run = run_of(
        f"train.steps={STEPS}",
        "sharding.strategy=full_shard",
        "schedule.kind=constant",
        f"offload.tier={course.tier}",
        f"run.dir={course.record.parent / 'run'}",
        GROUPS,
    )
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    system = course.drive() if course.drive and dist.get_rank() == 1 else SYSTEM
    model = shard(
        meta(Regression if course.tier == "none" else Wide), plan, offload=offload_settings(plan, system)
    )
    return TrainState(model, build_optimizer(model, plan), data=Pairs()), plan


def _save(course: Course, state: TrainState, *, saving: CheckpointSaver | BackgroundSaver) -> None:
    if isinstance(saving, CheckpointSaver):
        save_now(saving, state)
        note(course, "acknowledged", f"{state.step}")
    else:
        saving.save(state)
        note_outcomes(course, saving)


def slowly(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A forward that takes longer than a save."""
    time.sleep(0.4)
    return mean_square(model, batch)


def save_now(saving: CheckpointSaver, state: TrainState) -> None:
    saving.save_snapshot(run_on_all_ranks(lambda: take_snapshot(state), doing="taking the state to save"))


def note_outcomes(course: Course, saver: BackgroundSaver) -> None:
    for outcome in saver.outcomes():
        if outcome.error is not None:
            raise outcome.error
        note(course, "acknowledged", f"{outcome.step}")


def note(course: Course, name: str, line: str) -> None:
    if dist.get_rank() == 0:
        note_own(course, name, line)


def note_own(course: Course, name: str, line: str) -> None:
    """Adds a line to a file of the record, on whichever rank."""
    with (course.record / name).open("a") as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


def _note_commit(course: Course, state: TrainState) -> None:
    """Once this step's state is whole on this rank's drive, beside whatever training does then."""
    offloaded = find_offloaded_state(state.model)
    if offloaded is not None and offloaded.settings.on_drive is not None:
        line = partial(note_own, course, f"committed-{dist.get_rank()}", f"{state.step}")
        offloaded.updates.submit(line)


class _Victim:
    """Ends this rank when it is due, if it is to be ended at all."""

    def __init__(self, course: Course) -> None:
        self.where = PhaseTracker()
        self.saver: BackgroundSaver | None = None
        self._course, self._rank = course, dist.get_rank()
        self._began = 0.0
        kill = course.kill
        self._kill = kill if kill is not None and self._rank in kill.victims else None
        if self._kill is not None and self._kill.starting_seconds is not None:
            self._die_after(self._kill.starting_seconds)
            self._kill = None

    def look(self, *, steps_done: int) -> None:
        """Between two steps. The first is none to measure by."""
        measured = self._course.every
        if steps_done == 1:
            self._began = time.monotonic()
        if self._kill is not None and steps_done == 1 + measured:
            self._die_after(self._kill.steps * (time.monotonic() - self._began) / measured)

    def _die_after(self, seconds: float) -> None:
        threading.Thread(target=self._die, args=(seconds,), daemon=True).start()

    def _die(self, after_seconds: float) -> None:
        time.sleep(after_seconds)
        beside = " beside a save" if self.saver is not None and not self.saver.is_idle else ""
        with (self._course.record / f"killed-{self._rank}").open("a") as file:
            file.write(f"{self.where.phase}{beside}\n")
        os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(until: int, tier: str = "none") -> dict[int, float]:
    """The losses of a run that nothing befalls, by step. `tier`: of the model alone; there is none here."""
    run = run_of(f"train.steps={STEPS}", "sharding.strategy=full_shard", "schedule.kind=constant")
    state, plan = sharded(run, model=Regression if tier == "none" else Wide)
    return {step.index: step.loss for step in _first(until, train(state, plan, loss=mean_square))}


def _first(count: int, steps: Iterator) -> Iterator:
    return (step for step, _ in zip(steps, range(count), strict=False))


def lines(record: Path, name: str) -> list[str]:
    """A line that a kill cut off is left out."""
    path = record / name
    return path.read_text().split("\n")[:-1] if path.exists() else []


def last_acknowledged(record: Path) -> int:
    return max((int(line) for line in lines(record, "acknowledged")), default=0)


def last_committed(record: Path, *, world_size: int = 2) -> int:
    """The newest step that all ranks reported as whole on their drives."""
    by_rank = [[int(line) for line in lines(record, f"committed-{rank}")] for rank in range(world_size)]
    return min(max(own, default=0) for own in by_rank)


def assert_the_curve_is_undisturbed(ranks, record: Path, *, world_size: int = 2, tier: str = "none") -> None:
    """Every loss of every attempt, bit for bit."""
    curve = [line.split() for line in lines(record, "curve")]
    until, known = max(int(step) for step, _ in curve), (world_size, tier != "none")
    if until not in _UNDISTURBED.get(known, {}):
        (_UNDISTURBED[known], *_) = ranks(world_size).run(undisturbed, max(until, FEW), tier)
    expected = _UNDISTURBED[known]
    for step, loss in curve:
        assert float.fromhex(loss) == expected[int(step)], f"step {step}"


def next_start(ranks, course: Course, *, world_size: int = 2) -> str:
    """Starts again on a drive without a fault. Returns `resumed at step …`, or the error that stopped it."""
    until = max((int(line.split()[0]) for line in lines(course.record, "curve")), default=0) + 2
    try:
        well = replace(course, mode="sync", kill=None, fault=None, drive=None, until=until)
        (started_at, *_) = ranks(world_size).run(train_course, well)
    except CheckpointError as error:
        return f"stopped: {error.what}"
    return f"resumed at step {started_at}"


def assert_it_resumes(ranks, course: Course, *, least: int) -> str:
    """Asserts that the next start resumes at no step before `least`, and that no loss is another one."""
    started = next_start(ranks, course)
    assert started.startswith("resumed"), started
    assert int(started.split()[-1]) >= least, f"{started}, of {least}"
    assert_the_curve_is_undisturbed(ranks, course.record, tier=course.tier)
    return started
