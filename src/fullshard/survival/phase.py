"""Where a rank is: what the training writes down in passing, and the watchdog reads."""

from enum import StrEnum


class RunPhase(StrEnum):
    """What a rank is doing."""

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
"""Those that have no usual length."""


class PhaseTracker:
    """The finished steps of this rank, and its phase. While `moves` stays the same, nothing has moved.

    `warm`: a step was finished in this process, so nothing is compiled or allocated for the first time.
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
