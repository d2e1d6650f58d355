"""AdamW in bf16 with stochastic rounding, up or down at random, so that small updates are not lost.

The random numbers depend only on a seed and a position: Philox 4x32-10 (Salmon et al., SC 2011). A number
does not depend on the device, on the kernel that computes it, or on how many others are computed with it. So
replicas round alike, and so do a whole shard and its pieces.
"""

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
_HAS_TRITON = find_spec("triton") is not None


class RoundingSeed(NamedTuple):
    """Selects, with the step, the random numbers of a shard's update.

    key: 0 to 2^63 - 1, different for each parameter and shard
    begin: index of the first element within the shard
    """

    key: int
    begin: int = 0


def rounding_key(seed: int, *, parameter: int, shard: int) -> int:
    """Returns the key of the updates of one parameter's shard; `parameter` is its number in the optimizer."""
    return hash((seed, parameter, shard)) & (2**63 - 1)


def random_halfwords(
    seed: RoundingSeed, count: int, *, step: int | Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three tensors of `count` int32 random numbers from 0 to 2^16 - 1.

    Pair p of elements, 2 p and 2 p + 1, takes the low and the high half of the first three words of
    Philox(counter (p, 0, step, 0), key).
    """
    end = seed.begin + count
    pairs = torch.arange(seed.begin // 2, (end + 1) // 2, device=device)
    words = philox_4x32((pairs & _MASK, 0, step, 0), seed.key)[:3]
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
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class UpdateFactors(NamedTuple):
    """Factors of one update of AdamW.

    fixed: (keep, β₁, 1 - β₁, β₂, 1 - β₂, ε)
    of_step: (step, 1 - β₂^step, rate, gradient scale, whether the update is left out), step from 1: as
        numbers, or as fp32 (5,) on a device that decides

    m = β₁ m + (1 - β₁) g / scale
    v = β₂ v + (1 - β₂) (g / scale)²
    value = keep · value - rate · m / (sqrt(v / (1 - β₂^step)) + ε)
    """

    fixed: tuple[float, ...]
    of_step: tuple[float, ...] | Tensor

    @classmethod
    def from_numbers(cls, step: int, options: AdamOptions, *, grad_scale: float = 1.0) -> "UpdateFactors":
        """Returns the factors of an update that the host has decided on."""
        lr, beta1, beta2, *_ = options
        of_step = (float(step), 1 - beta2**step, lr / (1 - beta1**step), grad_scale, 0.0)
        return cls(fixed_factors(options), of_step)


def fixed_factors(options: AdamOptions) -> tuple[float, ...]:
    """Returns the factors that do not depend on the step: see `UpdateFactors`."""
    lr, beta1, beta2, eps, decay = options
    return 1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2, eps


def factors_of_steps(
    steps: Tensor, options: AdamOptions, *, grad_scale: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """Returns `UpdateFactors.of_step` of parameters whose step counts are `steps`, (parameters, 5).

    grad_scale, found_inf: () in fp32, as torch's fused optimizers take them
    """
    lr, beta1, beta2, *_ = options
    wide = steps.double()
    scale = torch.ones_like(steps) if grad_scale is None else grad_scale.expand_as(steps)
    left_out = torch.zeros_like(steps) if found_inf is None else found_inf.expand_as(steps)
    columns = (wide, 1 - torch.pow(beta2, wide), lr / (1 - torch.pow(beta1, wide)), scale, left_out)
    return torch.stack([column.float() for column in columns], dim=1)


def adamw_with_stochastic_rounding(
    state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, *, factors: UpdateFactors, seed: RoundingSeed
) -> None:
    """Updates `state`, (value, first moment, second moment), in place with AdamW.

    The update is computed in fp32, and rounded stochastically where `state` is bf16. On a GPU it is one
    kernel (`rounding_kernel`), with the same result.
    """
    if not gradient.numel():
        return
    tensors = (*state, gradient)
    if (
        gradient.is_cuda
        and _HAS_TRITON
        and seed.begin % 2 == 0
        and all(one.dtype in (torch.bfloat16, torch.float32) and one.is_contiguous() for one in tensors)
    ):
        from fullshard.offload.rounding_kernel import launch_update

        fixed, of_step = factors
        launch_update(state, gradient, fixed=fixed, of_step=of_step, key=seed.key, begin=seed.begin)
        return
    if gradient.ndim == 0 or all(one.is_contiguous() for one in tensors):
        tensors = tuple(one.view(-1) for one in tensors)
    row = tensors[0][0].numel()
    most = _DEVICE_CHUNK_ELEMENTS if gradient.is_cuda else ROUNDING_CHUNK_ELEMENTS
    chunk = max(1, most // row)  # rows of the first dimension
    for at in range(0, len(tensors[0]), chunk):
        value, first, second, g = (one[at : at + chunk] for one in tensors)
        own = seed._replace(begin=seed.begin + at * row)
        _update_chunk((value, first, second), g, factors=factors, seed=own)


def _update_chunk(
    state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, *, factors: UpdateFactors, seed: RoundingSeed
) -> None:
    keep, beta1, rest1, beta2, rest2, eps = factors.fixed
    step, correction, rate, scale, left_out = factors.of_step
    value, first, second = state
    g = gradient.float()
    g = g if isinstance(scale, float) and scale == 1.0 else _divide(g, scale)
    m = first.float().mul(beta1).add_(g.mul(rest1))
    v = second.float().mul(beta2).add_(g.mul(g).mul_(rest2))
    denominator = _divide(v, correction).sqrt_().add_(eps)
    new = value.float().mul(keep).sub_(m.div(denominator).mul_(rate))
    count = step.long() if isinstance(step, Tensor) else int(step)
    numbers = random_halfwords(seed, gradient.numel(), step=count, device=gradient.device)
    for target, exact, number in zip(state, (new, m, v), numbers, strict=True):
        if isinstance(left_out, Tensor):  # a value that is kept is rounded to itself
            exact = torch.where(left_out > 0, target.float(), exact)  # noqa: PLW2901
        round_stochastically(exact, out=target, halfwords=number.view(exact.shape))


def _divide(x: Tensor, by: float | Tensor) -> Tensor:
    """Divides by a tensor of the size of x, since torch multiplies by the inverse of a scalar divisor."""
    return x.div(by.expand_as(x) if isinstance(by, Tensor) else torch.full_like(x, by))


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


def shard_index(parameter: Tensor) -> int:
    """Returns the index of this rank's part of a parameter: equal on replicas, 0 for a whole parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, index = parameter.device_mesh, 0
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():  # FSDP2's `_StridedShard` is not a Shard
            index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    return index
