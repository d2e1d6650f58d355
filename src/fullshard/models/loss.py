"""Loss functions: the default loss of decoders, its arguments, and the loss that a model computes itself."""

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.agreement import rank
from fullshard.distributed.sequence_parts import positions_within_documents
from fullshard.errors import SpecError, TrainError
from fullshard.models.chunked_loss import Rows, chunked_cross_entropy
from fullshard.models.document_attention import (
    disable_cudnn_attention_with_nan_gradients,
    document_bounds_if_supported,
    mark_document_count_as_dynamic,
    uses_document_attention,
)
from fullshard.models.huggingface import balance_loss_factor, is_causal_lm
from fullshard.spec.run import Run
from fullshard.spec.settings.data_section import IGNORED_LABEL
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.system.dotted import import_callable

logger = logging.getLogger("fullshard")

# (model, microbatch) -> the summed loss and the number of items in the sum, or only a mean, which counts as
# one item: means of microbatches of different lengths then weigh the same.
Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Tensor | int]]


def loss_sum_and_count(value: Any) -> tuple[Tensor, Tensor | float]:
    """Returns (sum, count) from the result of a loss function, with count 1 for a mean.

    Raises TrainError for any other result. Values are not read, as the device may still compute them.
    """
    is_pair = isinstance(value, tuple) and len(cast(tuple[Any, ...], value)) == 2
    pair: tuple[Any, Any] = cast(tuple[Any, Any], value) if is_pair else (value, 1)
    total, count = pair
    if not _is_real_scalar_tensor(total):
        raise TrainError(
            "the loss function gave no loss to train on.",
            got=_result_text(total),
            fix="a mean, or (sum, count): a scalar tensor that depends on the model's parameters",
        )
    if not isinstance(count, int | float) and not _is_real_scalar_tensor(count):
        raise TrainError(
            "the loss function gave no count with its sum.",
            got=_result_text(count),
            why="the second of two results is the number of items in the sum",
            fix="a mean alone, or (sum, count)",
        )
    return total.reshape(()), count.detach().reshape(()) if isinstance(count, Tensor) else count


def _is_real_scalar_tensor(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.numel() == 1
        and not value.is_complex()
        and not isinstance(value, DTensor)
    )


def _result_text(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = "a DTensor" if isinstance(value, DTensor) else f"a {value.dtype} tensor".replace("torch.", "")
    return f"{kind} of shape {list(value.shape)}"


def choose_loss(run: Run, model: nn.Module) -> Loss:
    """Returns the loss function of `run`: `train.loss`, or else the default for the model.

    The default is `model_computed_loss` for a transformers model that is not a causal language model, and
    `next_token_loss` for any other. A causal language model computes its own loss of a batch from Python that
    has no `tokens` but its own arguments (images). Raises SpecError if `train.loss` cannot be imported,
    and for pairs without it.
    """
    if run.train.loss is not None:
        return import_callable(run.train.loss, key="train.loss")
    if run.data.has_pairs:
        raise SpecError(
            "pairs of answers need a loss that compares them.",
            got="data.rejected_field without train.loss",
            fix='train.loss = "package.module:function", as in docs/two-models.md',
        )
    if isinstance(run.model, HuggingFaceModel) and not is_causal_lm(model):
        return model_computed_loss
    rows = run.train.loss_chunk
    loss = next_token_loss if rows == 0 else partial(next_token_loss, chunk_rows=rows)
    if isinstance(run.model, HuggingFaceModel) and run.data.source == "python":
        return partial(_loss_by_batch_kind, of_tokens=loss)
    return loss


def _loss_by_batch_kind(
    model: nn.Module, batch: Any, *, of_tokens: Loss
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor | int]:
    is_own = isinstance(batch, Mapping) and "tokens" not in batch and "labels" in batch
    return model_computed_loss(model, batch) if is_own else of_tokens(model, batch)


def next_token_loss(
    model: nn.Module, batch: Mapping[str, Tensor], *, chunk_rows: Rows = 0
) -> tuple[Tensor, Tensor]:
    """Returns the summed cross entropy in nats, and the number of labels in the sum.

    batch["tokens"], batch["labels"]: (microbatch, sequence) int64; a label of -100 does not count
    batch["positions"], batch["documents"]: optional, see `position_and_document_arguments`
    chunk_rows: rows of logits that are computed at once; see `chunked_cross_entropy`

    The model returns logits (microbatch, sequence, vocabulary), or an object with such `logits`. A loss that
    balances experts is added only in training, not in validation (without gradients). Raises TrainError for a
    batch without tokens or labels, or with values for each token that it does not use.

    >>> loss, count = fs.next_token_loss(model, {"tokens": tokens, "labels": labels})
    >>> int(count) == labels.numel()
    True
    """
    try:
        tokens, labels = batch["tokens"], batch["labels"]
    except (KeyError, TypeError, IndexError):
        raise TrainError(
            "the default loss needs a batch with tokens and labels.",
            got=_batch_text(batch),
            fix="fullshard.train(state, plan, loss=my_loss), with my_loss(model, batch)",
        ) from None
    _check_all_batch_values_are_used(batch, tokens)
    arguments = position_and_document_arguments(model, batch)
    total, output = chunked_cross_entropy(
        model, lambda: model(tokens, **arguments), labels=labels, chunk_rows=chunk_rows
    )
    count = (labels != IGNORED_LABEL).sum()
    rows: Tensor | None = getattr(output, "balance_loss", None)  # of the reference decoder, per sequence
    if rows is not None:
        total = total + (rows * (labels != IGNORED_LABEL).sum(dim=1)).sum()
    balance: Tensor | None = getattr(output, "aux_loss", None)  # of a mixture of experts, if requested
    if balance is not None and torch.is_grad_enabled():
        total = total + balance_loss_factor(model) * balance * count
    return total, count


def _check_all_batch_values_are_used(batch: Mapping[str, Any], tokens: Tensor) -> None:
    """Raises TrainError if `batch` has values for each token that `next_token_loss` does not use."""
    used = ("tokens", "labels", "positions", "documents")
    unused = [
        name
        for name, one in batch.items()
        if name not in used and isinstance(one, Tensor) and one.shape[:2] == tokens.shape
    ]
    if unused:
        raise TrainError(
            f"the default loss does not use {', '.join(map(repr, unused))} of the batch.",
            got=_batch_text(batch),
            why="it uses tokens, labels (-100: no loss), positions and documents (to keep these apart)",
            fix="these names, or fullshard.train(state, plan, loss=my_loss), with my_loss(model, batch)",
        )


def model_computed_loss(model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Returns the loss that the model computes itself, `model(**batch).loss`.

    With labels, the model's mean is returned as a sum and the number of labels that are not -100 (of all
    labels, if they are floating point), so microbatches with more labels weigh more. Without labels (a
    contrastive loss), the mean alone is returned. Validation leaves out the loss that balances experts. A
    causal language model keeps documents apart where `position_ids` begin again, also beside an
    `attention_mask` of tokens and padding.

    Raises TrainError if the batch does not suit this model, or if the model computes no loss.
    """
    name = type(model).__name__.removeprefix("FSDP")
    takes = inspect.signature(model.forward).parameters
    if not isinstance(batch, Mapping) or "tokens" in batch:
        raise TrainError(
            f"{name} trains on arguments of its own, not on the next token.",
            got=_batch_text(batch),
            why=f"its forward takes {', '.join(list(takes)[:6])}, …",
            fix='data.source = "python", whose batches have these, or train.loss = "package.module:function"',
        )
    given, count = dict(batch), None
    if isinstance(labels := given.get("labels"), Tensor):
        shifted = _does_model_shift_labels(model)
        given["labels"], count = _ensure_valid_label_and_count(labels, shifted=shifted)
        if shifted:
            _keep_packed_documents_apart(given)
    elif "return_loss" in takes:
        given.setdefault("return_loss", True)
    output = model(**given)
    loss: Tensor | None = getattr(output, "loss", None)
    balance: Tensor | None = getattr(output, "aux_loss", None)  # in `loss`, if there are labels
    if loss is not None and count is not None and balance is not None and not torch.is_grad_enabled():
        loss = loss - balance_loss_factor(model) * balance
    if loss is None:
        raise TrainError(
            f"{name} computes no loss.",
            got=_batch_text(batch),
            why="it has no head for a task, or the batch lacks the labels",
            fix='another model.architecture, labels in the batch, or train.loss = "package.module:function"',
        )
    return loss if count is None else (loss * count, count)


def _keep_packed_documents_apart(given: dict[str, Any]) -> None:
    """Replaces a mask (rows, tokens) beside `position_ids` that begin again by positions alone, in place.

    transformers finds the documents of a packed row by their positions, but only in batches without a mask.
    Padding becomes documents of one token each. Waits for the values, as transformers does, too.
    """
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if not isinstance(mask, Tensor) or not isinstance(positions, Tensor):
        return
    if mask.shape != positions.shape or mask.ndim != 2:
        return
    is_token = mask != 0
    begins_again = (positions[:, 1:] <= positions[:, :-1]) & is_token[:, 1:] & is_token[:, :-1]
    if bool(begins_again.any()):
        given["position_ids"] = positions.masked_fill(~is_token, 0)
        del given["attention_mask"]
        _log_that_documents_are_kept_apart()


@cache
def _log_that_documents_are_kept_apart() -> None:
    if rank() == 0:
        logger.warning(
            "rows have position_ids that begin again: attention is within these documents. attention_mask "
            "then only says what is padding"
        )


def _ensure_valid_label_and_count(labels: Tensor, *, shifted: bool) -> tuple[Tensor, Tensor]:
    """Returns (labels, number of valid ones). Makes one valid if none is: a mean over none is NaN."""
    if labels.is_floating_point():
        return labels, torch.tensor(labels.numel(), device=labels.device)
    counted = labels[..., 1:] if shifted else labels
    count = (counted != IGNORED_LABEL).sum()
    changed = labels.clone().flatten()
    changed[-1] = torch.where(count == 0, 0, changed[-1])
    return changed.view_as(labels), count


def _does_model_shift_labels(model: nn.Module) -> bool:
    """Returns whether the model's own loss shifts the labels, and so ignores the first one of each row."""
    config: Any = getattr(model, "config", None)
    own = getattr(getattr(model, "loss_function", None), "__name__", "")
    return own == "ForCausalLMLoss" and not getattr(config, "is_encoder_decoder", False)


def _batch_text(batch: object) -> str:
    names = f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    return f"{type(batch).__name__}{names}"


# Positions and documents #
def position_and_document_arguments(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the model's keyword arguments for positions and documents; empty if `batch` has neither.

    batch["positions"], batch["documents"]: int64 (microbatch, sequence)
    batch["document_ends"]: optional, int32 (microbatch, documents), see `document_bounds_if_supported`
    batch["document_bounds"]: bounds of whole sequences, in a batch of parts of sequences, see `SequencePart`

    A transformers model gets `position_ids`, and a mask in the form of its attention. Any other model gets
    `positions`, `documents`, and, if its `forward` accepts it, `document_bounds`. Raises TrainError if it
    does not accept one of the others, since the model would attend across documents.
    """
    positions, documents, ends = (batch.get(name) for name in ("positions", "documents", "document_ends"))
    if positions is None and documents is None:
        return {}
    tokens = batch["tokens"]
    disable_cudnn_attention_with_nan_gradients(tokens.device, sequence_length=tokens.shape[1])
    bounds = batch.get("document_bounds")
    if bounds is not None:
        mark_document_count_as_dynamic(bounds)
    elif ends is not None:
        bounds = document_bounds_if_supported(ends, sequence_length=tokens.shape[1])
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        given = {"positions": positions, "documents": documents}
        arguments = {name: tensor for name, tensor in given.items() if tensor is not None}
        _check_forward_accepts(model, arguments)
        if bounds is not None and "document_bounds" in inspect.signature(model.forward).parameters:
            arguments["document_bounds"] = bounds
        return arguments
    if documents is None:
        documents = torch.zeros_like(tokens)  # else the model infers documents from restarting positions
    if positions is None:
        positions = positions_within_documents(documents)
    attention = str(getattr(config, "_attn_implementation", "eager"))
    if attention.startswith("flash"):  # finds the documents by restarting positions
        arguments = {"position_ids": positions_within_documents(documents)}
    elif uses_document_attention(config) and bounds is not None:
        windows_by_layer_kind(config)  # refuses layers that are not attention
        arguments = {"position_ids": positions, "attention_mask": bounds}
    else:
        masks = _attention_masks_by_layer_kind(config, documents, attention=attention)
        arguments = {"position_ids": positions, "attention_mask": masks}
    _check_forward_accepts(model, arguments)
    return arguments


def _check_forward_accepts(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    takes = inspect.signature(model.forward).parameters
    missing = [name for name in arguments if name not in takes]
    if missing:
        raise TrainError(
            f"{type(model).__name__.removeprefix('FSDP')} cannot keep documents apart.",
            got=f"a batch with documents, and a forward without {' and '.join(missing)}",
            why="its attention would see from one document into another",
            fix="data.document_mask = false",
        )


def _attention_masks_by_layer_kind(config: Any, documents: Tensor, *, attention: str) -> Any:
    """Returns one mask for all layers, or a dict with one mask per kind of layer, as the models expect."""
    masks = {
        kind: _document_attention_mask(documents, attention=attention, window=window)
        for kind, window in windows_by_layer_kind(config).items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def windows_by_layer_kind(config: Any) -> dict[str, int | None]:
    """Returns the sliding window, or None, of each kind of layer. Raises TrainError for unknown kinds."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return {"all": window}
    windows = {"full_attention": None, "sliding_attention": window}
    if unknown := kinds - set(windows):
        raise TrainError(
            f"documents cannot be kept apart in layers of {', '.join(sorted(unknown))}.",
            got="a batch with documents",
            fix="data.document_mask = false",
        )
    return {kind: windows[kind] for kind in sorted(kinds)}


def _document_attention_mask(documents: Tensor, *, attention: str, window: int | None) -> Any:
    """Returns the causal mask within documents, over the last `window` tokens if that is set.

    `flex_attention` gets a BlockMask. Others get (batch, 1, sequence, sequence): `eager` floats to add to the
    scores, the rest bool, True where attended to.
    """
    if attention == "flex_attention":
        return _flex_attention_block_mask(documents, window=window)
    index = torch.arange(documents.shape[1], device=documents.device)
    distance = index[:, None] - index[None, :]
    near = (distance >= 0) & (distance < window) if window else distance >= 0
    seen = (near & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)
    if attention != "eager":
        return seen
    # A token always attends to itself, so no row is fully masked. Half precision has its own lowest number.
    lowest = torch.finfo(torch.bfloat16).min
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, lowest)


def _flex_attention_block_mask(documents: Tensor, *, window: int | None) -> Any:
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    rows, length = documents.shape

    def is_attended(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # signature: mask_mod
        same = (documents[row, query] == documents[row, key]) & (query >= key)
        return same & (query - key < window) if window else same

    return flex.create_block_mask(is_attended, rows, None, length, length, device=documents.device)
