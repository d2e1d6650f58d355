"""The causes for which a rank holds the others up: the words of all messages."""

from enum import StrEnum


class StragglerCause(StrEnum):
    """Work of a rank while the others wait for it. The first five are phases of a run."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SAVING = "saving"
    GARBAGE = "garbage collection"
    PAUSE = "paused process"
    LINK = "slow link"
