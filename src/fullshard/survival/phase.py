"""The phase of a run that a rank is in, which the training loop sets and the watchdog reads."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fullshard.distributed.ranges import OwnWorkClock


class RunPhase(StrEnum):
    """Phase of a run, of which a rank is in one at a time. DATA to OPTIMIZER are parts of a step."""

    STARTING = "starting"
    LOADING = "loading"
    SAVING = "saving"
    VALIDATING = "validating"
    BETWEEN_STEPS = "between steps"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"
    FINISHING = "finishing"


SLOW_PHASES = frozenset(
    {RunPhase.STARTING, RunPhase.LOADING, RunPhase.SAVING, RunPhase.VALIDATING, RunPhase.FINISHING}
)
"""Phases without a usual duration, for which the watchdog waits longer."""


@dataclass(frozen=True)
class Heartbeat:
    """The position that a rank published last.

    host: see `fullshard.survival.diagnosis.host_and_namespace_id`
    process: process id
    step: number of finished steps
    phase: the RunPhase that the rank is in
    unmoved_seconds: time since the rank entered `phase`
    limit_seconds: longest time that the rank may stay in `phase`
    at: time of publication, in seconds since the epoch
    """

    host: str
    process: int
    step: int
    phase: str
    unmoved_seconds: float
    limit_seconds: float
    at: float


class PhaseTracker:
    """The current phase of this rank, and its number of finished steps.

    clock: counts the rank's own seconds in each phase; None if they are not counted
    changes: number of times that a phase was entered; the watchdog takes an increase as progress
    last_unit_name: returns the name of the unit that the rank gathered or reduced last, or an empty text
    has_finished_step: whether this process has finished a step, and thus compilation and first allocations
    """

    def __init__(self) -> None:
        self.step, self.phase = 0, RunPhase.STARTING
        self.changes, self.has_finished_step = 0, False
        self.clock: OwnWorkClock | None = None
        self.last_unit_name: Callable[[], str] = str

    def enter(self, phase: RunPhase) -> None:
        self.phase = phase
        self.changes += 1
        if self.clock is not None:
            self.clock.enter_phase(phase)

    def finish_step(self, step: int) -> None:
        self.step, self.has_finished_step = step, True
        self.enter(RunPhase.BETWEEN_STEPS)
