"""Decoders of experts as the programs of published rows compute them: see `experts` in bench/published.toml.

"padded": KempnerForge (kempnerforge/model/moe.py at 2611fef, `moe_packed_experts`). Eager. The rows of each
expert are copied, expert by expert, into a block of as many rows as the fullest expert has, and back.
Autograd clones the whole block for each of these copies, and fills one with zeros for the gradient of each
slice.

"fused": NeMo Automodel with DeepEP and Megatron-Core with HybridEP. Permutation, SwiGLU with the router's
weights and, with `fused_rotation`, rotation are one kernel each, gate and up one matrix; a token travels
once to each rank that has experts of its own (`copies`, mean number of these ranks), and is summed over
them on its way back.

"grouped": fullshard's own experts. Both have heads of a width of their own and norms of queries and keys
(Qwen3).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from spelled import SpelledBlock, SpelledModel
from torch import Tensor, nn

from fullshard.models.decoder import Attention, DecoderModel, Mixture, RotaryTables, rotate_pairs
from fullshard.models.document_attention import QueryKeyValue, attend_causally
from fullshard.models.experts import matmul_groups
from fullshard.parallel.expert_parallel import exchange_rows
from fullshard.spec.settings.model_section import DecoderConfig


class PaddedExperts(nn.Module):
    """A mixture whose experts all compute as many rows as the fullest, `fullest` times the mean."""

    def __init__(self, config: DecoderConfig, *, fullest: float) -> None:
        super().__init__()
        experts, width, inner = config.experts, config.d_model, config.expert_width
        self.chosen, self.fullest = config.experts_per_token, fullest
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.gate = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, index = F.softmax(self.router(flat), dim=-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = index.flatten().argsort(stable=True)
        tokens = order // self.chosen
        rows = flat[tokens]
        y = self._compute(rows) * weights.flatten()[order].unsqueeze(-1)
        result = torch.zeros_like(flat).scatter_add_(0, tokens.unsqueeze(-1).expand_as(y), y)
        return result.view_as(x)

    def _compute(self, rows: Tensor) -> Tensor:
        experts = len(self.up)
        each = len(rows) // experts
        blocks = rows.new_zeros(experts, int(each * self.fullest), rows.shape[1])
        for expert in range(experts):
            blocks[expert, :each] = rows[expert * each : (expert + 1) * each]
        inner = F.silu(_multiply(blocks, self.gate)) * _multiply(blocks, self.up)
        outputs, y = _multiply(inner, self.down), torch.zeros_like(rows)
        for expert in range(experts):
            y[expert * each : (expert + 1) * each] = outputs[expert, :each]
        return y


def _multiply(blocks: Tensor, matrices: Tensor) -> Tensor:
    return torch._grouped_mm(blocks, matrices)


class PaddedBlock(SpelledBlock):
    def __init__(self, config: DecoderConfig, fullest: float) -> None:
        super().__init__(config, config.d_model // config.heads)
        del self.gate, self.up, self.down
        self.mixture = PaddedExperts(config, fullest=fullest)

    def feed_forward(self, y: Tensor) -> Tensor:
        return self.mixture(y)


class PaddedModel(SpelledModel):
    def __init__(self, config: DecoderConfig, *, fullest: float) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList(PaddedBlock(config, fullest) for _ in range(config.layers))


class WideAttention(Attention):
    """Attention whose heads are wider than d_model / heads, with norms of queries and keys."""

    rotates_in_one_kernel = False

    def __init__(self, config: DecoderConfig, head_dim: int) -> None:
        super().__init__(config)
        width = config.d_model
        self.head_dim = head_dim
        self.query = nn.Linear(width, config.heads * head_dim, bias=False)
        self.key = nn.Linear(width, config.kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, config.kv_heads * head_dim, bias=False)
        self.output = nn.Linear(config.heads * head_dim, width, bias=False)
        self.query_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)
        self.key_norm = nn.RMSNorm(head_dim, eps=config.norm_eps)

    def forward(self, x: Tensor, rotary: Tensor, mask: Any) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.query, self.key, self.value)
        )
        q, k, v = (one.transpose(1, 2) for one in (self.query_norm(q), self.key_norm(k), v))
        q, k = (rotate(one) if self.rotates_in_one_kernel else rotate_pairs(one, rotary) for one in (q, k))
        y = attend_causally(QueryKeyValue(q, k, v), mask)
        return self.output(y.flatten(2))


class WideModel(DecoderModel):
    def __init__(self, config: DecoderConfig, *, head_dim: int) -> None:
        super().__init__(config)
        self.positions = RotaryTables(head_dim, max_sequence=config.max_sequence, theta=config.rope_theta)
        for block in self.blocks:
            block.attention = WideAttention(config, head_dim)


class FusedModel(WideModel):
    def __init__(self, config: DecoderConfig, *, head_dim: int, copies: float, fused_rotation: bool) -> None:
        super().__init__(config, head_dim=head_dim)
        for block in self.blocks:
            block.attention.rotates_in_one_kernel = fused_rotation
            block.feed_forward = FusedMixture(config, copies)


class PlainRouter(nn.Linear):
    """Scores of each rank's own tokens, which also ranks that share matmuls need not share."""

    def add_group_that_shares_sequences(
        self, ranks: int, *, tensor_group: str = "", context_group: str = ""
    ) -> None:
        pass


class FusedMixture(Mixture):
    def __init__(self, config: DecoderConfig, copies: float) -> None:
        nn.Module.__init__(self)
        self.router, self.shared = PlainRouter(config.d_model, config.experts, bias=False), None
        self.experts = FusedExperts(config, copies)
        self.chosen = config.experts_per_token

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, index = F.softmax(self.router(flat), dim=-1).topk(self.chosen, dim=-1)
        return self.experts(flat, index, weights).view_as(x)


class FusedExperts(nn.Module):
    """Experts that also send their rows: their `forward` stays where others' is replaced by one that does."""

    takes_any_experts = True

    def __init__(self, config: DecoderConfig, copies: float) -> None:
        super().__init__()
        self.num_experts, width, inner = config.experts, config.d_model, config.expert_width
        self.all, self.copies = config.experts, copies
        self.gate_up = nn.Parameter(torch.empty(config.experts, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(config.experts, inner, width))

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "forward":
            super().__setattr__(name, value)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ranks = self.all // self.num_experts
        sizes = torch.zeros(2, ranks, dtype=torch.int64, device="cpu")
        sent = x if self.copies == 1 else move_rows(x, int(len(x) * self.copies))
        rows = move_rows(exchange_rows(sent, sizes, 1.0, 1.0, "expert", returns=False), index.numel())
        ends = torch.zeros(len(self.down), dtype=torch.int32, device=x.device)
        inner = swiglu(matmul_groups(rows, self.gate_up, ends=ends), weights.flatten())
        y = move_rows(matmul_groups(inner, self.down, ends=ends), len(sent))
        y = exchange_rows(y, sizes, 1.0, 1.0, "expert", returns=True)
        return y if self.copies == 1 else move_rows(y, len(x))


@torch.library.custom_op("bench::move_rows", mutates_args=())
def move_rows(rows: Tensor, count: int) -> Tensor:
    """Copies each row to several places, or sums several rows, in one kernel, to `count` rows."""
    return rows.new_empty(count, rows.shape[1])


@torch.library.custom_op("bench::swiglu", mutates_args=())
def swiglu(both: Tensor, weights: Tensor) -> Tensor:
    return both.new_empty(len(both), both.shape[1] // 2)


@torch.library.custom_op("bench::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, both: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), torch.empty_like(weights)


@torch.library.custom_op("bench::rotate", mutates_args=())
def rotate(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.count = len(inputs[0])
    if len(inputs) == 2 and isinstance(inputs[1], Tensor):
        ctx.save_for_backward(*inputs)


for _operation in (move_rows, swiglu, swiglu_backward, rotate):
    _operation.register_fake(_operation._init_fn)


@partial(move_rows.register_autograd, setup_context=_save)
def _move_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return move_rows(gradient, ctx.count), None


@partial(swiglu.register_autograd, setup_context=_save)
def _swiglu_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(gradient, *ctx.saved_tensors)


@partial(rotate.register_autograd, setup_context=_save)
def _rotate_back(ctx: Any, gradient: Tensor) -> Tensor:
    return rotate(gradient)
