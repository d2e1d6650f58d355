"""Rules by which meshes of ranks cut tensors into shards, computed from shapes alone.

[Note: nested cuts] If several axes of a mesh cut one dim, each cuts what the one before left, as
`torch.chunk` does: the last parts may be shorter or empty. FSDP2 cuts last (`_StridedShard`), over the outer
axis. Torch's `compute_local_shape_and_global_offset`, and so `zeros`, cut over the outer axis first. These
are other rows if the inner axis leaves parts of different sizes: 7 rows over 3 x 2 ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from fullshard.spec.weight_map import Shape

Cuts = tuple[tuple[NonNegativeInt, ...], ...]
"""Per dim, the mesh axes that cut it, in this order."""


class Box(NamedTuple):
    """A part of a tensor: its first position, and its size, per dim."""

    begin: Shape
    size: Shape

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.size, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.size)


class RankMesh(NamedTuple):
    """Sizes of the axes of a mesh, and its global ranks, row-major."""

    shape: tuple[PositiveInt, ...]
    ranks: tuple[NonNegativeInt, ...]


class ShardLayout(NamedTuple):
    """Says how a tensor is cut into shards, and which ranks save them.

    mesh: index of its mesh in the list of meshes that is kept beside the layouts
    cuts: see [Note: nested cuts]
    copy: which ranks save, of those that have equal shards: their position on the axes that cut nothing,
        row-major
    """

    mesh: NonNegativeInt
    cuts: Cuts
    copy: NonNegativeInt

    def fits(self, whole: Sequence[int], meshes: Sequence[RankMesh]) -> bool:
        """Returns whether it is a layout of tensors of shape `whole` on its mesh, one of `meshes`."""
        if self.mesh >= len(meshes) or len(self.cuts) != len(whole):
            return False
        mesh, axes = meshes[self.mesh], [axis for cut in self.cuts for axis in cut]
        one_each = len(axes) == len({*axes} & {*range(len(mesh.shape))})
        full = prod(mesh.shape) == len(mesh.ranks)
        return one_each and full and self.copy < self.count_copies(mesh)

    def count_copies(self, mesh: RankMesh) -> int:
        return prod(mesh.shape[axis] for axis in uncut_axes(self.cuts, mesh=mesh))

    def iterate_shards(self, mesh: RankMesh, whole: Sequence[int], *, part: Box) -> Iterator[tuple[int, Box]]:
        """Yields (rank that saves it, shard) of each shard with elements of `part`."""
        place, rest = [0] * len(mesh.shape), self.copy
        for axis in reversed(uncut_axes(self.cuts, mesh=mesh)):
            rest, place[axis] = divmod(rest, mesh.shape[axis])
        dims = [
            list(_iterate_chunks(length, [mesh.shape[axis] for axis in cut], low=low, high=low + size))
            for length, cut, low, size in zip(whole, self.cuts, *part, strict=True)
        ]
        for chunks in itertools.product(*dims):
            for cut, (numbers, _, _) in zip(self.cuts, chunks, strict=True):
                for axis, number in zip(cut, numbers, strict=True):
                    place[axis] = number
            flat = 0
            for size, at in zip(mesh.shape, place, strict=True):
                flat = flat * size + at
            yield mesh.ranks[flat], Box(tuple(one[1] for one in chunks), tuple(one[2] for one in chunks))

    def count_shards(self, mesh: RankMesh, whole: Sequence[int]) -> int:
        """Returns the number of shards with elements."""
        counts = [
            sum(1 for _ in _iterate_chunks(length, [mesh.shape[axis] for axis in cut], low=0, high=length))
            for length, cut in zip(whole, self.cuts, strict=True)
        ]
        return prod(counts)


def uncut_axes(cuts: Cuts, *, mesh: RankMesh) -> list[int]:
    """Returns the mesh axes along which ranks have equal shards."""
    cutting = {axis for cut in cuts for axis in cut}
    return [axis for axis in range(len(mesh.shape)) if axis not in cutting]


def cut_box(whole: Sequence[int], cuts: Cuts, *, sizes: Sequence[int], coordinate: Sequence[int]) -> Box:
    """Returns the part of a tensor of shape `whole` that the rank at `coordinate` has, on axes of `sizes`."""
    start, shape = list[int](), list[int]()
    for length, cut in zip(whole, cuts, strict=True):
        begin = 0
        for axis in cut:
            each = -(-length // sizes[axis])
            skipped = min(each * coordinate[axis], length)
            begin, length = begin + skipped, min(each, length - skipped)
        start.append(begin)
        shape.append(length)
    return Box(tuple(start), tuple(shape))


def _iterate_chunks(
    length: int, counts: Sequence[int], *, low: int, high: int
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yields (number at each level, begin, length) of the chunks of range(length) within low to high.

    counts: number of chunks into which each level cuts those of the level before
    """
    if low >= high:
        return
    if not counts:
        yield (), 0, length
        return
    each = -(-length // counts[0])
    for number in range(low // each, (high - 1) // each + 1):
        begin = number * each
        size = min(each, length - begin)
        inside = _iterate_chunks(size, counts[1:], low=max(low - begin, 0), high=min(high - begin, size))
        for numbers, at, inner in inside:
            yield (number, *numbers), begin + at, inner
