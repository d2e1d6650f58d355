"""build_model(run): the module that [model] names, without values."""

import torch
from torch import nn

from fullshard.models.decoder import DecoderModel
from fullshard.models.huggingface import meta_model
from fullshard.spec.measurement import model_flops_per_token
from fullshard.spec.model_section import Decoder, HuggingFaceModel
from fullshard.spec.run import Run


def build_model(run: Run) -> nn.Module:
    """The model of `run`, on the meta device. Raises SpecError, MissingExtraError."""
    section = run.model
    if isinstance(section, Decoder):
        with torch.device("meta"):
            return DecoderModel(section)
    if isinstance(section, HuggingFaceModel):
        return meta_model(section.hf)
    raise NotImplementedError(section.source)


def flops_per_token(model: nn.Module, run: Run) -> float | None:
    """See `model_flops_per_token`; None where `model` does not tell its sizes."""
    section = run.model
    if not isinstance(section, Decoder):
        return None
    parameters = sum(p.numel() for p in model.parameters())
    if not section.tied:  # else the embedding is looked up, and multiplied with as the head
        parameters -= section.vocabulary * section.d_model
    return model_flops_per_token(
        parameters,
        layers=section.layers,
        d_model=section.d_model,
        sequence_length=run.data.sequence_length,
    )
