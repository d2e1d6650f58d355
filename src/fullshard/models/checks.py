"""What a model cannot be given: sequences longer than its positions, tokens beyond its vocabulary."""

from typing import Any, cast

from torch import nn

from fullshard.errors import SpecError
from fullshard.models.huggingface import is_causal_lm
from fullshard.spec.model_section import DecoderConfig, HuggingFaceModel
from fullshard.spec.pretrained import locate, read_config
from fullshard.spec.run import Run

_POSITIONS = "max_position_embeddings"


def check_positions(model: nn.Module, run: Run) -> None:
    """Raises SpecError for sequences that a model of transformers that predicts tokens has no positions for.

    Rotary tables go on for ever, but a model was not trained beyond what its config says: more is said there.
    """
    if not is_causal_lm(model):
        return  # of its own batches nothing is known here; the reference decoder's run was checked when read
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
        f"{run.data.sequence_length}, whose positions it would have to learn",
    )


def vocabulary_of(model: nn.Module, run: Run) -> int | None:
    """How many tokens the model has rows for; None where it does not say."""
    if isinstance(run.model, DecoderConfig):
        return run.model.vocabulary
    if not isinstance(run.model, HuggingFaceModel):
        return None
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def check_vocabulary(model: nn.Module, run: Run, *, tokens: int | None) -> None:
    """Raises SpecError for data with tokens up to `tokens` - 1, where the model has no row for them. None:
    not known.

    A model may have more: many are padded to a round number.
    """
    _check_rows(vocabulary_of(model, run), run, tokens=tokens)


def check_known_vocabulary(run: Run, *, tokens: int | None) -> None:
    """Raises the same where what [model] says is enough to tell, without the model: before tokens are made
    that it has no row for."""
    _check_rows(_known_vocabulary(run), run, tokens=tokens)


def _known_vocabulary(run: Run) -> int | None:
    """The rows that the run, or the config.json that it names, gives the model; None where they do not."""
    if isinstance(run.model, DecoderConfig):
        return run.model.vocabulary
    if not isinstance(run.model, HuggingFaceModel):
        return None
    try:
        config = read_config(locate(run.model.hf))
    except SpecError:  # data can be prepared on a machine without the model
        return None
    for values in (run.model.options, config):
        text: Any = values.get("text_config")
        for place in (text, values):
            size: Any = cast(dict[str, Any], place).get("vocab_size") if isinstance(place, dict) else None
            if isinstance(size, int):
                return size
    return None


def _check_rows(rows: int | None, run: Run, *, tokens: int | None) -> None:
    if rows is None or tokens is None or tokens <= rows:
        return
    key = "model.vocabulary" if isinstance(run.model, DecoderConfig) else "model.options.vocab_size"
    bytes_ = run.data.tokenizer is None and run.data.source in ("stdlib", "text")
    raise SpecError(
        "the data has tokens that the model does not know.",
        got=f"tokens up to {tokens - 1}, and a vocabulary of {rows}",
        why="without data.tokenizer the tokens are bytes" if bytes_ else "the tokenizer is another model's",
        fix=f"data.tokenizer = the model's own, or {key} = {tokens} (with weights that are new)",
    )
