"""The gloo collectives give what the engine's own would, with no memory beside input and output."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from fullshard.distributed.collectives import DirectAllGather, DirectReduceScatter
from fullshard.observe.memory import measure_peak_memory

CHUNK = 50_000


def gathered(async_op: bool) -> tuple[list[float], int]:
    """The first number of each rank's chunk, and the bytes that the gather allocated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    comm = DirectAllGather()
    output = comm.allocate((CHUNK * ranks,), dtype=torch.float32, device=torch.device("cpu"))
    own = output.narrow(0, CHUNK * rank, CHUNK).fill_(rank + 1)
    with measure_peak_memory(torch.device("cpu")) as peak:
        work = comm(output, own, dist.group.WORLD, async_op)
        if work is not None:
            work.wait()
    chunks = output.view(ranks, CHUNK)
    assert all(chunk.eq(chunk[0]).all() for chunk in chunks), "a chunk came in part"
    return chunks[:, 0].tolist(), peak.bytes


def reduced(dtype: torch.dtype, *, mean: bool = False) -> tuple[list[float], int]:
    """The own chunk's first and last number, and the bytes that the reduction allocated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    comm = DirectReduceScatter()
    whole = torch.arange(ranks, dtype=dtype).repeat_interleave(CHUNK) + rank
    own = comm.allocate((CHUNK,), dtype=dtype, device=torch.device("cpu"))
    with measure_peak_memory(torch.device("cpu")) as peak:
        comm(own, whole, dist.group.WORLD, dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
    return [own[0].item(), own[-1].item()], peak.bytes


def reduced_beside_a_gather() -> tuple[list[float], list[float]]:
    """Results of a gather around a reduction, and of the reduction."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gather = DirectAllGather()
    output = torch.full((CHUNK * ranks,), -1.0)
    own = output.narrow(0, CHUNK * rank, CHUNK).fill_(rank + 1)
    sums = torch.empty(CHUNK)
    work = gather(output, own, dist.group.WORLD, True)
    DirectReduceScatter()(sums, torch.full((CHUNK * ranks,), 0.5), dist.group.WORLD, dist.ReduceOp.SUM)
    if work is not None:
        work.wait()
    return output.view(ranks, CHUNK).unique(dim=1).flatten().tolist(), sums.unique().tolist()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_rank_gets_every_chunk_in_place(ranks, n, async_op):
    assert ranks(n).run(gathered, async_op) == [([rank + 1.0 for rank in range(n)], 0)] * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3])
def test_every_rank_gets_the_sum_of_its_chunk(ranks, n, dtype):
    offset = sum(range(n))
    assert ranks(n).run(reduced, dtype) == [([float(n * r + offset)] * 2, 0) for r in range(n)]


@pytest.mark.parametrize("n", [2, 4])
def test_every_rank_gets_the_mean_of_its_chunk(ranks, n):
    found = ranks(n).run(partial(reduced, mean=True), torch.float32)
    assert [ends for ends, _ in found] == [[rank + (n - 1) / 2] * 2 for rank in range(n)]


def test_reduction_beside_a_gather_gets_its_chunks(ranks):
    assert ranks(3).run(reduced_beside_a_gather) == [([1.0, 2.0, 3.0], [1.5])] * 3
