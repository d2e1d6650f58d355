"""A decoder without gates, as GPT-2 and MPT are: one projection to queries, keys and values (two if several
queries share keys and values), two in the feed-forward.

With `attention_dropout`, attention is two matrix multiplications, a softmax and a dropout, as programs from
before FlashAttention compute it: each reads and writes whole scores. The causal mask is part of the softmax's
kernel (as in Megatron-LM's), and so is not computed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.spec.settings.model_section import DecoderConfig


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, *, attention_dropout: float | None) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        width = config.d_model
        self.head_dim = width // config.heads
        self.fused = config.heads == config.kv_heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width, bias=False)
        if self.fused:
            self.inputs = nn.Linear(width, 3 * width, bias=False)
        else:
            self.query = nn.Linear(width, width, bias=False)
            self.key_value = nn.Linear(width, 2 * self.head_dim * config.kv_heads, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        if self.fused:
            parts = self.inputs(h).chunk(3, dim=-1)
        else:
            parts = (self.query(h), *self.key_value(h).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if self.attention_dropout is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.fused)
        else:
            weights = torch.softmax(q @ k.transpose(2, 3), dim=-1)
            y = F.dropout(weights, self.attention_dropout, self.training) @ v
        y = y.transpose(1, 2).flatten(2)
        x = x + self.output(y)
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class GptModel(nn.Module):
    """tokens (batch, sequence) -> logits; the head is the embedding's table."""

    def __init__(self, config: DecoderConfig, *, attention_dropout: float | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.positions = nn.Parameter(self.embedding.weight.new_empty(config.max_sequence, config.d_model))
        self.blocks = nn.ModuleList(
            Block(config, attention_dropout=attention_dropout) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head
