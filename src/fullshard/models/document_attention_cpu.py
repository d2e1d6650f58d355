"""Attention within documents on the CPU: torch's flash attention, document by document, as one operation.

As one operation, it is compiled, traced and recomputed as a whole. See `fullshard.models.document_attention`.

[Note: queries behind keys]
Queries of a part of a sequence attend to all keys of their document before them, and causally to their own.
torch's kernel is causal only where queries and keys begin together. So the two parts are computed alone, and
joined by their log-sum-exps. Backward takes each part with the joined result and log-sum-exp: a pair's
probability is exp(score - log-sum-exp) over all pairs, so each part gives its share of the gradients.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard.errors import TrainError

_ATEN = torch.ops.aten
_Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value


class _Pairs(NamedTuple):
    """Queries and keys of one row that attention computes together, and the arguments that select pairs."""

    row: int
    queries: slice
    keys: slice
    mask: dict[str, Any]


@torch.library.custom_op("fullshard::document_attention", mutates_args=(), device_types="cpu")
def attend_document_by_document(  # signature: torch's custom operations  # noqa: PLR0913, PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: int | None,
    begins: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Returns (attention (batch, queries, heads, head_dim), log-sum-exp (batch, heads, queries)).

    query, key, value: (batch, heads, sequence, head_dim); key and value may have fewer heads
    bounds, scale, window, begins: as in `fullshard.models.document_attention.attend_within_documents`
    """
    y, log_sums = _empty_results(query, key, value, bounds, scale, window, begins)
    for first, *rest in _iterate_joined_pairs(query, key, bounds=bounds, window=window, begins=begins):
        part, log_sum = _attend((query, key, value), first, scale=scale)
        for pairs in rest:
            other, other_log_sum = _attend((query, key, value), pairs, scale=scale)
            joined = torch.logaddexp(log_sum, other_log_sum)
            share, other_share = ((one - joined).exp().unsqueeze(-1) for one in (log_sum, other_log_sum))
            part, log_sum = share * part + other_share * other, joined
        y[first.row, first.queries] = part[0].transpose(0, 1)
        log_sums[first.row, :, first.queries] = log_sum[0]
    return y, log_sums


@attend_document_by_document.register_fake
def _empty_results(  # signature: torch's custom operations  # noqa: PLR0913, PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float | None,
    window: int | None,
    begins: Sequence[int],
) -> tuple[Tensor, Tensor]:
    del key, value, bounds, scale, window, begins
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
    begins: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    # Whole rows of queries meet each key once.
    once = list(begins) == [0] and query.shape[2] == key.shape[2]
    make = torch.empty_like if once else torch.zeros_like
    found = make(query), make(key), make(value)
    for joined in _iterate_joined_pairs(query, key, bounds=bounds, window=window, begins=begins):
        for pairs in joined:
            row, queries, keys, mask = pairs
            parts = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient[row, queries].transpose(0, 1).unsqueeze(0),
                *_inputs_of((query, key, value), pairs),
                y[row, queries].transpose(0, 1).unsqueeze(0),
                log_sums[row, :, queries].unsqueeze(0),
                0.0,
                **mask,
                scale=scale,
            )
            for whole, part, own in zip(found, parts, (queries, keys, keys), strict=True):
                if once:
                    whole[row, :, own] = part[0]
                else:
                    whole[row, :, own] += part[0]
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
    begins: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    del gradient, y, log_sums, bounds, scale, window, begins
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save_for_backward(  # signature: torch's custom operations
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    query, key, value, bounds, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, bounds)


@partial(attend_document_by_document.register_autograd, setup_context=_save_for_backward)
def _backward(
    ctx: Any, gradient: Tensor, _log_sums: Tensor
) -> tuple[Tensor | None, ...]:  # signature: torch's
    return (*_attend_backward(gradient, *ctx.saved_tensors, *ctx.rest), None, None, None, None)


def _attend(inputs: _Inputs, pairs: _Pairs, *, scale: float | None) -> tuple[Tensor, Tensor]:
    """Returns (attention (1, heads, queries, head_dim), log-sum-exp (1, heads, queries)) of `pairs`."""
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(
        *_inputs_of(inputs, pairs), **pairs.mask, scale=scale
    )


def _inputs_of(inputs: _Inputs, pairs: _Pairs) -> list[Tensor]:
    places = (pairs.queries, pairs.keys, pairs.keys)
    return [one[pairs.row, :, own].unsqueeze(0) for one, own in zip(inputs, places, strict=True)]


def _iterate_joined_pairs(
    query: Tensor, key: Tensor, *, bounds: Tensor, window: int | None, begins: Sequence[int]
) -> Iterator[list[_Pairs]]:
    """Yields all pairs of each piece's queries of each document. See [Note: queries behind keys]."""
    each = query.shape[2] // len(begins)
    for row, document in _iterate_documents(key, bounds):
        for index, begin in enumerate(begins):
            own = slice(max(document.start, begin), min(document.stop, begin + each))
            if own.stop <= own.start:
                continue
            shift = index * each - begin  # from a place in the row to one among the queries
            queries = slice(own.start + shift, own.stop + shift)
            count, before = own.stop - own.start, own.start - document.start
            if window is not None and window < before + count:
                first = max(document.start, own.start - window + 1)
                mask = _window_mask(
                    count, own.start - first, window=window, dtype=query.dtype, device=query.device
                )
                yield [_Pairs(row, queries, slice(first, own.stop), {"is_causal": False, "attn_mask": mask})]
                continue
            earlier = _Pairs(row, queries, slice(document.start, own.start), {"is_causal": False})
            yield [_Pairs(row, queries, own, {"is_causal": True}), *([earlier] if before else [])]


def _iterate_documents(key: Tensor, bounds: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields (row, places within the row) of each document that has tokens."""
    rows, _, length, _ = key.shape
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


def _window_mask(
    queries: int, before: int, *, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns numbers to add to scores (queries, before + queries): 0 for the last `window` keys."""
    near = torch.ones(queries, before + queries, dtype=torch.bool, device=device)
    near = near.tril(before).triu(before + 1 - window)
    return torch.zeros(near.shape, dtype=dtype, device=device).masked_fill(~near, -torch.inf)
