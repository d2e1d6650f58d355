"""Checks that a model supports the data: sequences fit its positions, and tokens its vocabulary."""

from typing import Any, cast

from torch import nn

from fullshard.errors import SpecError
from fullshard.models.huggingface import is_causal_lm
from fullshard.spec.pretrained import locate_config_file, read_config
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig, HuggingFaceModel

BYTES = 256
_POSITIONS = "max_position_embeddings"


def check_sequence_length(model: nn.Module, run: Run) -> None:
    """Raises SpecError if the run's sequences are longer than the `max_position_embeddings` of the config."""
    if not is_causal_lm(model):
        return  # other models take unknown batches; the reference decoder was checked when the run was read
    config: Any = model.config
    text = config.get_text_config()
    longest = getattr(text, _POSITIONS, None)
    if not isinstance(longest, int) or longest < 1 or run.data.sequence_length <= longest:
        return
    part = "" if text is config else "text_config."
    raise SpecError(
        f"data.sequence_length = {run.data.sequence_length} is longer than the model's positions.",
        got=f"{type(model).__name__.removeprefix('FSDP')}, {_POSITIONS} = {longest}",
        fix=f"data.sequence_length = {longest}, or model.options.{part}{_POSITIONS} = "
        f"{run.data.sequence_length}, and the model must learn these positions",
    )


def check_vocabulary(run: Run, *, tokens: int | None, model: nn.Module | None = None) -> None:
    """Raises SpecError if the model's embedding has fewer than `tokens` rows. More rows are allowed.

    Also raises SpecError for files that are read as bytes, and a model of transformers whose vocabulary is
    another.

    tokens: number of tokens that the data may have; None if unknown
    model: the built model, whose config is read; before it is built, [model] and its config.json are read
    """
    rows = find_vocabulary_rows(model, run)
    key = "model.vocabulary" if isinstance(run.model, DecoderConfig) else "model.options.vocab_size"
    bytes_ = run.data.tokenizer is None and "tokenizer" in run.data.token_makers
    asked_for = isinstance(run.model, DecoderConfig) or run.data.source == "stdlib"
    if rows is not None and rows > BYTES and bytes_ and not asked_for:
        raise SpecError(
            "without data.tokenizer, the tokens are bytes, and the model has another vocabulary.",
            got=f"data.tokenizer is unset, and a vocabulary of {rows}",
            fix=f"data.tokenizer = the model's own, or {key} = {BYTES} (with weights that are new)",
        )
    if rows is None or tokens is None or tokens <= rows:
        return
    raise SpecError(
        "the data has tokens that the model does not know.",
        got=f"tokens up to {tokens - 1}, and a vocabulary of {rows}",
        why="without data.tokenizer the tokens are bytes" if bytes_ else "the tokenizer is another model's",
        fix=f"data.tokenizer = the model's own, or {key} = {tokens} (with weights that are new)",
    )


def find_vocabulary_rows(model: nn.Module | None, run: Run) -> int | None:
    """Returns the number of rows of the model's token embedding; None if unknown."""
    if isinstance(run.model, DecoderConfig):
        return run.model.vocabulary
    if not isinstance(run.model, HuggingFaceModel):
        return None
    if model is not None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        size = getattr(text, "vocab_size", None)
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
