"""Order of the samples: computes the source and the row of sample i of an endless stream."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

LONGEST_PERIOD = 100_000
_ROUNDS = 4


@dataclass(frozen=True, eq=False)
class SourceInterleaving:
    """A repeating pattern of sources: sample i is from the source at position i % len(sources).

    sources: source of each position
    index_within_source: for each position, the number of earlier positions with the same source
    counts: number of positions of each source in the pattern
    """

    sources: NDArray[np.int64]
    index_within_source: NDArray[np.int64]
    counts: NDArray[np.int64]

    def locate_samples(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns (source of each sample, number of earlier samples from the same source)."""
        rounds, positions = np.divmod(samples, len(self.sources))
        sources = self.sources[positions]
        return sources, rounds * self.counts[sources] + self.index_within_source[positions]

    @property
    def source_shares(self) -> list[float]:
        """Fraction of the samples that come from each source."""
        return (self.counts / self.counts.sum()).tolist()


def build_source_interleaving(weights: Sequence[float]) -> SourceInterleaving:
    """Returns the pattern that mixes sources by `weights`: exact in every period, evenly spread within it.

    Sample j of a source with n samples per period is at time (2 j + 1) / 2 n. Among the first k samples, for
    any k, each source has its share to within (sources + 1) / 2 samples. The period is the smallest one in
    which the weights, as written, give whole samples. If that exceeds LONGEST_PERIOD, the counts are the
    nearest whole numbers for LONGEST_PERIOD.
    """
    counts = np.array(_samples_per_period(weights), dtype=np.int64)
    numbers = [np.arange(count) for count in counts]
    sources = np.repeat(np.arange(len(counts)), counts)
    times = np.concatenate([(2 * each + 1) / (2 * len(each)) for each in numbers])
    order = np.lexsort((sources, times))
    return SourceInterleaving(sources[order], np.concatenate(numbers)[order], counts)


def _samples_per_period(weights: Sequence[float]) -> list[int]:
    exact = [Fraction(repr(weight)) for weight in weights]
    multiple = lcm(*(one.denominator for one in exact))
    counts = [int(one * multiple) for one in exact]
    divisor = gcd(*counts)
    counts = [count // divisor for count in counts]
    total = sum(counts)
    if total <= LONGEST_PERIOD:
        return counts
    return [max(1, round(Fraction(count, total) * LONGEST_PERIOD)) for count in counts]


def shuffled_rows_at(samples: NDArray[np.int64], *, rows: int, seed: int | str) -> NDArray[np.int64]:
    """Returns the shuffled row number of each sample, for a source with `rows` rows.

    Sample i is position i % rows of epoch i // rows. An epoch contains every row once, in its own order. Each
    sample is computed independently, in constant time and memory.
    """
    epochs, positions = np.divmod(samples, rows)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        found[inside] = permute_pseudorandomly(positions[inside], length=rows, key=f"{seed}:{epoch}")
    return found


def permute_pseudorandomly(positions: NDArray[np.int64], *, length: int, key: str) -> NDArray[np.int64]:
    """Applies the pseudorandom permutation of range(length) that `key` determines to `positions`.

    Each round is a bijection of the b-bit numbers, where 2^b >= length > 2^(b-1): an odd multiple plus a
    constant mod 2^b, then the upper half xored onto the lower. A result of `length` or more is mapped again
    until it is below (cycle walking, fewer than two times on average), so the result is a bijection of
    range(length). Black, Rogaway: Ciphers with Arbitrary Finite Domains (CT-RSA 2002).
    """
    bits = (length - 1).bit_length()
    digest = hashlib.blake2b(key.encode(), digest_size=16 * _ROUNDS).digest()
    constants = np.frombuffer(digest, dtype="<u8").reshape(_ROUNDS, 2).astype(np.uint64)

    found = positions.astype(np.uint64)
    outside = np.ones(found.shape, dtype=np.bool_)
    while outside.any():
        found[outside] = _mix_bits(found[outside], bits=bits, constants=constants)
        outside = found >= length
    return found.astype(np.int64)


def _mix_bits(numbers: NDArray[np.uint64], *, bits: int, constants: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = np.uint64(2**bits - 1)
    half = np.uint64((bits + 1) // 2)
    for factor, addend in constants:
        numbers = (numbers * (factor | np.uint64(1)) + addend) & mask
        numbers = numbers ^ (numbers >> half)
    return numbers
