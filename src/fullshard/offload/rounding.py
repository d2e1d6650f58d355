"""AdamW in bfloat16, and the rounding that lets it learn: up or down at random, right in the mean."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class AdamOptions(NamedTuple):
    """Of one update of some parameters."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def adamw_rounded(
    state: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    *,
    step: int,
    options: AdamOptions,
    generator: torch.Generator,
) -> None:
    """One update of (value, first moment, second moment), in place: computed in fp32, rounded at random into
    their dtype. `step`: from 1."""
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
    """Writes fp32 `exact` into `out`; to bf16 by adding random low bits and cutting them.

    A bf16 is the upper half of an fp32: of the 2^16 equally likely additions, as many carry into the upper
    half as the lower half's value, so the mean over roundings is `exact`, and what bf16 can hold stays as it
    is. Infinities, NaNs and other dtypes are copied to nearest.
    """
    if out.dtype is not torch.bfloat16:
        out.copy_(exact)
        return
    bits = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(torch.where(exact.isfinite(), bits.view(torch.float32), exact))


def shard_index(parameter: Tensor) -> int:
    """The rank's place along the mesh axis that shards the parameter; the same on all replicas of a shard."""
    if not isinstance(parameter, DTensor):
        return 0
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            return parameter.device_mesh.get_local_rank(axis)
    return 0
