"""The index of a checkpoint, `shards.json`: which data file has which shard of which tensor.

[Note: an index by layout] One rule cuts a DTensor, so its entry is its layout: the mesh, the axes that cut
each dim, and which of several copies is saved. This says where each shard is, whatever the number of ranks.
Where a shard begins in its data file is in the file's table (`shard_file`), which a reader of the shard reads
anyway. Other shards are listed one by one: plain tensors, tensors of a single rank, DTensors that the rule
does not cut, and all shards in indexes of format 2.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

from pydantic import NonNegativeInt

from fullshard.checkpoint.manifest import Manifest, SavedTensor
from fullshard.spec.shard_layout import Box, RankMesh, ShardLayout, cut_box
from fullshard.spec.value import FrozenModel


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
        part = Box((0,) * len(whole), tuple(whole)) if part is None else part
        layout = self.layouts.get(name)
        if layout is not None:
            for rank, box in layout.iterate_shards(self.meshes[layout.mesh], whole, part=part):
                yield LocatedShard(data_file_name(rank), box, None)
            return
        for one in self.shards[name]:
            if all(
                max(a, b) < min(a + n, b + m) for a, n, b, m in zip(one.start, one.shape, *part, strict=True)
            ):
                yield LocatedShard(self.files[one.file], Box(one.start, one.shape), one.offset)

    def iterate_shards_in_file(
        self, file: str, tensors: Mapping[str, SavedTensor]
    ) -> Iterator[tuple[str, LocatedShard]]:
        """Yields (name of the tensor, shard) of each shard of the manifest's `tensors` in a data file."""
        yield from self._listed_by_file.get(file, ())
        for name, layout in self.layouts.items():
            coordinate = self._coordinates[layout.mesh].get(file)
            if coordinate is not None:
                whole, sizes = tensors[name].shape, self.meshes[layout.mesh].shape
                part = cut_box(whole, layout.cuts, sizes=sizes, coordinate=coordinate)
                found = self.iterate_shards(name, whole, part=part)  # of one of the ranks that have it
                yield from ((name, one) for one in found if one.file == file)

    @cached_property
    def _listed_by_file(self) -> Mapping[str, Sequence[tuple[str, LocatedShard]]]:
        """Name of the tensor and shard of the listed shards with elements, by data file."""
        found = defaultdict[str, list[tuple[str, LocatedShard]]](list)
        for name, shards in self.shards.items():
            for position, offset, start, shape in shards:
                if 0 not in shape:
                    one = LocatedShard(self.files[position], Box(start, shape), offset)
                    found[one.file].append((name, one))
        return found

    @cached_property
    def _coordinates(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Per mesh, the coordinate of the rank of each data file."""
        return [
            dict(zip(map(data_file_name, mesh.ranks), product(*map(range, mesh.shape)), strict=False))
            for mesh in self.meshes
        ]

    def find_inconsistency(self, manifest: Manifest) -> str | None:
        """Returns why the shards are not what the manifest's tensors consist of, or None if they are."""
        if strange := set(self.files) - set(manifest.data_file_names):
            return f"{min(strange)} is not a data file of this checkpoint"
        if twice := self.shards.keys() & self.layouts.keys():
            return f"{min(twice)} has a layout, and is listed"
        if other := (self.shards.keys() | self.layouts.keys()) ^ manifest.tensors.keys():
            return f"{min(other)} is in the index or in the manifest, but not in both"
        known = all(rank < manifest.world_size for mesh in self.meshes for rank in mesh.ranks)
        for name, layout in self.layouts.items():
            if not known or not layout.fits(manifest.tensors[name].shape, self.meshes):
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
