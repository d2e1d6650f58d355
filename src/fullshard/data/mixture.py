"""Mixes several sources in exact proportions: computes the source of any sample independently."""

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
    """A repeating pattern of sources.

    sources: source of each position
    before: number of earlier positions with the same source
    counts: number of positions of each source in the pattern
    """

    sources: NDArray[np.int64]
    before: NDArray[np.int64]
    counts: NDArray[np.int64]

    def of(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (source, index within the source) of each sample of an endless stream."""
        rounds, positions = np.divmod(samples, len(self.sources))
        sources = self.sources[positions]
        return sources, rounds * self.counts[sources] + self.before[positions]


def interleaved(weights: Sequence[float]) -> Interleaving:
    """Returns the pattern for `weights`: exact in every period, and evenly spread within it.

    Sample j of a source with n samples per period is at time (2 j + 1) / 2 n. Up to any time, each source is
    therefore within half a sample of its share. Among the first k samples, for any k, it is within (sources +
    1) / 2. The period is the smallest one in which the weights, as written, give whole samples. If that
    exceeds LONGEST_PERIOD, the counts are the nearest whole numbers for LONGEST_PERIOD.
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
