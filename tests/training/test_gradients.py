"""The ranks' shares of the squared norm add up to that of whole gradients, and are about equal work."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard.training.gradients import (
    local_gradient_norms,
    local_share_of_squared_norm,
    tensors_counted_here,
)

SIZES = (7, 3, 1, 8, 2, 5, 4, 6)


def counted_and_norms() -> tuple[int, float, float]:
    """Returns the number of elements that this rank counts, the sum of all shares, and what it should be."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    placements = ((Replicate(), Replicate()), (Replicate(), Shard(0)), (Shard(0), Replicate()))
    wholes = [torch.randn(4, size) for size in SIZES for _ in placements] + [torch.randn(())]
    gradients = [
        distribute_tensor(whole, mesh, placements[number % len(placements)])
        for number, whole in enumerate(wholes[:-1])
    ]
    counted = tensors_counted_here([*gradients, wholes[-1]])
    share = torch.as_tensor(local_share_of_squared_norm(local_gradient_norms(counted)), dtype=torch.float64)
    dist.all_reduce(share)
    expected = sum(whole.double().square().sum().item() for whole in wholes)
    return sum(tensor.numel() for tensor in counted), share.item(), expected


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_part_of_a_gradient_is_counted_by_one_of_the_ranks_that_have_it(world_size, ranks):
    found = ranks(world_size).run(counted_and_norms)
    for _, norm, expected in found:
        assert norm == pytest.approx(expected, rel=1e-6)
    counts = [count for count, *_ in found]
    assert max(counts) - min(counts) <= 2 * 3 * 4 * max(SIZES)  # a largest tensor more or less, of each kind
