"""Causal attention within the documents of packed rows; on a GPU without a mask of all pairs of tokens.

[Note: document bounds]
`bounds` is int32 (1, 1, 1, n + 1): 0, then where each document ends among the tokens of all rows. Kernels for
sequences of different lengths call this `cu_seqlens`. A row ends with a document, and documents without
tokens fill the tensor up, so that its size varies little. It has four dims because models of transformers
pass an attention mask of four dims unchanged to each attention layer. It follows from the packer's pieces by
arithmetic on their ends, so that the host never waits for the device.
"""

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard.distributed.sequence_parts import bounds_of_documents

_HALF = (torch.float16, torch.bfloat16)
_MOST_FLASH_CHANNELS = 256
_FIRST_WITH_FLASH, _FIRST_WITH_CUDNN = 8, 9  # major compute capabilities
_emulates_cuda = False  # see `emulate_cuda_attention`


class QueryKeyValue(NamedTuple):
    """Inputs of attention, each (batch, heads, sequence, head_dim); key and value may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]


def document_bounds(ends: Tensor, *, sequence_length: int) -> Tensor | None:
    """Returns the bounds of all documents of a microbatch; None on a GPU without a kernel that takes them.

    ends: (microbatch, documents), int32: where each document ends in its row; the last is the row's end
    """
    if ends.is_cuda and not _has_varlen_kernel(ends.device):
        return None
    bounds = bounds_of_documents(ends, sequence_length=sequence_length)
    mark_size_as_dynamic(bounds)
    return bounds


def mark_size_as_dynamic(bounds: Tensor) -> None:
    """Keeps compiled blocks from being compiled again for another number of documents."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.maybe_mark_dynamic(bounds, 3)


def is_document_bounds(mask: Tensor) -> bool:
    """Returns whether an attention mask is document bounds. See [Note: document bounds]."""
    return mask.dtype == torch.int32


def attend_causally(inputs: QueryKeyValue, mask: Tensor | None) -> Tensor:
    """Returns causal attention, (batch, sequence, heads, head_dim).

    mask: document bounds; or bool (batch, 1, sequence, sequence), True where attended to; or None
    """
    if mask is not None and is_document_bounds(mask):
        return attend_within_documents(inputs, mask)
    return F.scaled_dot_product_attention(
        *inputs, attn_mask=mask, is_causal=mask is None, enable_gqa=inputs.is_grouped
    ).transpose(1, 2)


def attend_within_documents(
    inputs: QueryKeyValue,
    bounds: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    begins: Sequence[int] = (0,),
) -> Tensor:
    """Returns causal attention within documents, (batch, queries, heads, head_dim).

    bounds: see [Note: document bounds]
    scale: factor of the scores; unset, 1 / sqrt(head_dim)
    window: number of last tokens that a token attends to, itself included; unset, all of its document
    begins: where each of as many equal pieces of the queries begins in its row; by default the queries are
        those of whole rows, as the keys are

    A GPU computes it in `torch.nn.attention.varlen.varlen_attn`, in half precision and up to 256 channels.
    Otherwise, and on the CPU, it is computed with a mask of all pairs.
    """
    query, _, value = inputs
    channels, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing > 0:  # the kernels take one head_dim; latent attention (MLA) has narrower values
        inputs = inputs._replace(value=F.pad(value, (0, missing)))
    attend = attend_on_cuda if query.is_cuda or _emulates_cuda else _attend_with_mask
    return attend(inputs, bounds, scale=scale, window=window, begins=begins)[..., :channels]


@contextmanager
def emulate_cuda_attention() -> Generator[None]:
    """Makes attention within documents use a GPU's operations on CPU tensors while active."""
    global _emulates_cuda
    _emulates_cuda = True
    try:
        yield
    finally:
        _emulates_cuda = False


def attend_on_cuda(
    inputs: QueryKeyValue, bounds: Tensor, *, scale: float | None, window: int | None, begins: Sequence[int]
) -> Tensor:
    """Computes `attend_within_documents` by the operations that a GPU uses."""
    channels = inputs.key.shape[-1]
    fits = inputs.query.shape[-1] == inputs.value.shape[-1] <= _MOST_FLASH_CHANNELS and channels % 8 == 0
    if inputs.query.dtype not in _HALF or not fits:
        return _attend_with_mask(inputs, bounds, scale=scale, window=window, begins=begins)
    return attend_with_varlen_kernel(inputs, bounds, scale=scale, window=window, begins=begins)


def attend_with_varlen_kernel(
    inputs: QueryKeyValue, bounds: Tensor, *, scale: float | None, window: int | None, begins: Sequence[int]
) -> Tensor:
    """Computes `attend_within_documents` by torch's flash attention of sequences of any length."""
    from torch.nn.attention.varlen import varlen_attn  # it imports the compiler

    rows, _, length, _ = inputs.key.shape
    options: dict[str, Any] = {}
    if inputs.is_grouped and "enable_gqa" in (varlen_attn.__kwdefaults__ or {}):
        options["enable_gqa"] = True  # older releases read it off the shapes
    seen, ends = (-1 if window is None else window - 1, 0), bounds.flatten()
    pieces: list[Tensor] = []
    for begin, own in zip(begins, inputs.query.chunk(len(begins), dim=2), strict=True):
        count = own.shape[2]
        needed = (own, *(one[:, :, : begin + count] for one in inputs[1:]))
        query, key, value = (one.transpose(1, 2).flatten(0, 1) for one in needed)  # (tokens, heads, head_dim)
        places = ends, ends
        if len(begins) > 1 or count < length:
            # How many of the piece's queries, and of its keys, come before the end of each document. A
            # causal kernel aligns the last query of a document with its last key.
            row, place = ends // length, ends % length
            places = (
                row * count + (place - begin).clamp(0, count),
                row * (begin + count) + place.clamp(max=begin + count),
            )
        y: Any = varlen_attn(
            query, key, value, *places, count, begin + count, scale=scale, window_size=seen, **options
        )
        pieces.append(y.unflatten(0, (rows, count)))
    return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]


def square_mask(bounds: Tensor, *, rows: int, length: int, window: int | None = None) -> Tensor:
    """Returns the mask of documents: bool (rows, 1, length, length), True where a token is attended to."""
    places = torch.arange(rows * length, device=bounds.device, dtype=bounds.dtype)
    documents = torch.bucketize(places, bounds.flatten()[1:], right=True).view(rows, 1, length)
    seen = (documents[..., :, None] == documents[..., None, :]).tril()
    return seen if window is None else seen.triu(1 - window)


def avoid_nan_of_cudnn(device: torch.device, *, sequence_length: int) -> None:
    """Turns cuDNN's attention off in this process, if a mask at this length would give NaN in its gradients.

    From compute capability 9.0 on, torch prefers cuDNN, whose gradients are NaN if there is a mask and
    sequence_length % 128 == 64 (pytorch/pytorch#196678). This is global, because attention is computed again
    in the backward of recomputed blocks, and must then use the same kernel.
    """
    if device.type == "cuda" and sequence_length % 128 == 64:
        capability = torch.cuda.get_device_capability(device)[0]
        if torch.version.hip is None and capability >= _FIRST_WITH_CUDNN:
            torch.backends.cuda.enable_cudnn_sdp(False)


def _has_varlen_kernel(device: torch.device) -> bool:
    available = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device)[0] >= _FIRST_WITH_FLASH


def _attend_with_mask(
    inputs: QueryKeyValue, bounds: Tensor, *, scale: float | None, window: int | None, begins: Sequence[int]
) -> Tensor:
    rows, _, length, _ = inputs.key.shape
    mask = square_mask(bounds, rows=rows, length=length, window=window)
    return F.scaled_dot_product_attention(
        *inputs,
        attn_mask=mask_of_queries(mask, begins=begins, queries=inputs.query.shape[2]),
        scale=scale,
        enable_gqa=inputs.is_grouped,
    ).transpose(1, 2)


def mask_of_queries(mask: Tensor, *, begins: Sequence[int], queries: int) -> Tensor:
    """Returns the rows of a square mask (…, length, length) for pieces of queries, (…, queries, length)."""
    if queries == mask.shape[-2]:
        return mask
    each = queries // len(begins)
    return torch.cat([mask[..., begin : begin + each, :] for begin in begins], dim=-2)
