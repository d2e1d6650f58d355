"""Experts of a mixture: the router, and feed-forward layers whose weights are stacked.

Tokens are sorted by expert, and each matrix of all experts is one grouped matmul. No token is dropped: an
expert computes as many rows as come to it, which may be none.

[Note: the seam of experts]
A module of experts has `num_experts`, parameters whose dim 0 is the expert, and
`forward(hidden_states, top_k_index, top_k_weights)`, as those of transformers 5 have. So it can compute with
other rows and with fewer experts: see `fullshard.parallel.expert_parallel`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import reduce_over_ranks
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.torch_private.fake_tensors import FakeTensor

_ALIGNED_BYTES = 16
_HOPPER, _BLACKWELL = 9, 10  # major capabilities of NVIDIA's GPUs with one kernel for grouped matmuls in bf16


class Routing(NamedTuple):
    """The experts of each token.

    experts, weights: (tokens, experts per token)
    balance_loss: (batch,), of each sequence, or None
    """

    experts: Tensor
    weights: Tensor
    balance_loss: Tensor | None


class Router(nn.Module):
    """Chooses the experts of each token, in fp32 (or a wider dtype).

    The scores of a token are a softmax over all experts, or with `balance_bias_rate` sigmoids. The highest
    are chosen, and their scores, scaled to a sum of 1, are the weights.

    balance_loss   factor · N / (K T) · Σ_e (tokens that chose e) · (mean share of e in the scores), for N
                   experts, K of them per token, and T tokens of a sequence (arXiv:2412.19437, equations 17 to
                   20). It is a function of one sequence, so it depends neither on ranks nor on microbatches.
    balance_bias   (N,), added to the scores for the choice alone. `fullshard.training.step` raises it
                   after a step for experts with fewer tokens than the mean, and lowers it for the others.
    tokens         (N,), tokens that chose each expert since the last such change

    Ranks may share sequences: see `add_group_that_shares_sequences`.
    """

    balance_bias: Tensor
    tokens: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.d_model))
        self.experts_per_token, self.factor = config.experts_per_token, config.balance_loss
        self.has_bias = config.balance_bias_rate > 0
        self.ranks_per_sequence, self.tensor_group, self.context_group = 1, "", ""
        if self.has_bias:
            self.register_buffer("balance_bias", torch.empty(config.experts, dtype=torch.float32))
            self.register_buffer("tokens", torch.empty(config.experts, dtype=torch.float32), persistent=False)
            self.reset_buffers()

    def reset_buffers(self) -> None:
        if self.has_bias and not self.balance_bias.is_meta:
            self.balance_bias.zero_()
            self.tokens.zero_()

    def add_group_that_shares_sequences(
        self, ranks: int, *, tensor_group: str = "", context_group: str = ""
    ) -> None:
        """Makes the balance loss that of whole sequences, of which each of `ranks` ranks has a part.

        A second call multiplies the ranks.

        tensor_group: name of the ranks' process group if they share matmuls: each has the loss of all labels
        context_group: name of their group if they share only sequences: each has the loss of its own labels
        """
        self.ranks_per_sequence *= ranks
        self.tensor_group = tensor_group or self.tensor_group
        self.context_group = context_group or self.context_group

    def forward(self, x: Tensor) -> Routing:
        """Returns the experts of the tokens of x (batch, sequence, d_model)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.sigmoid() if self.has_bias else logits.softmax(-1)
        chosen = scores.detach() + self.balance_bias if self.has_bias else scores.detach()
        index = chosen.topk(self.experts_per_token, dim=-1).indices  # (batch, sequence, experts per token)
        weights = scores.gather(-1, index)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.has_bias and self.training:
            self.tokens.add_(count_rows_per_expert(index, len(self.weight)))
        balance = self._balance_loss(scores, index) if self.factor and self.training else None
        return Routing(index.flatten(0, 1), weights.flatten(0, 1), balance)

    def _balance_loss(self, scores: Tensor, index: Tensor) -> Tensor:
        length, experts = scores.shape[1] * self.ranks_per_sequence, scores.shape[2]
        chosen = torch.zeros_like(scores).scatter_(-1, index, 1.0).sum(1)  # (batch, experts)
        shares = (scores / scores.sum(-1, keepdim=True)).sum(1) / length
        both = torch.stack((chosen, shares))
        if self.tensor_group:  # the ranks' gradients are summed: see [Note: whole parameters]
            own = both.detach()
            both = both + (reduce_over_ranks(own, False, self.tensor_group) - own)
        if self.context_group:
            both = reduce_over_ranks(both, False, self.context_group)
        return self.factor * experts / (self.experts_per_token * length) * (both[0] * both[1]).sum(-1)


class Experts(nn.Module):
    """SwiGLU experts with stacked weights (experts, in, out). See [Note: the seam of experts]."""

    takes_any_experts = True

    def __init__(self, experts: int, *, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate = nn.Parameter(torch.empty(experts, d_model, d_ff))
        self.up = nn.Parameter(torch.empty(experts, d_model, d_ff))
        self.down = nn.Parameter(torch.empty(experts, d_ff, d_model))

    def forward(  # signature: of transformers' experts
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, (tokens, d_model).

        hidden_states: (tokens, d_model)
        top_k_index, top_k_weights: (tokens, experts per token)
        """
        order = sort_choices_by_expert(top_k_index)
        ends = count_rows_per_expert(top_k_index, self.num_experts).cumsum(0).to(torch.int32)
        rows = gather_rows(hidden_states, *order, top_k_index.shape[1])
        if rows.is_cuda and not _has_grouped_matmul_kernel(rows, self.gate):
            ends = ends.cpu()  # waits for the device once per layer, not in each of nine matmuls
        inner = F.silu(matmul_groups(rows, self.gate, ends=ends)) * matmul_groups(rows, self.up, ends=ends)
        return sum_weighted_rows_per_token(
            matmul_groups(inner, self.down, ends=ends), order, weights=top_k_weights
        )


class ChoiceOrder(NamedTuple):
    """The choices of all tokens, sorted by expert. Both are (tokens · choices,), and inverses of each other.

    choices: the choice of each row
    rows: the row of each choice
    """

    choices: Tensor
    rows: Tensor


def sort_choices_by_expert(index: Tensor) -> ChoiceOrder:
    """Returns the order of the rows of all choices. `index`: (tokens, choices), the experts."""
    choices = index.flatten().argsort(stable=True)
    numbers = torch.arange(len(choices), device=choices.device)
    return ChoiceOrder(choices, torch.empty_like(choices).scatter_(0, choices, numbers))


def count_rows_per_expert(index: Tensor, experts: int) -> Tensor:
    """Returns the number of times that each expert occurs in `index`, int64 (experts,)."""
    counts = torch.zeros(experts, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten()))


def sum_weighted_rows_per_token(rows: Tensor, order: ChoiceOrder, *, weights: Tensor) -> Tensor:
    """Returns the weighted sums of the rows of each token, (tokens, channels).

    rows: (tokens · choices, channels), sorted by expert
    weights: (tokens, choices)
    """
    each = gather_rows(rows, order.rows, order.choices, 1).view(*weights.shape, rows.shape[-1])
    return (each * weights.to(rows.dtype).unsqueeze(-1)).sum(1)


@torch.library.custom_op("fullshard::gather_rows", mutates_args=())
def gather_rows(  # signature: torch's
    rows: Tensor, order: Tensor, inverse: Tensor, times: int
) -> Tensor:
    """Returns rows[order // times]. `order` is a permutation of all row numbers, and `inverse` its inverse.

    The gradient is gathered too. torch's own gradient of an index would sort the index, and add row by row.
    """
    return rows.index_select(0, order if times == 1 else order // times)


@gather_rows.register_fake
def _fake_gather_rows(  # signature: torch's
    rows: Tensor, order: Tensor, inverse: Tensor, times: int
) -> Tensor:
    return rows.new_empty(len(order), rows.shape[-1])


def _save_inverse(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # signature: torch's
    _, order, inverse, ctx.times = inputs
    ctx.save_for_backward(order, inverse)


@partial(gather_rows.register_autograd, setup_context=_save_inverse)
def _gather_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    order, inverse = ctx.saved_tensors
    each = gather_rows(gradient, inverse, order, 1)
    if ctx.times > 1:
        each = each.view(len(each) // ctx.times, ctx.times, each.shape[-1]).sum(1)
    return each, None, None, None


def matmul_groups(rows: Tensor, matrices: Tensor, *, ends: Tensor) -> Tensor:
    """Returns rows (rows, in) times the matrix of their group, (rows, out).

    matrices: (groups, in, out)
    ends: int32 (groups,), where each group of rows ends
    """
    if _has_grouped_matmul_kernel(rows, matrices) and not _leaves_empty_groups(rows):
        return F.grouped_mm(rows, matrices, offs=ends)
    return matmul_groups_in_turn(rows, matrices, ends)


def _leaves_empty_groups(rows: Tensor) -> bool:
    """Returns whether gradients of groups without a row are left undefined (pytorch/pytorch#172439)."""
    return rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] == _BLACKWELL


def clear_empty_groups(product: Tensor, ends: Tensor) -> Tensor:
    """Zeroes the matrices of groups without a row in place. `product`: (groups, in, out)."""
    is_empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return product.masked_fill_(is_empty.view(-1, 1, 1), 0.0)


def _has_grouped_matmul_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Returns whether torch has one kernel for these groups: not in fp64, nor for rows that are unaligned.

    On GPUs other than Hopper's and Blackwell's of data centres, and in other dtypes than bf16, torch's
    function multiplies in turn, and each call waits for the device. On the CPU it waits for nothing.
    Without values, for the compiler and on fake tensors, torch knows it in bf16 alone.
    """
    has_values = not (torch.compiler.is_compiling() or isinstance(rows, FakeTensor))
    if not has_values and rows.dtype != torch.bfloat16:
        return False
    aligned = all(width * rows.itemsize % _ALIGNED_BYTES == 0 for width in matrices.shape[1:])
    if not aligned or rows.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if not rows.is_cuda:
        return True
    major = torch.cuda.get_device_capability(rows.device)[0]
    return rows.dtype == torch.bfloat16 and major in (_HOPPER, _BLACKWELL)


# Named as torch's, whose meaning it has, so that traces count it alike.
@torch.library.custom_op("fullshard::_grouped_mm", mutates_args=())
def matmul_groups_in_turn(left: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:  # signature: torch's
    """Multiplies one group at a time, where torch has no kernel for all, or an incomplete one.

    left (rows, in) and mat2 (groups, in, out) give (rows, out); left (in, rows) and mat2 (rows, out) give
    (groups, in, out), the gradient of the matrices.
    """
    if _leaves_empty_groups(left) and _has_grouped_matmul_kernel(left, mat2):
        product = F.grouped_mm(left, mat2, offs=offs)
        return product if mat2.ndim == 3 else clear_empty_groups(product, offs)
    ends = [0, *offs.tolist()]
    spans = [slice(begin, end) for begin, end in zip(ends, ends[1:], strict=False)]
    if mat2.ndim == 2:
        out = mat2.new_empty(len(spans), left.shape[0], mat2.shape[1])
        for span, product in zip(spans, out, strict=True):
            torch.mm(left[:, span], mat2[span], out=product)
        return out
    out = left.new_empty(left.shape[0], mat2.shape[2])
    for span, matrix in zip(spans, mat2, strict=True):
        torch.mm(left[span], matrix, out=out[span])
    return out


@matmul_groups_in_turn.register_fake
def _empty_grouped_product(left: Tensor, mat2: Tensor, offs: Tensor) -> Tensor:  # signature: torch's
    shape = (left.shape[0], mat2.shape[-1])
    return left.new_empty(shape if mat2.ndim == 3 else (len(offs), *shape))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # signature: torch's
    ctx.save_for_backward(*inputs)


@partial(matmul_groups_in_turn.register_autograd, setup_context=_save_inputs)
def _grouped_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    left, mat2, offs = ctx.saved_tensors
    needs_left, needs_mat2, _ = ctx.needs_input_grad
    of_left = matmul_groups_in_turn(gradient, mat2.transpose(1, 2), offs) if needs_left else None
    return of_left, matmul_groups_in_turn(left.t(), gradient, offs) if needs_mat2 else None, None
