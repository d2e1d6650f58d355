"""A decoder whose norms, rotary positions and repeated keys are written out in single operations.

KempnerForge's model is (kempnerforge/model at 21248ca), and torchtitan's of late 2024 (models/norms.py and
models/llama/model.py at ba24697): its norm goes to fp32 and back in eight operations, its rotation multiplies
complex numbers, and keys and values are repeated for their groups before attention.
Eager, each operation is a pass over memory; the reference decoder has a fused norm, and attention that knows
groups.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.spec.settings.model_section import DecoderConfig


class SpelledNorm(nn.Module):
    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """x: (batch, heads, sequence, head_dim); turns: (sequence, head_dim / 2), complex."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class SpelledBlock(nn.Module):
    def __init__(self, config: DecoderConfig, head_dim: int) -> None:
        super().__init__()
        width, self.head_dim = config.d_model, head_dim
        inner = config.heads * head_dim
        self.groups = config.heads // config.kv_heads
        self.attention_norm = SpelledNorm(width, eps=config.norm_eps)
        self.query = nn.Linear(width, inner, bias=False)
        self.key = nn.Linear(width, inner // self.groups, bias=False)
        self.value = nn.Linear(width, inner // self.groups, bias=False)
        self.output = nn.Linear(inner, width, bias=False)
        self.feed_forward_norm = SpelledNorm(width, eps=config.norm_eps)
        self.gate = nn.Linear(width, config.d_ff, bias=False)
        self.up = nn.Linear(width, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            projection(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        q, k = rotated(q, turns), rotated(k, turns)
        if self.groups > 1:
            k, v = (part.repeat_interleave(self.groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().flatten(2)
        x = x + self.output(y)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def feed_forward(self, y: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(y)) * self.up(y))


class SpelledModel(nn.Module):
    """tokens (batch, sequence) -> logits. `head_dim`: of heads wider than d_model / heads (Qwen3)."""

    turns: Tensor

    def __init__(self, config: DecoderConfig, *, head_dim: int | None = None) -> None:
        super().__init__()
        head_dim = head_dim or config.d_model // config.heads
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        turns = torch.empty(config.max_sequence, head_dim // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)
        self.blocks = nn.ModuleList(SpelledBlock(config, head_dim) for _ in range(config.layers))
        self.norm = SpelledNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turns[: tokens.shape[1]])
        return self.head(self.norm(x))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def mean_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of logits as the model gives them, with no copy in fp32."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, -2), batch["labels"].flatten())
