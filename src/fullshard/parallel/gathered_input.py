"""Matmuls of gathered sequences that save only this rank's part for backward, and gather again there.

Several matmuls may read one gathered tensor: queries, keys and values, or gate and up. The first of them to
run in backward gathers, and the last frees. See arXiv:2205.05198, section 4.2.2.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard.distributed.sequence_parts import gather_sequence

_ATTRIBUTE = "_fullshard_gathered_from"


class _Backward:
    """The gathered tensor while backward needs it."""

    def __init__(self, ranks: int, group: str) -> None:
        self.ranks, self.group = ranks, group
        self.readers = 0  # matmuls whose backward reads it
        self._left, self._whole = 0, None

    def gather(self, part: Tensor) -> Tensor:
        """Returns the gathered tensor to one of the readers."""
        if self._whole is None:
            self._whole, self._left = gather_sequence(part, self.ranks, 1, self.group), self.readers
        whole, self._left = self._whole, self._left - 1
        if not self._left:
            self._whole = None
        return whole


class _Source(NamedTuple):
    """The part that a gathered tensor was gathered from, and its state in backward."""

    part: Tensor
    backward: _Backward


def gather_for_matmuls(part: Tensor, *, ranks: int, group: str) -> Tensor:
    """Returns whole sequences (..., sequence, channels), of which `multiply_gathered` saves only `part`."""
    whole = gather_sequence(part, ranks, 1, group)
    if torch.is_grad_enabled():
        setattr(whole, _ATTRIBUTE, _Source(part.detach(), _Backward(ranks, group)))
    return whole


def multiply_gathered(x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
    """Returns F.linear(x, weight, bias). If `x` is from `gather_for_matmuls`, backward gathers it again."""
    source: _Source | None = getattr(x, _ATTRIBUTE, None)
    if source is None or not weight.requires_grad:
        return F.linear(x, weight, bias)
    return _GatherAgain.apply(x, weight, bias, source)  # pyright: ignore[reportReturnType]


class _GatherAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, weight: Tensor, bias: Tensor | None, source: _Source) -> Tensor:
        ctx.save_for_backward(source.part, weight)
        ctx.gathered = source.backward
        ctx.gathered.readers += 1
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        part, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_weight = rows.t() @ ctx.gathered.gather(part).flatten(0, -2)
        of_bias = rows.sum(0) if needs_bias else None
        return gradient @ weight if needs_input else None, of_weight, of_bias, None
