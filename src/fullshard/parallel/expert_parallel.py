"""Mixtures whose experts are divided over ranks (expert parallel): arXiv:2006.16668, without dropped tokens.

[Note: expert parallel]
E adjacent ranks have 1/E of the experts of each layer. They have batches of their own, and send each other
the rows for their experts:

    route ── counts ⇄ ── rows ⇄ ── the rank's own experts ── rows ⇄ ── weighted sum over a token's choices

Each layer exchanges counts first, since ranks get different numbers of rows, and then rows twice. Backward
exchanges rows twice. A rank whose experts get no row takes part in all exchanges.

[Note: averages over fewer ranks]
Over N ranks, T of which share each matmul, FSDP2 averages most gradients over N/T ranks, and those of a
rank's experts over the N/E that have the same ones. Each of the latter is already a sum over the tokens of E
ranks. So gradients that enter the experts are divided by E/T, and those that leave them are multiplied by
E/T. This is exact if E and T are powers of two. If ranks share matmuls and do not divide experts, these are
sharded over all N ranks, since each has other tokens: the same holds with E = 1.

The exchanges are operations of torch, with gradients, and with shapes on fake tensors: there each rank gets
as many rows as it sends. `group` is the name of a process group (`dist.ProcessGroup.group_name`).

Forwards are replaced, not modules, so names in checkpoints stay. Parameters are divided when the model is
sharded: see `fullshard.parallel.model_parallel`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.distributed.collectives import exchange_row_parts
from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.tensors import is_experts
from fullshard.errors import ShardError
from fullshard.models.experts import (
    count_rows_per_expert,
    gather_rows,
    sort_choices_by_expert,
    sum_weighted_rows_per_token,
)
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import indivisible_experts_error

EXCHANGE_COUNTS, EXCHANGE_ROWS = "exchange_counts", "exchange_rows"
"""Names of the operations, in the namespace `fullshard`."""


@torch.library.custom_op(f"fullshard::{EXCHANGE_COUNTS}", mutates_args=())
def exchange_counts(counts: Tensor, group: str) -> tuple[Tensor, Tensor]:  # signature: torch's
    """Returns the counts that all ranks sent this one, and sizes for `exchange_rows`. Collective.

    counts: (ranks, experts of each), rows for each expert of each rank; so is the first result
    """
    with TimedRange(EXCHANGE_COUNTS):
        each, direct = [1] * len(counts), counts.device.type == "cpu"
        received = exchange_row_parts(counts, each, received=each, group=group, direct=direct)
    # Copied to the host once, which waits for the device: exchanges need the sizes there. A part of this
    # operation, so that a recompute that saves its results does not wait again.
    return received, torch.stack((counts.sum(1), received.sum(1))).cpu()


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
        direct = rows.device.type == "cpu"
        result = exchange_row_parts(rows, sent, received=received, group=group, direct=direct)
    return result if scale == 1.0 else result.mul_(scale)


@exchange_counts.register_fake
def _fake_exchange_counts(counts: Tensor, group: str) -> tuple[Tensor, Tensor]:  # signature: torch's
    return torch.empty_like(counts), counts.new_empty((2, len(counts)), device="cpu")


@exchange_rows.register_fake
def _fake_exchange_rows(  # signature: torch's
    rows: Tensor, sizes: Tensor, scale: float, gradient_scale: float, group: str, *, returns: bool
) -> Tensor:
    return torch.empty_like(rows)


def _save_sizes(  # signature: torch's
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _, ctx.sizes, _, ctx.scale, ctx.group = inputs
    ctx.returns = keyword_only_inputs["returns"]


@partial(exchange_rows.register_autograd, setup_context=_save_sizes)
def _exchange_rows_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    sizes = ctx.sizes.flip(0)
    back = exchange_rows(gradient.contiguous(), sizes, ctx.scale, 1.0, ctx.group, returns=not ctx.returns)
    return back, None, None, None, None


def divide_experts_and_return_split_dims(model: nn.Module, plan: Plan, *, group: str = "") -> dict[str, int]:
    """Divides the experts of `model` over ranks. Returns the dim in which each parameter of them is divided.

    The parameters themselves are divided when the model is sharded. If only matmuls are divided, the experts
    stay whole, and only their gradients are scaled: see [Note: averages over fewer ranks].

    group: name of the process group of the ranks that divide experts; fake tensors need none

    Raises ShardError for a model without such experts (see `is_experts`), and PlanError if the ranks cannot
    have equally many.
    """
    ranks, scale = plan.expert_parallel, plan.expert_parallel / plan.tensor_parallel
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if ranks == 1:
        for experts in found.values():
            experts.forward = partial(_compute_with_scaled_gradients, experts.forward, scale)
        return {}
    if not found:
        raise ShardError(
            f"the experts of {type(model).__name__} cannot be divided over ranks.",
            got=f"sharding.expert_parallel = {ranks}",
            why="it has none, or they are not stacked in one module that takes tokens and their experts",
            fix="sharding.expert_parallel = 1",
        )
    for name, module in found.items():
        experts: Any = module
        if experts.num_experts % ranks:
            raise indivisible_experts_error(experts.num_experts, ranks=ranks, key=f"experts in {name}")
        divided = _DividedExperts(module, experts.forward, experts.num_experts, ranks, scale, group)
        # The compiler cannot know how many rows come.
        experts.forward = torch.compiler.disable(divided.compute)
        experts.num_experts //= ranks
    return {f"{name}.{key}": 0 for name, module in found.items() for key, _ in module.named_parameters()}


@dataclass(frozen=True)
class _DividedExperts:
    """The experts of one layer, divided over `ranks` ranks. See [Note: expert parallel].

    module, own: the experts of this rank, and their forward
    experts: number of experts of all ranks
    scale: see [Note: averages over fewer ranks]
    """

    module: nn.Module
    own: Callable[..., Tensor]
    experts: int
    ranks: int
    scale: float
    group: str

    def compute(  # signature: of transformers' experts
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Returns what the experts of all ranks compute, as `experts.Experts` does. Collective."""
        order = sort_choices_by_expert(top_k_index)  # and so by rank
        sent = count_rows_per_expert(top_k_index, self.experts).view(self.ranks, -1)  # (ranks, experts each)
        received, sizes = exchange_counts(sent, self.group)
        rows = gather_rows(hidden_states, *order, top_k_index.shape[1])
        rows = exchange_rows(rows, sizes, 1.0, self.scale, self.group, returns=False)
        if len(rows):
            each = torch.arange(received.shape[1], device=rows.device).repeat(self.ranks)
            index = each.repeat_interleave(received.flatten(), output_size=len(rows))
            y = self.own(rows, index.unsqueeze(1), rows.new_ones(len(rows), 1))
        else:
            # No kernel runs on nothing. Sums of empty tensors make backward take part in the exchanges, and
            # give all parameters a gradient of zeros.
            y = rows
            for parameter in self.module.parameters():
                y = y + parameter.flatten()[:0].view_as(rows).to(rows.dtype)
        del rows
        y = exchange_rows(y, sizes.flip(0), 1.0, 1 / self.scale, self.group, returns=True)
        return sum_weighted_rows_per_token(y, order, weights=top_k_weights)


class _ScaledGradient(torch.autograd.Function):
    """A copy of its input, whose gradient is multiplied by a factor. FSDP2 warns of a view as an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def _compute_with_scaled_gradients(  # signature: of transformers' experts, after the bound arguments
    own: Callable[..., Tensor],
    scale: float,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    x, weights = (_ScaledGradient.apply(one, scale) for one in (hidden_states, top_k_weights))
    return _ScaledGradient.apply(own(x, top_k_index, weights), 1 / scale)  # pyright: ignore[reportReturnType]
