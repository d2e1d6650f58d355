"""Builds the module that a run's [model] section names, on the meta device."""

import re
from inspect import signature
from typing import Any, cast

import torch
from torch import nn

from fullshard.errors import SpecError
from fullshard.models import huggingface
from fullshard.models.adapters import insert_adapters
from fullshard.models.decoder import DecoderModel
from fullshard.models.document_attention import set_document_attention_if_supported
from fullshard.models.meta_init import ConstructorTape, construct_with_meta_parameters
from fullshard.models.packed_weights import count_elements, element_count, pack_frozen_weights
from fullshard.spec.pretrained import locate_config_file, read_config
from fullshard.spec.records.measurement import GradientShares, model_flops_per_token
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel, PythonModel
from fullshard.system.dotted import import_callable


def build_model(run: Run) -> nn.Module:
    """Builds the model of `run`, with adapters and its base packed, on the meta device.

    Raises SpecError, MissingExtraError; ShardError if no matrix can be packed as `adapter.base_dtype` asks.
    """
    model, form = _build_adapted_model(run), run.adapter.packed_format
    return model if form is None else pack_frozen_weights(model, form)


def _build_adapted_model(run: Run) -> nn.Module:
    section = run.model
    if isinstance(section, DecoderConfig):
        with torch.device("meta"):
            return insert_adapters(DecoderModel(section), run.adapter)
    if isinstance(section, PythonModel):
        return insert_adapters(build_python_model(section), run.adapter)
    model = huggingface.build_hf_model(section)
    attention = str(getattr(model.config, "_attn_implementation", ""))
    if run.data.document_mask and huggingface.adds_balance_loss(model) and not attention.startswith("flash"):
        raise SpecError(
            f"{type(model).__name__} cannot compute its balance loss of sequences with several documents.",
            got="output_router_logits = true in its config or model.options, and data.document_mask = true",
            why="it would take the mask of documents for one of padding",
            fix="model.options.output_router_logits = false, or data.document_mask = false",
        )
    if run.data.document_mask and section.attention == "auto":
        set_document_attention_if_supported(model)
    return insert_adapters(model, run.adapter, own_dtype=huggingface.weight_dtype_in_config(section))


def build_python_model(section: PythonModel) -> nn.Module:
    """Builds, on meta, the module of `model.python`. Raises SpecError for a function that cannot give one."""
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
    parameters = count_elements(model)
    if not section.tied:  # a tied embedding also counts, since it is the head's matrix
        parameters -= section.vocabulary * section.d_model
    parameters -= section.inactive_parameters
    return model_flops_per_token(
        parameters,
        layers=section.layers,
        d_model=section.d_model,
        sequence_length=run.data.row_length,
        gradients=gradient_shares(model),
    )


def gradient_shares(model: nn.Module) -> GradientShares:
    """Returns the shares of matrices, except embeddings, in which backward computes gradients."""
    inputs = own = total = 0
    is_after_trained = False
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            is_after_trained |= parameter.requires_grad
            if parameter.ndim > 1 and not isinstance(module, nn.Embedding):
                numel = element_count(module, parameter)
                total += numel
                inputs += numel * is_after_trained
                own += numel * parameter.requires_grad
    return GradientShares(inputs / total, own / total) if total else GradientShares()


def text_config(model: nn.Module) -> Any:
    """Returns the config of a transformers model's text model; None for another model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def attention_window_share(model: nn.Module, *, sequence_length: int) -> float:
    """Returns the share of pairs of positions that lie within the windows of a transformers model.

    It is the mean of min(window, sequence length) / sequence length over the text model's layers with
    attention, else 1.
    """
    if (text := text_config(model)) is None:
        return 1.0
    widths = {
        "full_attention": None,
        "sliding_attention": getattr(text, "sliding_window", None),
        "chunked_attention": getattr(text, "attention_chunk_size", None),
    }
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
    seen = [min(widths[kind] or sequence_length, sequence_length) for kind in kinds if kind in widths]
    return sum(seen) / (len(seen) * sequence_length) if seen else 1.0


def attention_flop_per_token(model: nn.Module, *, sequence_length: int) -> float:
    """Returns the FLOP of forward attention over all pairs, by the config of a transformers model; else 0."""
    text = text_config(model)
    names = ("num_attention_heads", "hidden_size", "num_hidden_layers")
    heads, d_model, layers = (getattr(text, name, None) for name in names)
    if not (isinstance(heads, int) and isinstance(d_model, int) and isinstance(layers, int)):
        return 0.0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * layers
    layers = sum(kind.endswith("attention") and not kind.startswith("linear") for kind in kinds)
    return 4.0 * layers * heads * (getattr(text, "head_dim", None) or d_model // heads) * sequence_length


BYTES = 256
_POSITIONS = "max_position_embeddings"


def check_sequence_length(model: nn.Module, run: Run) -> None:
    """Raises SpecError if the run's sequences are longer than the `max_position_embeddings` of the config.

    The rows of a position table with a padding row (RoBERTa's) are used from the one behind it.
    """
    makes_rows = run.data.source != "python"  # else only a causal model takes batches of a known length
    text = text_config(model)
    takes_tokens = text is not None and "input_ids" in signature(model.forward).parameters
    if not (huggingface.is_causal_lm(model) or (takes_tokens and makes_rows)):
        return  # the reference decoder was checked when the run was read
    rows, unused = getattr(text, _POSITIONS, None), _position_rows_before_first_token(model)
    if not isinstance(rows, int) or rows < 1 or run.data.row_length <= rows - unused:
        return
    each, halves = (2, ", in both halves") if run.data.has_pairs else (1, "")
    part = "" if text is model.config else "text_config."
    first = f", of which the first {unused} are not used" if unused else ""
    raise SpecError(
        f"data.sequence_length = {run.data.sequence_length} is longer than the model's positions{halves}.",
        got=f"{type(model).__name__.removeprefix('FSDP')}, {_POSITIONS} = {rows}{first}",
        fix=f"data.sequence_length = {each * (rows - unused)}, or model.options.{part}{_POSITIONS} = "
        f"{run.data.row_length + unused}, and the model must learn these positions",
    )


def _position_rows_before_first_token(model: nn.Module) -> int:
    """Returns the rows of a table of positions up to its padding row, or 0 without one."""
    tables = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
    return max((row + 1 for row in padding if row is not None), default=0)


def check_vocabulary(run: Run, *, token_count: int | None, model: nn.Module | None = None) -> None:
    """Raises SpecError if the model's embedding has fewer than `token_count` rows. More rows are allowed.

    Also raises SpecError for files that are read as bytes, and a model of transformers with more rows than
    bytes.

    token_count: number of tokens that the data may have; None if unknown
    model: the built model, whose config is read; before it is built, [model] and its config.json are read
    """
    rows = count_vocabulary_rows(model, run)
    key = "model.vocabulary" if isinstance(run.model, DecoderConfig) else "model.options.vocab_size"
    bytes_ = run.data.tokenizer is None and "tokenizer" in run.data.token_makers
    asked_for = isinstance(run.model, DecoderConfig) or run.data.source == "stdlib"
    if rows is not None and rows > BYTES and bytes_ and not asked_for:
        raise SpecError(
            "without data.tokenizer, the tokens are bytes, and the model has another vocabulary.",
            got=f"data.tokenizer is unset, and a vocabulary of {rows}",
            fix=f"data.tokenizer = the model's own, or {key} = {BYTES} (with weights that are new)",
        )
    if rows is None or token_count is None or token_count <= rows:
        return
    raise SpecError(
        "the data has tokens that the model does not know.",
        got=f"tokens up to {token_count - 1}, and a vocabulary of {rows}",
        why="without data.tokenizer the tokens are bytes" if bytes_ else "the tokenizer is another model's",
        fix=f"data.tokenizer = the model's own, or {key} = {token_count} (with weights that are new)",
    )


def count_vocabulary_rows(model: nn.Module | None, run: Run) -> int | None:
    """Returns the number of rows of the model's token embedding; None if unknown."""
    if isinstance(run.model, DecoderConfig):
        return run.model.vocabulary
    if not isinstance(run.model, HuggingFaceModel):
        return None
    if model is not None:
        size = getattr(text_config(model) or getattr(model, "config", None), "vocab_size", None)
        return size if isinstance(size, int) else None
    try:
        file = read_config(locate_config_file(run.model.hf))
    except SpecError:  # data can be prepared on a machine without the model
        return None
    for values in (run.model.options, file):
        for place in (values.get("text_config"), values):
            size: Any = cast(dict[str, Any], place).get("vocab_size") if isinstance(place, dict) else None
            if isinstance(size, int):
                return size
    return None
