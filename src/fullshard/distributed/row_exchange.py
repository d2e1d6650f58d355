"""Rows that ranks send each other, as many as each needs (dropless all-to-all).

The exchanges are operations of torch, with gradients, and with shapes on fake tensors: there each rank gets
as many rows as it sends. `group` is the name of a process group (`dist.ProcessGroup.group_name`).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullshard.distributed.collectives import exchange_directly, exchange_parts_directly
from fullshard.distributed.ranges import TimedRange
from fullshard.torch_private.groups import group_of_name

_FUNCTIONAL = torch.ops._c10d_functional
EXCHANGE_COUNTS, EXCHANGE_ROWS = "exchange_counts", "exchange_rows"
"""Names of the operations, in the namespace `fullshard`."""


@torch.library.custom_op(f"fullshard::{EXCHANGE_COUNTS}", mutates_args=())
def exchange_counts(counts: Tensor, group: str) -> Tensor:  # signature: torch's
    """Returns what all ranks sent this one, (ranks, ...). Collective.

    counts: (ranks, ...), the part for each rank
    """
    with TimedRange(EXCHANGE_COUNTS):
        if counts.device.type == "cpu":
            return exchange_directly(counts, group_of_name(group))
        each = [1] * len(counts)
        return _FUNCTIONAL.wait_tensor(_FUNCTIONAL.all_to_all_single(counts, each, each, group))


@torch.library.custom_op(f"fullshard::{EXCHANGE_ROWS}", mutates_args=())
def exchange_rows(  # signature: torch's
    rows: Tensor, sizes: Tensor, scale: float, gradient_scale: float, group: str, *, returns: bool
) -> Tensor:
    """Returns the rows that all ranks sent this one, in the order of ranks. Collective.

    rows: (rows, channels), those for each rank in turn
    sizes: int64 (2, ranks) on the CPU: the number of rows that go to each rank, and that come from each
    scale, gradient_scale: factors of the result, and of the gradient of `rows`
    returns: False for rows on their way to their experts, True for rows on their way back
    """
    sent, received = (list(map(int, one.tolist())) for one in sizes)
    with TimedRange(EXCHANGE_ROWS):
        if rows.device.type == "cpu":
            result = rows.new_empty((sum(received), rows.shape[1]))
            exchange_parts_directly(rows.split(sent), result.split(received), group=group_of_name(group))
        else:
            result = _FUNCTIONAL.all_to_all_single(rows.contiguous(), received, sent, group)
            result = _FUNCTIONAL.wait_tensor(result)
    return result if scale == 1.0 else result.mul_(scale)


@exchange_counts.register_fake
def _counts_shape(counts: Tensor, group: str) -> Tensor:  # signature: torch's
    return torch.empty_like(counts)


@exchange_rows.register_fake
def _balanced_shape(  # signature: torch's
    rows: Tensor, sizes: Tensor, scale: float, gradient_scale: float, group: str, *, returns: bool
) -> Tensor:
    return torch.empty_like(rows)


def _save_sizes(  # signature: torch's
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _, ctx.sizes, _, ctx.scale, ctx.group = inputs
    ctx.returns = keyword_only_inputs["returns"]


@partial(exchange_rows.register_autograd, setup_context=_save_sizes)
def _return_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    sizes = ctx.sizes.flip(0)
    back = exchange_rows(gradient.contiguous(), sizes, ctx.scale, 1.0, ctx.group, returns=not ctx.returns)
    return back, None, None, None, None
