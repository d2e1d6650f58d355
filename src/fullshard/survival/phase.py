"""Phase of a rank's run: written by the training loop, read by the watchdog."""

from enum import StrEnum


class RunPhase(StrEnum):
    """Activity of a rank."""

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
"""Phases without a usual length."""


class PhaseTracker:
    """Number of finished steps of this rank, and its current phase.

    changes: number of phase changes; while it stays the same, nothing has moved
    has_finished_step: whether compilation and first allocations are over
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = RunPhase.STARTING
        self.changes = 0
        self.has_finished_step = False

    def enter(self, phase: RunPhase) -> None:
        self.phase = phase
        self.changes += 1

    def finish_step(self, step: int) -> None:
        self.step = step
        self.has_finished_step = True
        self.enter(RunPhase.BETWEEN_STEPS)
