"""The reference decoder as a mixture of experts whose heads are wider than d_model / heads (Qwen3's)."""

from torch import nn

from fullshard.models.decoder import Attention, DecoderModel, RotateByPosition
from fullshard.spec.model_section import DecoderConfig


class WideMixture(DecoderModel):
    """tokens (batch, sequence) -> logits. `head_dim`: channels of a head; None: d_model / heads."""

    def __init__(self, config: DecoderConfig, *, head_dim: int | None) -> None:
        super().__init__(config)
        if head_dim is None:
            return
        width, inner, shared = config.d_model, config.heads * head_dim, config.kv_heads * head_dim
        self.positions = RotateByPosition(head_dim, max_sequence=config.max_sequence, theta=config.rope_theta)
        for attention in (module for module in self.modules() if isinstance(module, Attention)):
            attention.head_dim = head_dim
            attention.query = nn.Linear(width, inner, bias=False)
            attention.key = nn.Linear(width, shared, bias=False)
            attention.value = nn.Linear(width, shared, bias=False)
            attention.output = nn.Linear(inner, width, bias=False)
