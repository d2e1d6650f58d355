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

Forwards are replaced, not modules, so names in checkpoints stay. Parameters are divided when the model is
sharded: see `fullshard.parallel.model_parallel`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.distributed.row_exchange import exchange_counts, exchange_rows
from fullshard.distributed.tensors import is_experts
from fullshard.errors import ShardError
from fullshard.models.experts import count_rows, sum_choices
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import indivisible_experts_error


def use_expert_parallel(model: nn.Module, plan: Plan, *, group: str = "") -> dict[str, int]:
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
        divided = _DividedExperts(experts.forward, experts.num_experts, ranks, scale, group)
        # The compiler cannot know how many rows come.
        experts.forward = torch.compiler.disable(divided.compute)
        experts.num_experts //= ranks
    return {f"{name}.{key}": 0 for name, module in found.items() for key, _ in module.named_parameters()}


@dataclass(frozen=True)
class _DividedExperts:
    """The experts of one layer, divided over `ranks` ranks. See [Note: expert parallel].

    own: forward of the experts of this rank
    experts: number of experts of all ranks
    scale: see [Note: averages over fewer ranks]
    """

    own: Callable[..., Tensor]
    experts: int
    ranks: int
    scale: float
    group: str

    def compute(  # signature: of transformers' experts
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Returns what the experts of all ranks compute, as `experts.Experts` does. Collective."""
        order = top_k_index.flatten().argsort(stable=True)  # by expert, and so by rank
        sent = count_rows(top_k_index, self.experts).view(self.ranks, -1)  # (ranks, experts of each)
        received = exchange_counts(sent, self.group)
        # Copied to the host once, which waits for the device: exchanges need the sizes there.
        sizes = torch.stack((sent.sum(1), received.sum(1))).cpu()
        rows = hidden_states[order // top_k_index.shape[1]]
        rows = exchange_rows(rows, sizes, 1.0, self.scale, self.group, returns=False)
        y = self._compute_own(rows, received)
        del rows
        y = exchange_rows(y, sizes.flip(0), 1.0, 1 / self.scale, self.group, returns=True)
        return sum_choices(y, order, weights=top_k_weights)

    def _compute_own(self, rows: Tensor, received: Tensor) -> Tensor:
        """Returns the outputs of this rank's experts. `received`: (ranks, experts), numbers of rows."""
        each = torch.arange(received.shape[1], device=rows.device).repeat(self.ranks)
        index = each.repeat_interleave(received.flatten(), output_size=len(rows))
        y = self.own(rows, index.unsqueeze(1), rows.new_ones(len(rows), 1))
        # A sum of two empty tensors makes backward take part in the exchanges.
        return y + rows if len(rows) == 0 else y


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
