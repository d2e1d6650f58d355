"""Buffers that the ranks of one host share are summed as by an all-reduce, or there are none on any rank."""

import resource

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.distributed.host_memory import HostBuffers, all_reduce_on_host

SIZES = (1, 7, 1000)


def sums(rounds: int) -> list[tuple[Tensor, Tensor]]:
    """Returns (sum in shared memory, sum by gloo) of each buffer in each round."""
    group = dist.distributed_c10d._get_default_group()
    buffers = [HostBuffers.allocate(size, dtype=torch.float32, group=group) for size in SIZES]
    found = [one for one in buffers if one is not None]
    assert len(found) == len(SIZES)
    results, generator = list[tuple[Tensor, Tensor]](), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(rounds):
        for one in found:
            one.own.normal_(generator=generator)
        expected = [one.own.clone() for one in found]
        dist.barrier()
        all_reduce_on_host(found, group=group)
        for one, value in zip(found, expected, strict=True):
            dist.all_reduce(value)
            results.append((one.own.clone(), value))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sums_are_those_of_an_all_reduce_and_the_same_on_all_ranks(world_size, ranks):
    found = ranks(world_size).run(sums, 3)
    for own in found:
        for (result, expected), (first, _) in zip(own, found[0], strict=True):
            assert torch.equal(result, first)
            torch.testing.assert_close(result, expected)


def allocated_where_rank_1_can_open_no_file() -> bool:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        group = dist.distributed_c10d._get_default_group()
        return HostBuffers.allocate(8, dtype=torch.float32, group=group) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_no_rank_gets_buffers_where_one_cannot_share_memory(ranks):
    assert ranks(2).run(allocated_where_rank_1_can_open_no_file) == [False, False]
