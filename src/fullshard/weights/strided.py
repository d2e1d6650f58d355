"""Copies of boxes of elements from a flat tensor into another tensor, in pieces that fit a buffer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fullshard.spec.weight_map import BoxCopy, row_major_strides

# Gaps of up to this size are read and dropped, which takes less time than another read.
GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A copy of strided elements of `source` into `target`.

    source: name of the source tensor
    begin: index of the first element in the flat source
    strides: source elements from one index to the next, for each dim of `target`
    target: view into the tensor that is filled
    """

    source: str
    begin: int
    strides: tuple[int, ...]
    target: Tensor

    @property
    def span_length(self) -> int:
        """Number of source elements from the first to the last copied one, with the gaps between."""
        return 1 + sum((n - 1) * s for n, s in zip(self.target.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are adjacent in both source and target, in the same order."""
        wanted = row_major_strides(tuple(self.target.shape))
        dims = zip(self.target.shape, self.strides, wanted, strict=True)
        agree = all(size == 1 or stride == step for size, stride, step in dims)
        return agree and self.target.is_contiguous()

    def narrow(self, dim: int, begin: int, *, length: int) -> "StridedCopy":
        """Returns the copy restricted to `length` elements from `begin` along `dim`."""
        start = self.begin + begin * self.strides[dim]
        return StridedCopy(self.source, start, self.strides, self.target.narrow(dim, begin, length))

    def fill_target(self, elements: Tensor) -> None:
        """Fills `target` from `elements`, the `span_length` elements from `begin` on. Converts the dtype."""
        self.target.copy_(elements.as_strided(self.target.shape, self.strides, elements.storage_offset()))


def iterate_copies_into(
    target: Tensor, parts: Sequence[BoxCopy], *, offsets: Sequence[int]
) -> Iterator[StridedCopy]:
    """Yields the copies that fill `target`, a box at `offsets` in the tensor that `parts` fill."""
    for part in parts:
        begin, view, empty = part.begin, target, target.numel() == 0
        for dim, offset in enumerate(offsets):
            low = max(part.at[dim], offset)
            high = min(part.at[dim] + part.shape[dim], offset + target.shape[dim])
            if low >= high:
                empty = True
                break
            begin += (low - part.at[dim]) * part.strides[dim]
            view = view.narrow(dim, low - offset, high - low)
        if not empty:
            yield StridedCopy(part.source, begin, part.strides, view)


def split_copy(move: StridedCopy, *, most: int, itemsize: int) -> Iterator[StridedCopy]:
    """Splits `move` into copies that each span at most `most` source elements and no gap above GAP_BYTES.

    itemsize: bytes per source element
    """
    dims = [dim for dim, size in enumerate(move.target.shape) if size > 1]
    if not dims:
        yield move
        return
    outer = max(dims, key=lambda dim: move.strides[dim])
    stride, size = move.strides[outer], move.target.shape[outer]
    inner = move.span_length - (size - 1) * stride
    far_apart = (stride - inner) * itemsize > GAP_BYTES
    if move.span_length <= most and not far_apart:
        yield move
        return
    fitting = 1 if far_apart or inner >= most else max(1, (most - inner) // max(stride, 1) + 1)
    for begin in range(0, size, fitting):
        piece = move.narrow(outer, begin, length=min(fitting, size - begin))
        yield from split_copy(piece, most=most, itemsize=itemsize)
