"""build_model(run): builds the module that [model] names, without values."""

import torch
from torch import nn

from fullshard.models.adapters import add_adapter
from fullshard.models.decoder import DecoderModel
from fullshard.models.huggingface import hf_model, own_dtype
from fullshard.models.python import python_model
from fullshard.spec.measurement import model_flops_per_token
from fullshard.spec.model_section import DecoderConfig, PythonModel
from fullshard.spec.run import Run


def build_model(run: Run) -> nn.Module:
    """Builds the model of `run` with its adapters, with parameters on the meta device.

    Raises SpecError for a model that does not exist or cannot be built; MissingExtraError.
    """
    section = run.model
    if isinstance(section, DecoderConfig):
        with torch.device("meta"):
            return add_adapter(DecoderModel(section), run.adapter)
    if isinstance(section, PythonModel):
        return add_adapter(python_model(section), run.adapter)
    return add_adapter(hf_model(section), run.adapter, own_dtype=own_dtype(section))


def flops_per_token(model: nn.Module, run: Run) -> float | None:
    """Returns `model_flops_per_token` of the reference decoder.

    None for other models, whose operations `describe` counts.
    """
    section = run.model
    if not isinstance(section, DecoderConfig):
        return None
    parameters = sum(p.numel() for p in model.parameters())
    if not section.tied:  # a tied embedding also counts, since it is the head's matrix
        parameters -= section.vocabulary * section.d_model
    return model_flops_per_token(
        parameters,
        layers=section.layers,
        d_model=section.d_model,
        sequence_length=run.data.sequence_length,
    )
