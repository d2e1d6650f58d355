"""Finds memory leaks: live bytes at the end of a step that grow steadily.

[Note: the test of a leak]
At the end of a step, gradients and activations are freed, so live bytes are the same after each step, except
after saves, validations and other rare work. The last STEPS values are cut into BLOCKS. The lowest
value of each block counts, so that memory which rare work holds for a moment does not. The growth from block
to block, d, must satisfy

    min(d)  >=  EVENNESS · mean(d)              it grows in every block, and not by one jump
    mean(d) >=  LEAST_BYTES · steps of a block  it is worth a message

A buffer that is allocated once, a cache that is filled, and a collection of garbage that frees what grew do
not pass the first line. A slower leak, of at least SLOWEST_BYTES per step, is reported
if the free memory would not last until the last step.
"""

from collections import deque
from itertools import pairwise
from statistics import fmean

BLOCKS, BLOCK_STEPS = 6, 10
STEPS = BLOCKS * BLOCK_STEPS
EVENNESS = 0.5
LEAST_BYTES, SLOWEST_BYTES = 128 << 10, 4 << 10
SKIPPED_STEPS = 10
"""First steps of an attempt, which allocate what later ones reuse, and in which a run measures itself."""


class LeakDetector:
    """Judges the live bytes of consecutive steps. See [Note: the test of a leak]."""

    def __init__(self) -> None:
        self._skipped = 0
        self._values: deque[int] = deque(maxlen=STEPS)

    def add_step(self, live_bytes: int) -> None:
        """Adds the live bytes at the end of a step."""
        if self._skipped < SKIPPED_STEPS:
            self._skipped += 1
        else:
            self._values.append(live_bytes)

    def growth_per_step(self, *, steps_left: int = 0, free_bytes: int | None = None) -> float:
        """Returns the bytes by which memory grows per step; 0 if it does not grow steadily.

        steps_left, free_bytes: remaining steps of the run, and free memory
        """
        if len(self._values) < STEPS:
            return 0.0
        values = [*self._values]
        lowest = [min(values[first : first + BLOCK_STEPS]) for first in range(0, STEPS, BLOCK_STEPS)]
        growths = [after - before for before, after in pairwise(lowest)]
        growth = fmean(growths) / BLOCK_STEPS
        if growth < SLOWEST_BYTES or min(growths) < EVENNESS * fmean(growths):
            return 0.0
        ends_the_run = free_bytes is not None and growth * steps_left > free_bytes
        return growth if growth >= LEAST_BYTES or ends_the_run else 0.0

    def forget(self) -> None:
        """Forgets the steps so far, because the run goes back to a checkpoint."""
        self._skipped = 0
        self._values.clear()
