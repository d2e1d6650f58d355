"""Which part of a DTensor each rank of its mesh has: see [Note: nested cuts] in `spec.shard_layout`."""

import math
from collections.abc import Sequence
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.errors import ShardError
from fullshard.spec.shard_layout import Box, Cuts, RankMesh, ShardLayout, cut_box, uncut_axes


def cuts_of_placements(placements: Sequence[Placement], sizes: Sequence[int], *, dims: int) -> Cuts:
    """Returns the cuts of a tensor with this many dims, over mesh axes of these sizes.

    Raises ShardError for shards that are not boxes.
    """
    cuts: list[list[int]] = [[] for _ in range(dims)]
    strides = {axis: getattr(one, "split_factor", 1) for axis, one in enumerate(placements)}
    for axis in sorted(strides, key=lambda one: strides[one] > 1):
        if not placements[axis].is_replicate():
            cut = cuts[cast(Any, placements[axis]).dim]
            if strides[axis] not in (1, math.prod(sizes[one] for one in cut)):
                raise ShardError(
                    "the shards of a tensor are not boxes.",
                    got=f"{tuple(placements)} on a mesh of {tuple(sizes)}",
                    why="a rank's part of a tensor must be one box",
                    fix="the placements of FSDP2 over axes that divide the tensor first",
                )
            cut.append(axis)
    return tuple(map(tuple, cuts))


def own_box(whole: Sequence[int], mesh: DeviceMesh, *, placements: Sequence[Placement]) -> Box:
    """Returns the part of a tensor of shape `whole` that this rank has. It is empty outside of the mesh."""
    cuts, coordinate = cuts_of_placements(placements, mesh.shape, dims=len(whole)), mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * len(whole), (0,) * len(whole))
    return cut_box(whole, cuts, sizes=mesh.shape, coordinate=coordinate)


class ShardPlacer:
    """Finds this rank's boxes of DTensors.

    meshes: the meshes of the layouts, in order
    """

    def __init__(self, meshes: Sequence[RankMesh] = ()) -> None:
        self.meshes = list(meshes)
        self._numbers: dict[DeviceMesh, int] = {}

    def place(self, tensor: DTensor) -> tuple[ShardLayout, Box] | None:
        """Returns the layout, with the copy that this rank has, and the box of its shard.

        Returns None if this rank is not in the mesh. Raises ShardError for shards that are not boxes.
        """
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if coordinate is None:
            return None
        if mesh not in self._numbers:
            own = RankMesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
            if own not in self.meshes:
                self.meshes.append(own)
            self._numbers[mesh] = self.meshes.index(own)
        cuts, copy = cuts_of_placements(tensor.placements, mesh.shape, dims=tensor.ndim), 0
        for axis in uncut_axes(cuts, mesh=self.meshes[self._numbers[mesh]]):
            copy = copy * mesh.shape[axis] + coordinate[axis]
        box = cut_box(tensor.shape, cuts, sizes=mesh.shape, coordinate=coordinate)
        return ShardLayout(self._numbers[mesh], cuts, copy), box
