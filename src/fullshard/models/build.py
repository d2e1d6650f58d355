"""Builds the module that a run's [model] section names, on the meta device."""

import re

import torch
from torch import nn

from fullshard.errors import SpecError
from fullshard.models.adapters import insert_adapters
from fullshard.models.constructor_tape import ConstructorTape
from fullshard.models.decoder import DecoderModel
from fullshard.models.document_attention import use_document_attention
from fullshard.models.huggingface import build_hf_model, has_balance_loss, weight_dtype_in_config
from fullshard.models.meta_init import construct_with_meta_parameters
from fullshard.spec.records.measurement import model_flops_per_token
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, PythonModel
from fullshard.system.dotted import import_callable


def build_model(run: Run) -> nn.Module:
    """Builds the model of `run`, with adapters, on the meta device. Raises SpecError, MissingExtraError."""
    section = run.model
    if isinstance(section, DecoderConfig):
        with torch.device("meta"):
            return insert_adapters(DecoderModel(section), run.adapter)
    if isinstance(section, PythonModel):
        return insert_adapters(build_python_model(section), run.adapter)
    model = build_hf_model(section)
    _check_balance_loss_of_documents(model, run)
    if run.data.document_mask and section.attention == "auto":
        use_document_attention(model)
    return insert_adapters(model, run.adapter, own_dtype=weight_dtype_in_config(section))


def _check_balance_loss_of_documents(model: nn.Module, run: Run) -> None:
    """Raises SpecError if a mixture's own balance loss would be given a mask of documents."""
    attention = str(getattr(model.config, "_attn_implementation", ""))
    if run.data.document_mask and has_balance_loss(model) and not attention.startswith("flash"):
        raise SpecError(
            f"{type(model).__name__} cannot compute its balance loss of sequences with several documents.",
            got="output_router_logits = true in its config or model.options, and data.document_mask = true",
            why="it would take the mask of documents for one of padding",
            fix="model.options.output_router_logits = false, or data.document_mask = false",
        )


def build_python_model(section: PythonModel) -> nn.Module:
    """Builds, on meta, the module of the user's function `model.python`. Raises SpecError without one."""
    factory = import_callable(section.python, key="model.python")
    try:
        model = construct_with_meta_parameters(lambda: factory(**section.options), tape=ConstructorTape())
    except TypeError as error:
        raise SpecError(
            f"{section.python} cannot be called with these options.",
            got=f"{error}; model.options = {section.options}",
            fix="model.options with the factory's own keyword arguments",
        ) from error
    except RuntimeError as error:
        if not re.search(r"\bmeta\b", str(error)):
            raise
        raise SpecError(
            f"{section.python} computes with parameters while it constructs the model.",
            got=str(error).partition("\n")[0],
            why="parameters are on the meta device, without values; these are set when the model is sharded",
            fix='with torch.device("cpu"): around the lines of the constructor that make and read them',
        ) from error
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(
            f"{section.python} made no module.",
            got=type(model).__name__,
            why="model.python is a function, or a class, that returns a torch.nn.Module",
        )
    return model


def decoder_flops_per_token(model: nn.Module, run: Run) -> float | None:
    """Returns the reference decoder's FLOP per token; None for other models, which `describe` counts."""
    section = run.model
    if not isinstance(section, DecoderConfig):
        return None
    parameters = sum(p.numel() for p in model.parameters())
    if not section.tied:  # a tied embedding also counts, since it is the head's matrix
        parameters -= section.vocabulary * section.d_model
    parameters -= section.inactive_parameters
    return model_flops_per_token(
        parameters, layers=section.layers, d_model=section.d_model, sequence_length=run.data.sequence_length
    )
