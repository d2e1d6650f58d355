"""AdamW in bf16 with stochastic rounding, up or down at random, so that small updates are not lost.

The random numbers depend only on a seed and a position: Philox 4x32-10 (Salmon et al., SC 2011). A number
does not depend on the device, on the kernel that computes it, or on how many others are computed with it. So
replicas round alike, and so do a whole shard and its pieces.
"""

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.spec.groups import ROUNDING_CHUNK_ELEMENTS

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


_DEVICE_CHUNK_ELEMENTS = 1 << 20
"""Elements that a GPU without the kernel rounds at once: its temporaries take some 70 bytes for each."""


class AdamOptions(NamedTuple):
    """Hyperparameters of AdamW for one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw_with_stochastic_rounding(
    state: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    *,
    step: int,
    options: AdamOptions,
    seed: RoundingSeed,
) -> None:
    """Updates `state`, (value, first moment, second moment), in place with AdamW.

    The update is computed in fp32, and rounded stochastically where `state` is bf16. On a GPU it is one
    kernel (`rounding_kernel`), with the same result. `step` counts from 1.
    """
    if not gradient.numel():
        return
    scalars = adamw_update_factors(step, options)
    tensors = (*state, gradient)
    if (
        gradient.is_cuda
        and _has_triton()
        and seed.begin % 2 == 0
        and all(map(_has_kernel_dtype_and_layout, tensors))
    ):
        from fullshard.offload.rounding_kernel import launch_update

        launch_update(state, gradient, scalars=scalars, key=seed.key, begin=seed.begin)
        return
    if gradient.ndim == 0 or all(one.is_contiguous() for one in tensors):
        tensors = tuple(one.view(-1) for one in tensors)
    row = tensors[0][0].numel()
    most = _DEVICE_CHUNK_ELEMENTS if gradient.is_cuda else ROUNDING_CHUNK_ELEMENTS
    chunk = max(1, most // row)  # rows of the first dimension
    for at in range(0, len(tensors[0]), chunk):
        value, first, second, g = (one[at : at + chunk] for one in tensors)
        own = seed._replace(begin=seed.begin + at * row)
        _update_chunk((value, first, second), g, scalars=scalars, seed=own)


def adamw_update_factors(step: int, options: AdamOptions) -> tuple[float, ...]:
    """Returns (keep, β₁, 1 - β₁, β₂, 1 - β₂, 1 - β₂^step, ε, rate), the factors of one update.

    m = β₁ m + (1 - β₁) g
    v = β₂ v + (1 - β₂) g²
    value = keep · value - rate · m / (sqrt(v / (1 - β₂^step)) + ε)
    """
    lr, beta1, beta2, eps, decay = options
    correction = 1 - beta2**step
    return 1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, correction, eps, lr / (1 - beta1**step)


def _update_chunk(
    state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, *, scalars: tuple[float, ...], seed: RoundingSeed
) -> None:
    keep, beta1, rest1, beta2, rest2, correction, eps, rate = scalars
    value, first, second = state
    g = gradient.float()
    m = first.float().mul(beta1).add_(g.mul(rest1))
    v = second.float().mul(beta2).add_(g.mul(g).mul_(rest2))
    # A tensor, because torch multiplies by the inverse of a scalar divisor.
    denominator = v.div(torch.full_like(v, correction)).sqrt_().add_(eps)
    new = value.float().mul(keep).sub_(m.div(denominator).mul_(rate))
    numbers = random_halfwords(seed, gradient.numel(), device=gradient.device)
    for target, exact, number in zip(state, (new, m, v), numbers, strict=True):
        round_stochastically(exact, out=target, halfwords=number.view(exact.shape))


def round_stochastically(exact: Tensor, *, out: Tensor, halfwords: Tensor) -> None:
    """Writes fp32 `exact` into `out`; to bf16 by adding random low bits and truncating.

    halfwords: int32 random numbers from 0 to 2^16 - 1

    A bf16 is the upper half of an fp32. Of the 2^16 equally likely random numbers, as many carry into the
    upper half as the value of the lower half. So the mean over roundings is `exact`, and values that bf16 can
    represent are unchanged. Infinities, NaNs and other dtypes of `out` are copied as torch rounds them.
    """
    if out.dtype is not torch.bfloat16:
        out.copy_(exact)
        return
    bits = halfwords.add(exact.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(torch.where(exact.isfinite(), bits.view(torch.float32), exact))


def _has_kernel_dtype_and_layout(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float32) and tensor.is_contiguous()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def shard_index(parameter: Tensor) -> int:
    """Returns the index of this rank's part of a parameter: equal on replicas, 0 for a whole parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, index = parameter.device_mesh, 0
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():  # FSDP2's `_StridedShard` is not a Shard
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    return index
