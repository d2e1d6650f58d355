"""AdamW in bf16 with stochastic rounding, up or down at random, so that small updates are not lost."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


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
    generator: torch.Generator,
) -> None:
    """Updates `state`, (value, first moment, second moment), in place with AdamW.

    The update is computed in fp32, and rounded stochastically to the dtypes of `state`. `step` counts from 1.
    """
    value, first, second = state
    g = gradient.float()
    m = first.float().lerp_(g, 1 - options.beta1)
    v = second.float().mul_(options.beta2).addcmul_(g, g, value=1 - options.beta2)
    new = value.float().mul_(1 - options.lr * options.weight_decay)
    denominator = (v / (1 - options.beta2**step)).sqrt_().add_(options.eps)
    new.addcdiv_(m, denominator, value=-options.lr / (1 - options.beta1**step))
    for target, exact in ((value, new), (first, m), (second, v)):
        round_stochastically(exact, out=target, generator=generator)


def round_stochastically(exact: Tensor, *, out: Tensor, generator: torch.Generator) -> None:
    """Writes fp32 `exact` into `out`; to bf16 by adding random low bits and truncating.

    A bf16 is the upper half of an fp32. Of the 2^16 equally likely random numbers, as many carry into the
    upper half as the value of the lower half. So the mean over roundings is `exact`, and values that bf16 can
    represent are unchanged. Infinities, NaNs and other dtypes of `out` are copied as torch rounds them.
    """
    if out.dtype is not torch.bfloat16:
        out.copy_(exact)
        return
    bits = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(torch.where(exact.isfinite(), bits.view(torch.float32), exact))


def shard_index(parameter: Tensor) -> int:
    """Returns the rank's index along the mesh axis that shards the parameter, or 0 if none does."""
    if not isinstance(parameter, DTensor):
        return 0
    axes = (axis for axis, placement in enumerate(parameter.placements) if isinstance(placement, Shard))
    return next((parameter.device_mesh.get_local_rank(axis) for axis in axes), 0)
