"""Traces how transformers rearranges a file's tensors (splits, stacks, joins, transposes).

The operations are applied to tensors without values. The result lists, box by box, which elements of which
source are at which position.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fullshard.spec.weight_map import BoxCopy, Shape, map_unchanged_tensor, row_major_strides
from fullshard.torch_private.fake_tensors import make_wrapper_subclass

_ATEN = torch.ops.aten


class UntraceableOperationError(Exception):
    """Raised for an operation on a `TracedTensor` that computes values, or that is not supported here."""


class TracedTensor(Tensor):
    """A tensor without values, which records where each element comes from.

    parts: boxes that fill the tensor, see `spec.weight_map`
    """

    parts: tuple[BoxCopy, ...]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, keywords = func.overloadpacket, dict(kwargs or {})
        if packet in _COPIES:
            return _clone(args[0])
        if packet not in _FOLLOWED:
            raise UntraceableOperationError(str(func))
        return _FOLLOWED[packet](*args, **keywords)


def make_traced_tensor(shape: Shape, parts: Iterable[BoxCopy]) -> TracedTensor:
    """Returns a traced tensor of `shape`, without values. `parts` say whence its elements come."""
    # Appears contiguous, so that every reshape is a view; only views are supported here.
    made = make_wrapper_subclass(TracedTensor, shape, dtype=torch.float32, device="meta")
    made.parts = tuple(parts)
    return made


def make_source_tensor(name: str, shape: Shape) -> TracedTensor:
    """Returns a traced tensor that is the whole source tensor `name`."""
    return make_traced_tensor(shape, map_unchanged_tensor(name, shape))


_COPIES = (_ATEN.clone, _ATEN.detach, _ATEN.alias)


def _clone(tensor: TracedTensor) -> TracedTensor:
    return make_traced_tensor(tuple(tensor.shape), tensor.parts)


def _replace_entry(values: Sequence[int], dim: int, *new: int) -> tuple[int, ...]:
    """Returns `values` with the entry of `dim` replaced by `new`, which may be none or several entries."""
    return (*values[:dim], *new, *values[dim + 1 :])


def _edit_dims(tensor: TracedTensor, edit: Callable[[Sequence[int]], Shape]) -> TracedTensor:
    """Applies `edit`, which reorders or drops the entries per dim, to the shape and to every part."""
    parts = [replace(p, strides=edit(p.strides), at=edit(p.at), shape=edit(p.shape)) for p in tensor.parts]
    return make_traced_tensor(edit(tensor.shape), parts)


def _narrow(tensor: TracedTensor, dim: int, *, begin: int, length: int) -> TracedTensor:
    parts: list[BoxCopy] = []
    for p in tensor.parts:
        low, high = max(p.at[dim], begin), min(p.at[dim] + p.shape[dim], begin + length)
        if low < high:
            first = p.begin + (low - p.at[dim]) * p.strides[dim]
            at, shape = _replace_entry(p.at, dim, low - begin), _replace_entry(p.shape, dim, high - low)
            parts.append(BoxCopy(p.source, first, p.strides, at, shape))
    return make_traced_tensor(_replace_entry(tensor.shape, dim, length), parts)


def _slice(  # signature: aten's
    tensor: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TracedTensor:
    if step != 1:
        raise UntraceableOperationError("slices with steps")
    dim %= tensor.ndim
    low, high, _ = slice(start, end).indices(tensor.shape[dim])
    return _narrow(tensor, dim, begin=low, length=max(high - low, 0))


def _split_with_sizes(
    tensor: TracedTensor, sizes: Sequence[int], dim: int = 0
) -> list[TracedTensor]:  # signature: aten's
    dim %= tensor.ndim
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_narrow(tensor, dim, begin=b, length=n) for b, n in zip(begins, sizes, strict=True)]


def _split(tensor: TracedTensor, size: int, dim: int = 0) -> list[TracedTensor]:  # signature: aten's
    length = tensor.shape[dim]
    sizes = [min(size, length - begin) for begin in range(0, length, size)]
    return _split_with_sizes(tensor, sizes, dim)


def _select(tensor: TracedTensor, dim: int, index: int) -> TracedTensor:  # signature: aten's
    dim %= tensor.ndim
    return _squeeze(_narrow(tensor, dim, begin=index % tensor.shape[dim], length=1), dim)


def _unbind(tensor: TracedTensor, dim: int = 0) -> list[TracedTensor]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _squeeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim %= tensor.ndim
    if tensor.shape[dim] != 1:
        return _clone(tensor)
    return _edit_dims(tensor, lambda values: _replace_entry(values, dim))


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    dim %= tensor.ndim + 1

    def insert(values: Sequence[int], new: int) -> tuple[int, ...]:
        return (*values[:dim], new, *values[dim:])

    parts = [
        replace(p, strides=insert(p.strides, 0), at=insert(p.at, 0), shape=insert(p.shape, 1))
        for p in tensor.parts
    ]
    return make_traced_tensor(insert(tensor.shape, 1), parts)


def _cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    dim %= tensors[0].ndim
    across = {_replace_entry(t.shape, dim) for t in tensors}
    if len(across) > 1:
        shapes = ", ".join(str(list(s)) for s in sorted(across))
        raise UntraceableOperationError(f"joining tensors of shapes {shapes}")
    parts, begin = list[BoxCopy](), 0
    for tensor in tensors:
        parts += [replace(p, at=_replace_entry(p.at, dim, p.at[dim] + begin)) for p in tensor.parts]
        begin += tensor.shape[dim]
    return make_traced_tensor(_replace_entry(tensors[0].shape, dim, begin), parts)


def _stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim % (tensors[0].ndim + 1))


def _permute(tensor: TracedTensor, dims: Sequence[int]) -> TracedTensor:
    order = [dim % tensor.ndim for dim in dims]
    return _edit_dims(tensor, lambda values: tuple(values[dim] for dim in order))


def _transpose(tensor: TracedTensor, dim0: int, dim1: int) -> TracedTensor:  # signature: aten's
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _reshape(tensor: TracedTensor, size: Sequence[int]) -> TracedTensor:
    """Reshapes a traced tensor to `size`, which may contain one -1, box by box."""
    old = tuple(tensor.shape)
    new = tuple(torch.empty(old, device="meta").reshape(tuple(size)).shape)
    boxes = [box for part in tensor.parts for box in _reshape_part(part, old, new=new)]
    return make_traced_tensor(new, boxes)


@dataclass(frozen=True)
class _FlattenedRun:
    """Consecutive elements of a flattened tensor, which come from elements of a source at a fixed distance.

    at: first element in the flattened tensor
    length: number of elements
    begin: first element in the source
    stride: source elements from one element to the next
    """

    at: int
    length: int
    begin: int
    stride: int


def _reshape_part(part: BoxCopy, old: Shape, *, new: Shape) -> list[BoxCopy]:
    """Returns `part` of a tensor of shape `old` as boxes of the same elements in the shape `new`.

    Equal dims at the front and at the back of both shapes are kept. The dims between are cut into runs.
    """
    front = _count_equal_leading_dims(old, new)
    back = _count_equal_leading_dims(old[front:][::-1], new[front:][::-1])
    low, high = slice(front, len(old) - back), slice(front, len(new) - back)
    runs = _flattened_box_runs(part.at[low], shape=part.shape[low], strides=part.strides[low], sizes=old[low])
    return [
        BoxCopy(
            part.source,
            begin=part.begin + box.begin,
            strides=(*part.strides[:front], *box.strides, *part.strides[low.stop :]),
            at=(*part.at[:front], *box.at, *part.at[low.stop :]),
            shape=(*part.shape[:front], *box.shape, *part.shape[low.stop :]),
        )
        for run in runs
        for box in _split_run_into_boxes(run, new[high])
    ]


def _count_equal_leading_dims(one: Shape, other: Shape) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _flattened_box_runs(at: Shape, *, shape: Shape, strides: Shape, sizes: Shape) -> list[_FlattenedRun]:
    """Returns the runs of a box in the flattened tensor of shape `sizes`, with `begin` relative to the box.

    at, shape: position and shape of the box
    strides: source elements from one index of the box to the next, per dim
    """
    runs, inner = [_FlattenedRun(0, 1, 0, 0)], 1
    for dim in reversed(range(len(sizes))):
        first = runs[0]
        joins = inner == 1 or shape[dim] == 1 or strides[dim] == first.stride * inner
        if len(runs) == 1 and first.length == inner and joins:
            stride = strides[dim] if inner == 1 else first.stride
            runs = [_FlattenedRun(at[dim] * inner, shape[dim] * inner, 0, stride)]
        else:
            runs = [
                _FlattenedRun((at[dim] + i) * inner + r.at, r.length, i * strides[dim] + r.begin, r.stride)
                for i in range(shape[dim])
                for r in runs
            ]
        inner *= sizes[dim]
    return runs


def _split_run_into_boxes(run: _FlattenedRun, sizes: Shape) -> list[BoxCopy]:
    """Returns the boxes that `run` fills in a tensor of shape `sizes`. They have no source name."""
    if not sizes:
        return [BoxCopy("", begin=run.begin, strides=(), at=(), shape=())]
    inner_sizes, inner = sizes[1:], math.prod(sizes[1:])
    found: list[BoxCopy] = []
    at, end = run.at, run.at + run.length
    while at < end:
        row, column = divmod(at, inner)
        begin = run.begin + (at - run.at) * run.stride
        rows = (end - at) // inner if column == 0 else 0
        taken = rows * inner or min(inner - column, end - at)
        if rows:
            strides = tuple(step * run.stride for step in (inner, *row_major_strides(inner_sizes)))
            found.append(BoxCopy("", begin, strides, (row, *(0 for _ in inner_sizes)), (rows, *inner_sizes)))
        else:
            for box in _split_run_into_boxes(_FlattenedRun(column, taken, begin, run.stride), inner_sizes):
                found.append(BoxCopy("", box.begin, (0, *box.strides), (row, *box.at), (1, *box.shape)))
        at += taken
    return found


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    _ATEN.slice: _slice,
    _ATEN.split: _split,
    _ATEN.split_with_sizes: _split_with_sizes,
    _ATEN.select: _select,
    _ATEN.unbind: _unbind,
    _ATEN.squeeze: _squeeze,
    _ATEN.unsqueeze: _unsqueeze,
    _ATEN.cat: _cat,
    _ATEN.stack: _stack,
    _ATEN.permute: _permute,
    _ATEN.transpose: _transpose,
    _ATEN.t: lambda tensor: _transpose(tensor, 0, 1) if tensor.ndim == 2 else _clone(tensor),
    _ATEN.view: _reshape,
    _ATEN._unsafe_view: _reshape,
    _ATEN.reshape: _reshape,
}
