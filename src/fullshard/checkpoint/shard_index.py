"""The index of a checkpoint, `shards.json`: which data file has which shard of which tensor.

[Note: an index by layout] One rule cuts a DTensor, so its entry is its layout: the mesh, the axes that cut
each dim, and which of several copies is saved. This says where each shard is, whatever the number of ranks.
Where a shard begins in its data file is in the file's table (`shard_file`), which a reader of the shard reads
anyway. Other shards are listed one by one: plain tensors, tensors of a single rank, DTensors that the rule
does not cut, and all shards in indexes of format 2.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from fullshard.checkpoint.manifest import Manifest
from fullshard.distributed.shard_boxes import Box, cut_box
from fullshard.spec.value import FrozenModel


class RankMesh(NamedTuple):
    """Sizes of the axes of a mesh, and its global ranks, row-major."""

    shape: tuple[PositiveInt, ...]
    ranks: tuple[NonNegativeInt, ...]


class ShardLayout(NamedTuple):
    """Says how a tensor is cut into shards, and which ranks save them.

    mesh: number of its mesh in `ShardIndex.meshes`
    cuts: per dim, the mesh axes that cut it, in this order: see [Note: nested cuts] in
        `fullshard.distributed.shard_boxes`
    copy: which ranks save, of those that have equal shards: their position on the axes that cut nothing,
        row-major
    """

    mesh: NonNegativeInt
    cuts: tuple[tuple[NonNegativeInt, ...], ...]
    copy: NonNegativeInt

    def fits(self, whole: Sequence[int], meshes: Sequence[RankMesh]) -> bool:
        """Returns whether it is a layout of tensors of shape `whole` on its mesh, one of `meshes`."""
        if self.mesh >= len(meshes) or len(self.cuts) != len(whole):
            return False
        mesh, axes = meshes[self.mesh], [axis for cut in self.cuts for axis in cut]
        one_each = len(axes) == len({*axes} & {*range(len(mesh.shape))})
        full = math.prod(mesh.shape) == len(mesh.ranks)
        return one_each and full and self.copy < self.count_copies(mesh)

    def uncut_axes(self, mesh: RankMesh) -> list[int]:
        """Returns the mesh axes along which ranks have equal shards."""
        cutting = {axis for cut in self.cuts for axis in cut}
        return [axis for axis in range(len(mesh.shape)) if axis not in cutting]

    def count_copies(self, mesh: RankMesh) -> int:
        return math.prod(mesh.shape[axis] for axis in self.uncut_axes(mesh))

    def shard_at(self, mesh: RankMesh, coordinate: Sequence[int], *, whole: Sequence[int]) -> Box:
        """Returns the shard of a tensor of shape `whole` that the rank at `coordinate` of the mesh has."""
        return cut_box(whole, self.cuts, sizes=mesh.shape, coordinate=coordinate)

    def iterate_shards(self, mesh: RankMesh, whole: Sequence[int], *, part: Box) -> Iterator[tuple[int, Box]]:
        """Yields (rank that saves it, shard) of each shard with elements of `part`."""
        place, rest = [0] * len(mesh.shape), self.copy
        for axis in reversed(self.uncut_axes(mesh)):
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
            yield mesh.ranks[flat], (tuple(one[1] for one in chunks), tuple(one[2] for one in chunks))

    def count_shards(self, mesh: RankMesh, whole: Sequence[int]) -> int:
        """Returns the number of shards with elements."""
        counts = [
            sum(1 for _ in _iterate_chunks(length, [mesh.shape[axis] for axis in cut], low=0, high=length))
            for length, cut in zip(whole, self.cuts, strict=True)
        ]
        return math.prod(counts)


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


class ShardPosition(NamedTuple):
    """A listed shard.

    file: index of its data file in `ShardIndex.files`
    offset: byte of the data file at which its piece begins
    start: position of its first element in the whole tensor, per dim
    shape: shape of the shard
    """

    file: NonNegativeInt
    offset: NonNegativeInt
    start: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]


class LocatedShard(NamedTuple):
    """A shard and the name of its data file; `offset` as in ShardPosition, None if only the table has it."""

    file: str
    box: Box
    offset: int | None


def data_file_name(rank: int) -> str:
    """Returns the name of a rank's data file, as DCP names a rank's first file."""
    return f"__{rank}_0.distcp"


class ShardIndex(FrozenModel):
    """Positions of all shards: see [Note: an index by layout].

    files: names of the data files of listed shards
    shards: listed shards of each tensor by its name; a replicated shard is listed once
    meshes: meshes of the layouts
    layouts: layouts of the other tensors by name
    """

    files: tuple[str, ...]
    shards: dict[str, tuple[ShardPosition, ...]]
    meshes: tuple[RankMesh, ...] = ()
    layouts: dict[str, ShardLayout] = {}

    def iterate_shards(
        self, name: str, whole: Sequence[int], *, part: Box | None = None
    ) -> Iterator[LocatedShard]:
        """Yields the shards of a tensor of shape `whole` that have elements of `part`, by default all."""
        part = ((0,) * len(whole), tuple(whole)) if part is None else part
        layout = self.layouts.get(name)
        if layout is not None:
            for rank, box in layout.iterate_shards(self.meshes[layout.mesh], whole, part=part):
                yield LocatedShard(data_file_name(rank), box, None)
            return
        for one in self.shards[name]:
            if all(
                max(a, b) < min(a + n, b + m) for a, n, b, m in zip(one.start, one.shape, *part, strict=True)
            ):
                yield LocatedShard(self.files[one.file], (one.start, one.shape), one.offset)

    def find_inconsistency(self, manifest: Manifest) -> str | None:
        """Returns why the shards are not what the manifest's tensors consist of, or None if they are."""
        if strange := set(self.files) - set(manifest.data_file_names):
            return f"{min(strange)} is not a data file of this checkpoint"
        if twice := self.shards.keys() & self.layouts.keys():
            return f"{min(twice)} has a layout, and is listed"
        if other := (self.shards.keys() | self.layouts.keys()) ^ manifest.tensors.keys():
            return f"{min(other)} is in the index or in the manifest, but not in both"
        for name, layout in self.layouts.items():
            if not layout.fits(manifest.tensors[name].shape, self.meshes):
                return f"the layout of {name} is not one of a tensor of its shape"
        sizes = [manifest.files[file].size_bytes for file in self.files]
        for name, shards in self.shards.items():
            shape = manifest.tensors[name].shape
            inside = all(
                len(one.start) == len(one.shape) == len(shape)
                and all(a + n <= whole for a, n, whole in zip(one.start, one.shape, shape, strict=True))
                and one.file < len(self.files)
                and one.offset < sizes[one.file]
                for one in shards
            )
            if not inside or sum(math.prod(one.shape) for one in shards) != math.prod(shape):
                return f"the shards of {name} are not what a tensor of shape {list(shape)} consists of"
        return None
