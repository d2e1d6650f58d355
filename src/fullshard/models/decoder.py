"""The reference decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, dense or in experts."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.models.document_attention import ContextParallel, QueryKeyValue, attend_causally
from fullshard.models.experts import Experts, Router
from fullshard.spec.settings.model_section import DecoderConfig


class RotaryTables(nn.Module):
    """Cosines and sines of angles that grow with the position. RoFormer: arXiv:2104.09864.

    They are not saved in checkpoints; `reset_buffers` computes them.
    """

    cosine: Tensor  # (max_sequence, head_dim / 2), fp32
    sine: Tensor

    def __init__(self, head_dim: int, *, max_sequence: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.max_sequence, self.theta = head_dim, max_sequence, theta
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(max_sequence, head_dim // 2), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        if self.cosine.is_meta:
            return
        pairs = torch.arange(0, self.head_dim, 2, device=self.cosine.device, dtype=torch.float32)
        frequencies = self.theta ** (-pairs / self.head_dim)
        positions = torch.arange(self.max_sequence, device=self.cosine.device, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        self.cosine.copy_(angles.cos())
        self.sine.copy_(angles.sin())

    def forward(self, length: int, positions: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns cosines and sines for `rotate_pairs`, which all blocks share.

        positions: (batch, sequence); unset, 0, 1, … for `length` tokens
        """
        tables = (self.cosine, self.sine)
        if positions is None:
            return torch.stack([table[:length] for table in tables]).to(dtype)
        return torch.stack([table[positions].unsqueeze(1) for table in tables]).to(dtype)


def rotate_pairs(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates pairs of channels of x (batch, heads, sequence, head_dim) by the angles of their positions.

    rotary: (2, sequence, head_dim / 2), or with positions (2, batch, 1, sequence, head_dim / 2)
    """
    cosine, sine = rotary.to(x.dtype).unbind()
    even, odd = x.chunk(2, dim=-1)
    return torch.cat((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with fewer key/value heads than query heads. GQA: arXiv:2305.13245.

    context: how attention reaches the keys of other ranks; None if each rank has whole sequences
    """

    context: ContextParallel | None = None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.d_model // config.heads
        kv_width = config.kv_heads * self.head_dim
        self.query = nn.Linear(config.d_model, config.d_model, bias=False)
        self.key = nn.Linear(config.d_model, kv_width, bias=False)
        self.value = nn.Linear(config.d_model, kv_width, bias=False)
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        q, k = rotate_pairs(q, rotary), rotate_pairs(k, rotary)
        if self.context is not None:
            self.context.check_bounds_are_given(mask, training=self.training)
        y = attend_causally(QueryKeyValue(q, k, v), mask, context=self.context)
        return self.output(y.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer: arXiv:2002.05202."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Feed-forward layer of experts: each token goes to a few of them, and to all shared experts."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config.experts, d_model=config.d_model, d_ff=config.expert_width)
        width = config.shared_experts * config.expert_width
        self.shared = FeedForward(config.d_model, width) if width else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the output (batch, sequence, d_model), and the balance loss of each sequence (batch,)."""
        routing = self.router(x)
        y = self.experts(x.flatten(0, 1), routing.experts, routing.weights).view_as(x)
        return (y if self.shared is None else y + self.shared(x)), routing.balance_loss


class Block(nn.Module):
    """Decoder layer: attention, then feed-forward, each applied to the normalised residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = Mixture(config) if config.is_mixture else FeedForward(config.d_model, config.d_ff)

    def forward(
        self, x: Tensor, rotary: Tensor, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Applies the layer to x (batch, sequence, d_model). Also returns its balance loss (batch,), if any.

        rotary: see `RotaryTables`
        mask: bool (batch, 1, sequence, sequence), True where a token is attended to; or document bounds, see
            `fullshard.models.document_attention`; by default causal
        """
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        y, balance = self.feed_forward(self.feed_forward_norm(x)), None
        if isinstance(y, tuple):
            y, balance = y
        return x + y if balance is None else (x + y, balance)


class DecoderOutput(NamedTuple):
    """Output of a mixture with a balance loss, in training.

    logits: (batch, sequence, vocabulary)
    balance_loss: (batch,), of each sequence, summed over layers; in units of the loss of one token
    """

    logits: Tensor
    balance_loss: Tensor


class DecoderModel(nn.Module):
    """Decoder that maps tokens (batch, sequence) int64 to logits (batch, sequence, vocabulary).

    In training, a mixture with a balance loss returns a DecoderOutput.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.positions = RotaryTables(
            config.d_model // config.heads, max_sequence=config.max_sequence, theta=config.rope_theta
        )
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        for module in self.modules():  # torch's own layers have initialised themselves
            if isinstance(module, Router | Experts) and not next(module.parameters()).is_meta:
                self._init_weights(module)

    def get_output_embeddings(self) -> nn.Linear:
        """Returns the module that computes the logits, by the name that models of transformers give it."""
        return self.head

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises the parameters that `module` itself holds.

        Weights are normal with standard deviation 0.02, or 0.02 / sqrt(2 · layers) for projections that write
        to the residual stream, as in GPT-2. Norms are one.
        """
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding, Router)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Attention):
            nn.init.normal_(module.output.weight, std=0.02 / (2 * self.config.layers) ** 0.5)
        elif isinstance(module, FeedForward):
            nn.init.normal_(module.down.weight, std=0.02 / (2 * self.config.layers) ** 0.5)
        elif isinstance(module, Experts):
            for weight in (module.gate, module.up):
                nn.init.normal_(weight, std=0.02)
            nn.init.normal_(module.down, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        document_bounds: Tensor | None = None,
    ) -> Tensor | DecoderOutput:
        """Returns the logits. `positions`, `documents`: int64 (batch, sequence).

        With `documents`, a token attends only to earlier tokens of its document. The same documents as
        `document_bounds` need no mask of all pairs of tokens: see `fullshard.models.document_attention`.
        """
        x, mask = self.embedding(tokens), document_bounds
        if mask is None and documents is not None:
            same = documents[:, :, None] == documents[:, None, :]
            mask = same.tril().unsqueeze(1)  # bool (batch, 1, sequence, sequence), True: attended to
        balance, rotary = None, self.positions(tokens.shape[1], positions, x.dtype)
        for block in self.blocks:
            x = block(x, rotary, mask)
            if isinstance(x, tuple):
                x, own = x
                balance = own if balance is None else balance + own
        logits = self.head(self.norm(x))
        return logits if balance is None else DecoderOutput(logits, balance)
