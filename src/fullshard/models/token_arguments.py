"""Converts the positions and documents of a batch of tokens to the arguments that a model accepts."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import positions_within_documents
from fullshard.errors import TrainError
from fullshard.models.document_attention import (
    avoid_nan_of_cudnn,
    document_bounds,
    mark_size_as_dynamic,
    uses_document_attention,
)


def position_and_document_arguments(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the model's keyword arguments for positions and documents; empty if `batch` has neither.

    batch["positions"], batch["documents"]: int64 (microbatch, sequence)
    batch["document_ends"]: optional, int32 (microbatch, documents), see `document_bounds`
    batch["document_bounds"]: of whole sequences, in a batch of parts of sequences, see `SequencePart`

    A transformers model gets `position_ids`, and a mask in the form of its attention. Any other model gets
    `positions`, `documents`, and `document_bounds` if its `forward` accepts them. Raises TrainError if it
    does not accept the others, since the model would attend across documents.
    """
    positions, documents, ends = (batch.get(name) for name in ("positions", "documents", "document_ends"))
    if positions is None and documents is None:
        return {}
    tokens = batch["tokens"]
    avoid_nan_of_cudnn(tokens.device, sequence_length=tokens.shape[1])
    bounds = batch.get("document_bounds")
    if bounds is not None:
        mark_size_as_dynamic(bounds)
    elif ends is not None:
        bounds = document_bounds(ends, sequence_length=tokens.shape[1])
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
    """Returns the sliding window of each kind of layer, None for no window. Raises TrainError for others."""
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
