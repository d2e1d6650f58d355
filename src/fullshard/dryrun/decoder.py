"""The reference decoder, and what it trains on."""

import torch
from torch import Tensor

from fullshard.models.decoder import DecoderModel
from fullshard.spec.plan import Plan


def decoder(plan: Plan) -> DecoderModel:
    """The model that the plan's run describes."""
    return DecoderModel(plan.run.decoder)


def token_batch(plan: Plan) -> dict[str, Tensor]:
    """int64 `tokens` and `labels` of (microbatch, sequence_length)."""
    shape = (plan.microbatch, plan.run.data.sequence_length)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}
