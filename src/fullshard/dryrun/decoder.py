"""Reference decoder and its training batch."""

import torch
from torch import Tensor

from fullshard.models.decoder import DecoderModel
from fullshard.spec.plan import Plan


def decoder(plan: Plan) -> DecoderModel:
    """Returns the model described by the plan's run."""
    return DecoderModel(plan.run.decoder)


def token_batch(plan: Plan) -> dict[str, Tensor]:
    """Returns int64 `tokens` and `labels`, each (microbatch, sequence_length)."""
    shape = (plan.microbatch, plan.run.data.sequence_length)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels")}
