"""The order of samples: maps sample i of an endless stream to a window of the text."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


def sample_windows(samples: NDArray[np.int64], *, windows: int, seed: int | str) -> NDArray[np.int64]:
    """Returns the window of each sample, given the number of windows.

    Sample i is position i % windows of epoch i // windows. An epoch contains every window once, in its own
    order. There is no state and no table: each sample is computed independently, in constant time and memory.
    """
    epochs, positions = np.divmod(samples, windows)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        found[inside] = permute(positions[inside], length=windows, key=f"{seed}:{epoch}")
    return found


def permute(positions: NDArray[np.int64], *, length: int, key: str) -> NDArray[np.int64]:
    """Applies a pseudorandom permutation of range(length), chosen by `key`, to `positions`.

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
        found[outside] = _mix(found[outside], bits=bits, constants=constants)
        outside = found >= length
    return found.astype(np.int64)


def _mix(numbers: NDArray[np.uint64], *, bits: int, constants: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = np.uint64(2**bits - 1)
    half = np.uint64((bits + 1) // 2)
    for factor, addend in constants:
        numbers = (numbers * (factor | np.uint64(1)) + addend) & mask
        numbers = numbers ^ (numbers >> half)
    return numbers
