"""Adafactor on shards: the second moment of a matrix is kept as means of its rows and of its columns.

Shazeer & Stern, arXiv:1804.04235, as transformers' `Adafactor(relative_step=False, scale_parameter=False)`
computes it. For a gradient G of an m x n matrix, step t, rate η and weight decay λ:

    β = 1 - t^-0.8
    R ← β R + (1 - β) mean over columns of (G² + ε)         C ← β C + (1 - β) mean over rows of (G² + ε)
    U = G / √(R C / mean(C))                                U = G / √V in vectors, V ← β V + (1 - β) (G² + ε)
    p ← (1 - η λ) p - η U / max(1, rms(U))

The last two dims of a parameter are a matrix: each expert of a stack has its own R and C. rms(U) is that of
the whole parameter. A matrix with one row or column is updated as a vector, for which R C / mean(C) is V.
transformers divides by mean(R), which differs from mean(C) only in rounding.

[Note: sums over ranks]
R, C, mean(C) and rms(U) need sums over the ranks that have other parts of the parameter. On each mesh axis
that needs them, all parameters share one all-reduce for R and C, one for mean(C) and one for rms(U).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import prod, sqrt
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.distributed.collectives import all_reduce_together
from fullshard.distributed.tensors import zeros_sharded_like
from fullshard.spec.dealing import dims_of_means
from fullshard.torch_private.tensors import foreach_norm
from fullshard.training.low_bit_adamw import local_part_of, step_count_of

_EPS, _DECAY = 1e-30, -0.8  # ε, and the exponent of t


class Adafactor(torch.optim.Optimizer):
    """Adafactor without a momentum. `step` is collective, and overwrites the gradients.

    grad_scale, found_inf: as in torch's fused AdamW; None stands for 1 and 0. See [Note: decided on the
        device] in `gradients.py`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        updates = [
            self._start_update(parameter, group)
            for group in self.param_groups
            for parameter in cast(list[Tensor], group["params"])
            if parameter.grad is not None
        ]
        if updates:
            self._update_second_moments(updates)
            self._divide_by_second_moments(updates)
            self._apply(updates)
        return loss

    def _start_update(self, parameter: Tensor, group: dict[str, Any]) -> "_Update":
        """Counts the step, and returns the update with G. G is 0 if the step is skipped."""
        state, means = self.state[parameter], dims_of_means(tuple(parameter.shape))
        for key, dims in means.items():
            if key not in state:
                shape = [1 if dim in dims else n for dim, n in enumerate(parameter.shape)]
                state[key] = zeros_sharded_like(parameter, shape, dtype=torch.float32)
        gradient: Tensor = local_part_of(parameter.grad).float()
        if self.grad_scale is not None:
            gradient.div_(self.grad_scale)
        if self.found_inf is not None:
            gradient.masked_fill_(self.found_inf.bool(), 0)
        taken = 1 if self.found_inf is None else 1 - self.found_inf
        count = step_count_of(state, parameter).add_(taken)
        weight = count.clamp(min=1).pow_(_DECAY).mul_(taken)  # 1 - β
        moments = [(dims, local_part_of(state[key])) for key, dims in means.items()]
        return _Update(parameter, group, gradient, weight, moments)

    def _update_second_moments(self, updates: "list[_Update]") -> None:
        every = [(one, dims, moment) for one in updates for dims, moment in one.moments]
        totals = [_sum_squares(one.gradient, dims) for one, dims, _ in every]
        _sum_over_ranks(
            (total, one.parameter, dims) for total, (one, dims, _) in zip(totals, every, strict=True)
        )
        for total, (one, dims, moment) in zip(totals, every, strict=True):
            count = prod(one.parameter.shape[dim] for dim in dims)
            moment.lerp_(total.div_(count).add_(_EPS), one.weight)

    def _divide_by_second_moments(self, updates: "list[_Update]") -> None:
        """Replaces G by U. A moment is below ε only until the first step that is not skipped."""
        for one in updates:
            for _, moment in one.moments:
                one.gradient.mul_(moment.clamp(min=_EPS).rsqrt_())
        factored = [one for one in updates if len(one.moments) == 2]
        totals = [one.moments[1][1].sum(-1, keepdim=True) for one in factored]
        last = (one.moments[0][0] for one in factored)
        _sum_over_ranks(zip(totals, (one.parameter for one in factored), last, strict=True))
        for one, total in zip(factored, totals, strict=True):
            one.gradient.mul_(total.div_(one.parameter.shape[-1]).sqrt_())

    def _apply(self, updates: "list[_Update]") -> None:
        totals = [norm.square_() for norm in foreach_norm([one.gradient for one in updates], 2)]
        _sum_over_ranks(
            (total, one.parameter, range(one.parameter.ndim))
            for total, one in zip(totals, updates, strict=True)
        )
        for one, total in zip(updates, totals, strict=True):
            rate, value = float(one.group["lr"]), cast(Tensor, local_part_of(one.parameter))
            kept = 1 - rate * one.group["weight_decay"]
            value.mul_(kept if self.found_inf is None else torch.where(self.found_inf.bool(), 1.0, kept))
            excess = total.sqrt_().div_(sqrt(one.parameter.numel())).clamp_(min=1)
            value.sub_(one.gradient.mul_(rate / excess))


class _Update(NamedTuple):
    """The update of a parameter in one step.

    gradient: this rank's part of G, which becomes that of U
    weight: 1 - β; 0 if the step is skipped
    moments: (dims over which it is a mean, this rank's part) of each second moment
    """

    parameter: Tensor
    group: dict[str, Any]
    gradient: Tensor
    weight: Tensor
    moments: list[tuple[tuple[int, ...], Tensor]]


def _sum_squares(part: Tensor, dims: tuple[int, ...]) -> Tensor:
    return torch.linalg.vector_norm(part, dim=dims, keepdim=True).square_() if dims else part.square()


def _sum_over_ranks(parts: Iterable[tuple[Tensor, Tensor, Sequence[int]]]) -> None:
    """Adds parts over ranks, in place: see [Note: sums over ranks]. Collective.

    parts: (this rank's part, its parameter, dims of the parameter over which it is a sum)
    """
    batches = defaultdict[dist.ProcessGroup, list[Tensor]](list)
    for part, parameter, dims in parts:
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for axis, placement in enumerate(parameter.placements):
                if mesh.size(axis) > 1 and not placement.is_replicate() and cast(Any, placement).dim in dims:
                    batches[mesh.get_group(axis)].append(part)
    for group, own in batches.items():
        all_reduce_together(own, group)
