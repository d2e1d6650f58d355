"""Where a rank is: what the training writes down in passing, and the watchdog reads."""

from enum import StrEnum


class Phase(StrEnum):
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


SLOW_PHASES = frozenset({Phase.STARTING, Phase.LOADING, Phase.SAVING, Phase.VALIDATING, Phase.FINISHING})
"""Those that have no usual length."""


class Whereabouts:
    """The finished steps of this rank, and its phase. While `moves` stays the same, nothing has moved.

    `warm`: a step was finished in this process, so nothing is compiled or allocated for the first time.
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = Phase.STARTING
        self.moves = 0
        self.warm = False

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.moves += 1

    def finish_step(self, step: int) -> None:
        self.step = step
        self.warm = True
        self.enter(Phase.BETWEEN_STEPS)
