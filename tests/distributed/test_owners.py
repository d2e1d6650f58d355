"""Each rank knows which part of a tensor every rank has, without a message."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.owners import find_layouts
from fullshard.distributed.tensors import local_tensor, shard_offsets, zeros_sharded_like
from tests.checkpoint.states import sharded


def every_kind_of_shards() -> list[DTensor]:
    """Tensors that two axes copy and cut, cut in two dims, or cut in one dim one after the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    linear = nn.Linear(5, 7)
    for name, dim in (("weight", 0), ("bias", 0)):
        own = distribute_tensor(getattr(linear, name).detach(), mesh["tensor"], [Shard(dim)])
        setattr(linear, name, nn.Parameter(own))
    fully_shard(linear, mesh=mesh["shard"])
    cut = [*linear.parameters(), distribute_tensor(torch.ones(3, 4, 5), mesh, [Shard(0), Shard(2)])]
    cut += [zeros_sharded_like(cut[0], shape, dtype=torch.float32) for shape in ((7, 1), (1, 5))]
    cut += [one for one in sharded(0, (2, 2)).values() if isinstance(one, DTensor)]
    return [one for one in cut if isinstance(one, DTensor)]


def compared_with_what_ranks_hold() -> tuple[int, list[str]]:
    tensors = every_kind_of_shards()
    parts = all_gather_object([(shard_offsets(one), tuple(local_tensor(one).shape)) for one in tensors])
    wrong = list[str]()
    for number, (tensor, layout) in enumerate(zip(tensors, find_layouts(tensors), strict=True)):
        held = {rank: of_rank[number] for rank, of_rank in enumerate(parts)}
        if any(
            box != held[rank] for rank, box in layout.boxes.items() if box.numel or 0 not in held[rank][1]
        ):
            wrong.append(f"{tensor.placements}: {layout.boxes} for {held}")
        wholes = [sum(layout.boxes[rank].numel for rank in members) for members in layout.replicas]
        if {*wholes} != {tensor.numel()} or sorted(sum(layout.replicas, ())) != [0, 1, 2, 3]:
            wrong.append(f"{tensor.placements}: {layout.replicas}")
    return len(tensors), wrong


def test_layouts_are_what_the_ranks_hold(ranks):
    assert ranks(4).run(compared_with_what_ranks_hold) == [(9, [])] * 4
