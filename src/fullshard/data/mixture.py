"""Several sources in exact proportions: which of them a sample comes from, found without those before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 100_000


@dataclass(frozen=True, eq=False)
class Interleaving:
    """A pattern that repeats: `sources[i]` is the source of position i, `before[i]` how many of that source
    stand before it, and `counts` how many of each are in the whole."""

    sources: NDArray[np.int64]
    before: NDArray[np.int64]
    counts: NDArray[np.int64]

    def of(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, its own number there) of each sample of an endless stream."""
        rounds, positions = np.divmod(samples, len(self.sources))
        sources = self.sources[positions]
        return sources, rounds * self.counts[sources] + self.before[positions]


def interleaved(weights: Sequence[float]) -> Interleaving:
    """The pattern for `weights`: exact in every period, and even within.

    The j-th of a source's n samples in a period stands at time (2 j + 1) / 2 n. Up to any time a source is so
    within half a sample of its share, and among the first samples, however many, within (sources + 1) / 2.
    The period is the smallest in which the weights, as they are written, come to whole samples; where that is
    over LONGEST_PERIOD, the whole numbers nearest to the weights for that one.
    """
    counts = np.array(_whole(weights), dtype=np.int64)
    numbers = [np.arange(count) for count in counts]
    sources = np.repeat(np.arange(len(counts)), counts)
    times = np.concatenate([(2 * each + 1) / (2 * len(each)) for each in numbers])
    order = np.lexsort((sources, times))
    return Interleaving(sources[order], np.concatenate(numbers)[order], counts)


def _whole(weights: Sequence[float]) -> list[int]:
    exact = [Fraction(repr(weight)) for weight in weights]
    multiple = lcm(*(one.denominator for one in exact))
    counts = [int(one * multiple) for one in exact]
    divisor = reduce(gcd, counts)
    counts = [count // divisor for count in counts]
    total = sum(counts)
    if total <= LONGEST_PERIOD:
        return counts
    return [max(1, round(Fraction(count, total) * LONGEST_PERIOD)) for count in counts]
