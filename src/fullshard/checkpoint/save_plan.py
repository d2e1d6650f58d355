"""Which rank writes which shard, without a message per rank and tensor.

[Note: rank 0's plan] Rank 0 sends one entry per tensor, and each rank takes its own shards from that. Of
ranks that have equal shards, one writes, so that all ranks write about as many bytes. Tensors that rank 0
does not have, and plain ones, are listed by the rank that writes them.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.distributed.agreement import rank
from fullshard.distributed.shard_boxes import ShardPlacer
from fullshard.distributed.tensors import detached_local_tensor
from fullshard.errors import CheckpointError
from fullshard.spec.shard_layout import Box, RankMesh, ShardLayout


class OwnShard(NamedTuple):
    """A shard that this rank writes, at `start` of the tensor `name`.

    saved: the whole tensor
    is_listed: whether the index lists the shard, because its tensor has no layout
    """

    name: str
    saved: SavedTensor
    start: tuple[int, ...]
    shard: Tensor
    is_listed: bool


@dataclass(frozen=True)
class SavePlan:
    """Rank 0's tensors, and how their shards are saved. Equal on all ranks.

    tensors: its DTensors, by name
    layouts, meshes: as in ShardIndex
    plain: names of its other tensors. Ranks may have other running means, so all of these are rank 0's
    """

    tensors: Mapping[str, SavedTensor]
    layouts: Mapping[str, ShardLayout]
    meshes: tuple[RankMesh, ...]
    plain: frozenset[str]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "SavePlan":
        """Makes the plan for `tensors`. Called on rank 0."""
        placer, layouts = ShardPlacer(), dict[str, ShardLayout]()
        loads: dict[int, list[tuple[int, int]]] = {}  # number of copies: a heap of (bytes so far, copy)
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor) and (placed := placer.place(tensor)) is not None:
                layout, (_, shape) = placed
                copies = layout.count_copies(placer.meshes[layout.mesh])
                heap = loads.setdefault(copies, [(0, copy) for copy in range(copies)])
                load, copy = heap[0]
                heapq.heapreplace(heap, (load + math.prod(shape) * tensor.dtype.itemsize + 1, copy))
                layouts[name] = layout._replace(copy=copy)
        saved = {name: SavedTensor.from_tensor(tensors[name]) for name in layouts}
        plain = frozenset(name for name, tensor in tensors.items() if not isinstance(tensor, DTensor))
        return cls(saved, layouts, tuple(placer.meshes), plain)

    @cached_property
    def shard_count(self) -> int:
        """Number of shards, without those that are listed."""
        kinds = Counter((one._replace(copy=0), self.tensors[n].shape) for n, one in self.layouts.items())
        return sum(
            count * layout.count_shards(self.meshes[layout.mesh], shape)
            for (layout, shape), count in kinds.items()
        )

    def list_own_shards(self, tensors: Mapping[str, Tensor]) -> list[OwnShard]:
        """Returns the shards that this rank writes: first those of layouts, in the order of the plan.

        Raises CheckpointError if this rank lacks a tensor of the plan, or has another one of its name.
        """
        found, placer, own = list[OwnShard](), ShardPlacer(self.meshes), rank()
        members = [frozenset(mesh.ranks) for mesh in self.meshes]
        for name, layout in self.layouts.items():
            if own not in members[layout.mesh]:
                continue  # an equal tensor, on another mesh, is a copy
            tensor = tensors.get(name)
            saved = None if tensor is None else SavedTensor.from_tensor(tensor)
            placed = placer.place(tensor) if isinstance(tensor, DTensor) else None
            if tensor is None or saved != self.tensors[name] or placed is None or placed[0][:2] != layout[:2]:
                raise CheckpointError(
                    "the ranks do not hold the same tensors.",
                    got=f"on rank {own}, {name} is not {self.tensors[name]}, placed as on rank 0",
                    why="a tensor of which each rank has its own carries the rank in its name",
                )
            shard = _own_shard(name, tensor, box=placed[1], is_listed=False)
            if placed[0].copy == layout.copy and shard.shard.numel():
                found.append(shard)
        for name, tensor in tensors.items():
            if name in self.layouts:
                continue
            if not isinstance(tensor, DTensor):
                if own == 0 or name not in self.plain:
                    box = Box((0,) * tensor.ndim, tuple(tensor.shape))
                    found.append(_own_shard(name, tensor, box=box, is_listed=True))
            elif (placed := placer.place(tensor)) is not None and placed[0].copy == 0:
                found.append(_own_shard(name, tensor, box=placed[1], is_listed=True))
        return found


def _own_shard(name: str, tensor: Tensor, *, box: Box, is_listed: bool) -> OwnShard:
    shard = detached_local_tensor(tensor)
    if tuple(shard.shape) != box[1]:
        raise CheckpointError(
            f"the tensor {name!r} cannot be saved.",
            got=f"a shard of shape {list(shard.shape)}, where its placements say {list(box[1])}",
        )
    return OwnShard(name, SavedTensor.from_tensor(tensor), box[0], shard, is_listed)
