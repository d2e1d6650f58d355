"""Which part of a DTensor each rank of its mesh has.

[Note: nested cuts] If several axes of a mesh cut one dim, each cuts what the one before left, as
`torch.chunk` does: the last parts may be shorter or empty. FSDP2 cuts last, over the outer axis
(`_StridedShard`). Torch's `compute_local_shape_and_global_offset`, and all that calls it (`zeros`, `ones`),
cuts over the outer axis first. So it states other rows than FSDP2's if the inner axis leaves parts of
different sizes: 7 rows over 3 x 2 ranks.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from fullshard.errors import ShardError

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(position of the first element, shape) of a part of a tensor, per dim."""
Cuts = tuple[tuple[int, ...], ...]
"""Per dim, the mesh axes that cut it, in this order."""


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
                raise ShardError("the shards of a tensor are not boxes.", got=f"{tuple(placements)}")
            cut.append(axis)
    return tuple(map(tuple, cuts))


def cut_box(whole: Sequence[int], cuts: Cuts, *, sizes: Sequence[int], coordinate: Sequence[int]) -> Box:
    """Returns the part of a tensor of shape `whole` that the rank at `coordinate` of a mesh has.

    sizes: of the axes of the mesh
    """
    start, shape = list[int](), list[int]()
    for length, cut in zip(whole, cuts, strict=True):
        begin = 0
        for axis in cut:
            each = -(-length // sizes[axis])
            skipped = min(each * coordinate[axis], length)
            begin, length = begin + skipped, min(each, length - skipped)
        start.append(begin)
        shape.append(length)
    return tuple(start), tuple(shape)


def own_box(whole: Sequence[int], mesh: DeviceMesh, *, placements: Sequence[Placement]) -> Box:
    """Returns the part of a tensor of shape `whole` that this rank has. It is empty outside of the mesh."""
    cuts, coordinate = cuts_of_placements(placements, mesh.shape, dims=len(whole)), mesh.get_coordinate()
    if coordinate is None:
        return (0,) * len(whole), (0,) * len(whole)
    return cut_box(whole, cuts, sizes=mesh.shape, coordinate=coordinate)
