"""Random numbers that depend only on a seed and a position: Philox 4x32-10 (Salmon et al., SC 2011).

A number does not depend on the device, on the kernel that computes it, or on how many others are computed
with it. So replicas round alike, and so do a whole shard and its pieces.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


class RoundingSeed(NamedTuple):
    """Selects the random numbers of a shard's update.

    key: 0 to 2^63 - 1, different for each parameter, shard and step
    begin: index of the first element within the shard
    """

    key: int
    begin: int = 0

    def from_element(self, index: int) -> "RoundingSeed":
        """Returns the seed of the elements that begin `index` elements further on."""
        return self._replace(begin=self.begin + index)


def rounding_key(seed: int, *, step: int, parameter: int, shard: int) -> int:
    """Returns the key of one update of one parameter's shard; `parameter` is its number in the optimizer."""
    return hash((seed, step, parameter, shard)) & (2**63 - 1)


def random_halfwords(
    seed: RoundingSeed, count: int, *, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors of `count` int32 random numbers from 0 to 2^16 - 1.

    Pair p of elements, 2 p and 2 p + 1, takes the low and the high half of the first three words of
    Philox(counter p, key).
    """
    end = seed.begin + count
    pairs = torch.arange(seed.begin // 2, (end + 1) // 2, device=device)
    words = philox_4x32((pairs & _MASK, 0, 0, 0), seed.key)[:3]
    own = slice(seed.begin % 2, seed.begin % 2 + count)
    one, two, three = (torch.stack((word & 0xFFFF, word >> 16), 1).flatten()[own].int() for word in words)
    return one, two, three


def philox_4x32(
    counter: tuple[Tensor, Tensor | int, Tensor | int, Tensor | int], key: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the four words of Philox 4x32-10, as int64 tensors of numbers from 0 to 2^32 - 1."""
    c0, c1, c2, c3 = (word + torch.zeros_like(counter[0]) for word in counter)
    low, high = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        # A product may pass 2^63: int64 keeps its bits, which is all that is used.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> 32 & _MASK).bitwise_xor_(c1).bitwise_xor_(low),
            right & _MASK,
            (left >> 32 & _MASK).bitwise_xor_(c3).bitwise_xor_(high),
            left & _MASK,
        )
        low, high = (low + _KEY_STEPS[0]) & _MASK, (high + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3
