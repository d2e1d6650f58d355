"""Causal attention within the documents of packed rows, of whole sequences or of a rank's part of them.

On a GPU, it needs no mask of all pairs of tokens. Models of transformers get it as one of their own attention
functions.

[Note: document bounds]
`bounds` is int32 (1, 1, 1, n + 1): 0, then where each document ends among the tokens of all rows. Kernels for
sequences of different lengths call this `cu_seqlens`. A row ends with a document, and documents without
tokens fill the tensor up, so that its size varies little. It has four dims because models of transformers
pass an attention mask of four dims unchanged to each attention layer. It follows from the packer's pieces by
arithmetic on their ends, so that the host never waits for the device.

[Note: keys of other ranks]
Everything else in a decoder treats tokens one by one. With context parallelism, each rank has the queries of
its own tokens, and attends to the keys of all earlier ones: the ranks gather each layer's keys and values
(Llama 3, arXiv:2407.21783, section 3.3.2), and backward sums their gradients over ranks. A rank has two
pieces of each sequence: see [Note: order of pieces] in `distributed.sequence_parts`.
"""

import importlib
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.distributed.sequence_parts import (
    PIECES,
    SequencePart,
    flatten_document_ends_to_bounds,
    gather_sequence,
)
from fullshard.errors import TrainError

_HALF = (torch.float16, torch.bfloat16)
_MOST_FLASH_CHANNELS = 256
_FIRST_WITH_FLASH, _FIRST_WITH_CUDNN = 8, 9  # major compute capabilities
DOCUMENT_ATTENTION = "fullshard_documents"
"""Beginning of the names of the implementation among those of transformers."""
# Declarations of a model class: attention is looked up by name, and takes its sliding window as an argument.
DECLARED = ("_supports_attention_backend", "_supports_flash_attn", "_supports_sdpa")
_SDPA = "sdpa"
_emulates_cuda = False  # see `emulate_cuda_attention`


class QueryKeyValue(NamedTuple):
    """Inputs of attention, each (batch, heads, sequence, head_dim); key and value may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def is_grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]


def document_bounds_if_supported(ends: Tensor, *, sequence_length: int) -> Tensor | None:
    """Returns the bounds of all documents of a microbatch; None on a GPU without a kernel that takes them.

    ends: (microbatch, documents), int32: where each document ends in its row; the last is the row's end
    """
    if ends.is_cuda:
        available = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
        if not available or torch.cuda.get_device_capability(ends.device)[0] < _FIRST_WITH_FLASH:
            return None
    bounds = flatten_document_ends_to_bounds(ends, sequence_length=sequence_length)
    mark_document_count_as_dynamic(bounds)
    return bounds


def mark_document_count_as_dynamic(bounds: Tensor) -> None:
    """Keeps compiled blocks from being compiled again for another number of documents."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.maybe_mark_dynamic(bounds, 3)


def is_document_bounds(mask: Tensor) -> bool:
    """Returns whether an attention mask is document bounds. See [Note: document bounds]."""
    return mask.dtype == torch.int32


@dataclass(frozen=True)
class ContextParallel:
    """The ranks from which attention gathers keys. See [Note: keys of other ranks].

    group: name of the process group of the ranks that share a sequence
    """

    part: SequencePart
    group: str = ""

    def check_bounds_are_given(self, mask: Tensor | None, *, training: bool) -> None:
        """Raises TrainError in training without bounds: a token would attend only to tokens of its rank."""
        if training and (mask is None or not is_document_bounds(mask)):
            raise TrainError(
                "the model was given a part of a sequence without the bounds of its documents.",
                got="no document_bounds",
                why="its attention would see only the tokens of this rank",
                fix="loss = fullshard.next_token_loss on batches of fullshard.cut_sequences(batch, plan)",
            )

    def gather_keys_and_values(self, inputs: QueryKeyValue) -> tuple[QueryKeyValue, list[int]]:
        """Returns this rank's queries with keys and values of whole sequences, and where its pieces begin."""
        key, value = (gather_sequence(one, self.part.ranks, PIECES, self.group) for one in inputs[1:])
        return inputs._replace(key=key, value=value), self.part.piece_starts(key.shape[2])


def attend_causally(
    inputs: QueryKeyValue, mask: Tensor | None, *, context: ContextParallel | None = None
) -> Tensor:
    """Returns causal attention, (batch, sequence, heads, head_dim).

    mask: document bounds; or bool (batch, 1, sequence, sequence), True where attended to; or None
    context: how document bounds of whole sequences reach the keys of other ranks
    """
    if mask is not None and is_document_bounds(mask):
        inputs, begins = (inputs, (0,)) if context is None else context.gather_keys_and_values(inputs)
        return attend_within_documents(inputs, mask, begins=begins)
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

    A GPU computes it in `torch.nn.attention.varlen.varlen_attn`, in half precision, for up to 256 channels (a
    multiple of 8). Otherwise, and on the CPU, it is computed with a mask of all pairs.
    """
    query, _, value = inputs
    channels, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing > 0:  # the kernels take one head_dim; latent attention (MLA) has narrower values
        inputs = inputs._replace(value=F.pad(value, (0, missing)))
    width = inputs.value.shape[-1]
    fits = query.shape[-1] == width <= _MOST_FLASH_CHANNELS and inputs.key.shape[-1] % 8 == 0
    has_kernel = fits and query.dtype in _HALF and (query.is_cuda or _emulates_cuda)
    attend = attend_with_varlen_kernel if has_kernel else _attend_with_mask
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


def disable_cudnn_attention_with_nan_gradients(device: torch.device, *, sequence_length: int) -> None:
    """Turns cuDNN's attention off in this process, if a mask at this length would give NaN in its gradients.

    From compute capability 9.0 on, torch prefers cuDNN, whose gradients are NaN if there is a mask and
    sequence_length % 128 == 64 (pytorch/pytorch#196678). This is global, because attention is computed again
    in the backward of recomputed blocks, and must then use the same kernel.
    """
    if device.type == "cuda" and sequence_length % 128 == 64:
        capability = torch.cuda.get_device_capability(device)[0]
        if torch.version.hip is None and capability >= _FIRST_WITH_CUDNN:
            torch.backends.cuda.enable_cudnn_sdp(False)


def _attend_with_mask(
    inputs: QueryKeyValue, bounds: Tensor, *, scale: float | None, window: int | None, begins: Sequence[int]
) -> Tensor:
    mask = _mask_of_queries(inputs, bounds, window=window, begins=begins)
    return F.scaled_dot_product_attention(
        *inputs, attn_mask=mask, scale=scale, enable_gqa=inputs.is_grouped
    ).transpose(1, 2)


def _mask_of_queries(
    inputs: QueryKeyValue, bounds: Tensor, *, window: int | None, begins: Sequence[int]
) -> Tensor:
    """Returns the rows of `square_mask` for the pieces of queries, (batch, 1, queries, length)."""
    (rows, _, length, _), queries = inputs.key.shape, inputs.query.shape[2]
    mask = square_mask(bounds, rows=rows, length=length, window=window)
    if queries == length:
        return mask
    each = queries // len(begins)
    return torch.cat([mask[..., begin : begin + each, :] for begin in begins], dim=-2)


# As an attention implementation of transformers #
def set_document_attention_if_supported(model: nn.Module, *, context: ContextParallel | None = None) -> bool:
    """Makes a transformers model attend within documents without a mask of all pairs, if it is able to.

    These are models that would use `sdpa`, and whose class declares that attention is exchangeable. They then
    take document bounds as `attention_mask` (see [Note: document bounds]); without them, they use `sdpa`.

    context: how attention reaches the keys of other ranks; None if each rank has whole sequences

    Returns whether the model is able to.
    """
    config: Any = model.config
    replaceable = config._attn_implementation == _SDPA or uses_document_attention(config)
    if not replaceable or not all(getattr(model, name, False) for name in DECLARED):
        return False
    attention: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks: Any = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    name = DOCUMENT_ATTENTION
    if context is not None:  # models of one process may differ, and a function is known by its name alone
        name += f"_{context.part.rank}_of_{context.part.ranks}_in_{context.group}"
    attention.register(name, _make_attention(attention[_SDPA], context))
    masks.register(name, masks[_SDPA])
    config._attn_implementation = name
    return True


def uses_document_attention(config: Any) -> bool:
    """Returns whether the transformers model of `config` attends by `set_document_attention_if_supported`."""
    return str(getattr(config, "_attn_implementation", "")).startswith(DOCUMENT_ATTENTION)


def _make_attention(sdpa: Callable[..., Any], context: ContextParallel | None) -> Callable[..., Any]:
    """Returns an attention function of transformers; `sdpa` is transformers' own, for all other cases."""

    def attend(  # signature: transformers' attention interface  # noqa: PLR0913, PLR0917
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        mask = attention_mask
        if context is not None:
            context.check_bounds_are_given(mask, training=module.training)
        if mask is not None and is_document_bounds(mask):
            inputs, window = QueryKeyValue(query, key, value), sliding_window or None
            inputs, begins = (inputs, (0,)) if context is None else context.gather_keys_and_values(inputs)
            more = (kwargs.get(name) for name in ("position_bias", "softcap", "s_aux"))
            if not dropout and all(one is None for one in more):
                return attend_within_documents(
                    inputs, mask, scale=scaling, window=window, begins=begins
                ), None
            query, key, value = inputs
            mask = _mask_of_queries(inputs, mask, window=window, begins=begins)
        return sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)

    return attend
