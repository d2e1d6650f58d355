"""Attention within documents on the CPU: torch's flash attention, document by document, as one operation.

As one operation, it is compiled, traced and recomputed as a whole. See `fullshard.models.document_attention`.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fullshard.errors import TrainError

_ATEN = torch.ops.aten


@torch.library.custom_op("fullshard::document_attention", mutates_args=(), device_types="cpu")
def attend_document_by_document(  # signature: torch's custom operations  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Returns (attention (batch, sequence, heads, head_dim), log-sum-exp (batch, heads, sequence)).

    query, key, value: (batch, heads, sequence, head_dim); key and value may have fewer heads
    bounds, scale, window: as in `fullshard.models.document_attention.attend_within_documents`
    """
    y, log_sums = _empty_results(query, key, value, bounds, scale, window)
    for row, own in _iterate_documents(query, bounds):
        part, log_sum = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            *(one[row, :, own].unsqueeze(0) for one in (query, key, value)),
            **_mask_arguments(own, dtype=query.dtype, window=window),
            scale=scale,
        )
        y[row, own], log_sums[row, :, own] = part[0].transpose(0, 1), log_sum[0]
    return y, log_sums


@attend_document_by_document.register_fake
def _empty_results(  # signature: torch's custom operations  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    del key, value, bounds, scale, window
    rows, heads, length, channels = query.shape
    log_sum_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    log_sums = query.new_empty((rows, heads, length), dtype=log_sum_dtype)
    return query.new_empty((rows, length, heads, channels)), log_sums


@torch.library.custom_op("fullshard::document_attention_backward", mutates_args=(), device_types="cpu")
def _attend_backward(  # signature: torch's custom operations  # noqa: PLR0913, PLR0917
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    y: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (query, key, value)
    found = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
    for row, own in _iterate_documents(query, bounds):
        parts = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient[row, own].transpose(0, 1).unsqueeze(0),
            *(one[row, :, own].unsqueeze(0) for one in inputs),
            y[row, own].transpose(0, 1).unsqueeze(0),
            log_sums[row, :, own].unsqueeze(0),
            0.0,
            **_mask_arguments(own, dtype=query.dtype, window=window),
            scale=scale,
        )
        for whole, part in zip(found, parts, strict=True):
            whole[row, :, own] = part[0]
    return found


@_attend_backward.register_fake
def _empty_gradients(  # signature: torch's custom operations  # noqa: PLR0913, PLR0917
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    y: Tensor,
    log_sums: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    del gradient, y, log_sums, bounds, scale, window
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(  # signature: torch's custom operations
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    query, key, value, bounds, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


@partial(attend_document_by_document.register_autograd, setup_context=_save_for_backward)
def _backward(
    ctx: Any, gradient: Tensor, _log_sums: Tensor
) -> tuple[Tensor | None, ...]:  # signature: torch's
    return (*_attend_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.window), None, None, None)


def _iterate_documents(query: Tensor, bounds: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (row, places within the row) of each document that has tokens."""
    rows, _, length, _ = query.shape
    places = bounds.flatten().tolist()
    if places[-1] != rows * length:
        raise TrainError(
            "the documents of a batch do not cover its tokens.",
            got=f"{places[-1]:,} of {rows * length:,} tokens",
            fix="document_ends whose last entry in each row is the row's length",
        )
    for begin, end in pairwise(places):
        row, first = divmod(begin, length)
        if end > begin:
            yield row, slice(first, first + end - begin)


def _mask_arguments(own: slice, *, dtype: torch.dtype, window: int | None) -> dict[str, Any]:
    """Returns the arguments that select pairs; only documents longer than a sliding window need a mask."""
    length = own.stop - own.start
    if window is None or length <= window:
        return {"is_causal": True}
    near = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    return {
        "is_causal": False,
        "attn_mask": torch.zeros(length, length, dtype=dtype).masked_fill(~near, -torch.inf),
    }
