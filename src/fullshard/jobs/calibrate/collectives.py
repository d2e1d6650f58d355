"""Measures collectives over one mesh axis, as FSDP2 calls them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard.distributed.collectives import DirectAllGather, DirectReduceScatter, exchange_directly
from fullshard.jobs.calibrate.device import BenchmarkTask, RateMeter, mean_over_ranks
from fullshard.spec.machine.hardware import CollectiveRate, Link

_SIZES = {
    "cpu": tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24)),
    "cuda": tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28)),
}

Collective = Callable[[Tensor], object]


def measure_link(mesh: DeviceMesh, meter: RateMeter, *, name: str, seconds: float) -> Link:
    """Returns the link between the ranks of `mesh` (one axis). Collective.

    On CPU meshes these are fullshard's own collectives; on CUDA, NCCL's.
    """
    kinds = _build_collectives(mesh)
    part = seconds / len(kinds)
    rates = {kind: _measure_collective(work, mesh, meter=meter, seconds=part) for kind, work in kinds.items()}
    return Link(
        name=name,
        bytes_per_second=max(rate.bytes_per_second for rate in rates.values()),
        source=f"measured over {mesh.size()} ranks, {'gloo' if mesh.device_type == 'cpu' else 'NCCL'}",
        **rates,
    )


def _measure_collective(
    collective: Collective, mesh: DeviceMesh, *, meter: RateMeter, seconds: float
) -> CollectiveRate:
    """Returns the rate of a collective, by the bytes that a rank receives.

    A single number of ranks cannot separate the latency of a collective, the time of its smallest size, from
    that of its hops. All of it counts as hops, so that the time of more ranks is never underestimated.
    """
    ranks = mesh.size()

    def make_task(size: int) -> BenchmarkTask:
        whole = torch.ones(size // 4 // ranks * ranks, device=mesh.device_type)
        received = whole.numel() * 4 * (ranks - 1) / ranks
        return BenchmarkTask(lambda: collective(whole), size=received, amount=received)

    curve = meter.measure_rate_curve(make_task, _SIZES[meter.kind], seconds=seconds)
    return CollectiveRate(
        base_seconds=0.0,
        hop_seconds=curve[0].size / curve[0].rate / (ranks - 1),
        bytes_per_second=max(point.rate for point in curve),
        curve=curve,
        curve_ranks=ranks,
    )


def _build_collectives(mesh: DeviceMesh) -> dict[str, Collective]:
    """Returns the collectives of FSDP2 and of exchanges, each on a whole tensor with this rank's chunk."""
    group, own, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    gather, scatter = DirectAllGather(), DirectReduceScatter()
    # torch 2.13 renamed both, and deprecates the old names.
    functions = vars(dist)
    nccl_gather = functions.get("all_gather_single") or functions["all_gather_into_tensor"]
    nccl_scatter = functions.get("reduce_scatter_single") or functions["reduce_scatter_tensor"]
    cpu = mesh.device_type == "cpu"

    def own_chunk(whole: Tensor) -> Tensor:
        length = whole.numel() // ranks
        return whole.narrow(0, own * length, length)

    def all_gather(whole: Tensor) -> None:
        if cpu:
            gather(whole, own_chunk(whole), group, async_op=False)
        else:
            nccl_gather(whole, own_chunk(whole), group=group)

    def reduce_scatter(whole: Tensor) -> None:
        out = torch.empty(whole.numel() // ranks, device=whole.device)
        if cpu:
            scatter(out, whole, group, dist.ReduceOp.AVG, async_op=False)
        else:
            nccl_scatter(out, whole, op=dist.ReduceOp.AVG, group=group)

    def all_reduce(whole: Tensor) -> None:
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, group=group)

    def all_to_all(whole: Tensor) -> None:
        if cpu:
            exchange_directly(whole.view(ranks, -1), group)
        else:
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
        "all_to_all": all_to_all,
    }


def measure_matmul_slowdown(mesh: DeviceMesh, meter: RateMeter, *, seconds: float) -> float:
    """Returns the slowdown of a large matmul on CUDA while all-gathers run: 0.1 if it takes 10 % longer."""
    a = torch.randn(4096, 4096, device=mesh.device_type, dtype=torch.bfloat16)
    whole, side = torch.ones(2**24, device=mesh.device_type), torch.cuda.Stream()
    gather = _build_collectives(mesh)["all_gather"]
    alone = 1 / meter.measure_calls_per_second(lambda: torch.mm(a, a), seconds=seconds / 2)
    each = 1 / meter.measure_calls_per_second(lambda: gather(whole), seconds=seconds / 2)
    matmuls = max(1, round(4 * each / alone))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        for _ in range(12):  # longer than the matmuls, even if those are slowed down
            gather(whole)
    start.record()
    for _ in range(matmuls):
        torch.mm(a, a)
    end.record()
    torch.cuda.synchronize()
    beside = mean_over_ranks(start.elapsed_time(end) / 1000 / matmuls)
    return max(beside / alone - 1, 0.0)
