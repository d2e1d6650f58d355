"""Each rank knows which part of a tensor every rank has, without a message."""

from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.distributed.agreement import all_gather_object
from fullshard.distributed.owners import Wave, find_layouts
from fullshard.distributed.tensors import local_tensor, shard_offsets, zeros_sharded_like
from fullshard.spec.dealing import build_tensor_layout, deal_matrices
from fullshard.spec.shard_layout import RankMesh
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


def copies_of_owner(ranks: int) -> int:
    """Returns how many copies rank 0 makes of a matrix of 512 rows over `ranks` ranks, when it gathers it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    layout = build_tensor_layout((512, 4), ((0,), ()), mesh=RankMesh((ranks,), tuple(range(ranks))))
    wave = Wave(deal_matrices([layout], rank=0, cost=prod)[0])
    rows = torch.arange(2048.0)
    places = [place.clone() for _, _, place in wave._iterate_pieces(rows)]
    assert torch.equal(torch.cat(places).flatten(), rows)
    return len(places)


def test_an_owner_copies_rows_that_follow_each_other_at_once(ranks):
    assert ranks(1).run(copies_of_owner, 2) == ranks(1).run(copies_of_owner, 256) == [1]
