"""A span of a step: what a stream of a rank does for some time."""

from typing import NamedTuple


class StepSpan(NamedTuple):
    """Work or waiting on one track, from `begin` to `end` in seconds from the step's start.

    track: the stream, or another row of its own; spans of one track nest or are disjoint
    unit: name of the communication unit that the work is for; None for the whole step
    microbatch: number of the microbatch, from 1; None for the whole step
    """

    track: str
    name: str
    begin: float
    end: float
    unit: str | None = None
    microbatch: int | None = None
