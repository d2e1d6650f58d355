"""Measures collectives over one mesh axis, as FSDP2 calls them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard.distributed.collectives import DirectAllGather, DirectReduceScatter, exchange_directly
from fullshard.jobs.calibrate.device import maximum_over_ranks, mean_over_ranks
from fullshard.spec.machine.hardware import CollectiveRate, Link, RatePoint

_SIZES = {
    "cpu": tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24)),
    "cuda": tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28)),
}
_WINDOWS, _LEAST_WINDOWS, _MOST_CALLS = 24, 2, 2000
_LEAST_SIZES = 5

Collective = Callable[[Tensor], object]


def measure_link(mesh: DeviceMesh, *, name: str, seconds: float) -> tuple[Link, dict[str, float]]:
    """Returns the link between the ranks of `mesh` (one axis), and the relative error of each fitted rate.

    On CPU meshes these are fullshard's own collectives; on CUDA, NCCL's.
    """
    kinds = _build_collectives(mesh)
    fits: dict[str, tuple[CollectiveRate, float]] = {}
    for kind, collective in kinds.items():
        samples: list[CollectiveSample] = []
        for size in _SIZES[mesh.device_type]:
            whole = torch.ones(size // 4 // mesh.size() * mesh.size(), device=mesh.device_type)
            window = seconds / len(kinds) / len(_SIZES[mesh.device_type])
            took = time_call_on_all_ranks(lambda c=collective, t=whole: c(t), mesh=mesh, seconds=window)
            samples.append(CollectiveSample(whole.numel() * 4, took))
            if len(samples) >= _LEAST_SIZES and _WINDOWS * took > window:
                break  # the next size, four times as large, would far exceed its share
        fits[kind] = fit_collective_rate(samples, ranks=mesh.size())
    link = Link(
        name=name,
        bytes_per_second=max(rate.bytes_per_second for rate, _ in fits.values()),
        all_gather=fits["all_gather"][0],
        reduce_scatter=fits["reduce_scatter"][0],
        all_reduce=fits["all_reduce"][0],
        all_to_all=fits["all_to_all"][0],
        source=f"measured over {mesh.size()} ranks, {'gloo' if mesh.device_type == 'cpu' else 'NCCL'}",
    )
    return link, {kind: error for kind, (_, error) in fits.items()}


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


def time_call_on_all_ranks(work: Callable[[], object], *, mesh: DeviceMesh, seconds: float) -> float:
    """Returns the seconds of one call of `work`, measured in about `seconds`. Collective.

    This is the fastest window of calls, until the last rank has finished: slower windows contain other load
    on the machine. Every rank makes as many calls as the slowest has time for; otherwise some would wait for
    calls that never come.
    """
    work()
    fit = int(seconds / max(_mean_seconds_of_calls(work, 2, mesh=mesh), 1e-9))
    windows, calls = max(min(fit, _WINDOWS), _LEAST_WINDOWS), max(min(fit // _WINDOWS, _MOST_CALLS), 1)
    return min(_mean_seconds_of_calls(work, calls, mesh=mesh) for _ in range(windows))


def _mean_seconds_of_calls(work: Callable[[], object], calls: int, *, mesh: DeviceMesh) -> float:
    """Returns the seconds per call on the slowest rank. Collective."""
    mean_over_ranks(0.0)  # all ranks begin together
    started = time.perf_counter()
    for _ in range(calls):
        work()
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()
    mean_over_ranks(0.0)  # the first rank to start waits here for the last to finish
    return maximum_over_ranks((time.perf_counter() - started) / calls)


def measure_matmul_slowdown(mesh: DeviceMesh, *, seconds: float) -> float:
    """Returns the slowdown of a large matmul on CUDA while all-gathers run: 0.1 if it takes 10 % longer."""
    a = torch.randn(4096, 4096, device=mesh.device_type, dtype=torch.bfloat16)
    whole, side = torch.ones(2**24, device=mesh.device_type), torch.cuda.Stream()
    gather = _build_collectives(mesh)["all_gather"]
    alone = time_call_on_all_ranks(lambda: torch.mm(a, a), mesh=mesh, seconds=seconds / 2)
    each = time_call_on_all_ranks(lambda: gather(whole), mesh=mesh, seconds=seconds / 2)
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


class CollectiveSample(NamedTuple):
    """One measured collective."""

    whole_bytes: int  # of the unsharded tensor
    seconds: float  # of one call


def fit_collective_rate(samples: Sequence[CollectiveSample], *, ranks: int) -> tuple[CollectiveRate, float]:
    """Returns the rate of a collective, and the largest relative error of its linear fit on `samples`.

    A sample took t seconds for B bytes over n ranks, each of which received x = B (n - 1) / n bytes. The fit
    has latency a and rate 1 / b, by least squares on the relative error:

        minimise  sum ((a + b x) / t - 1)^2,   a >= 0, b > 0

    A single number of ranks cannot separate the latency of a collective from that of its hops. All of it
    counts as hops, so that the time of more ranks is never underestimated. The curve contains the samples
    themselves. A sample slower than a larger one gets the time of the larger one: other load only adds time.
    """
    assert samples, "nothing was measured"
    assert ranks > 1, "one rank has no collective"
    ordered = sorted(samples)
    xs = [sample.whole_bytes * (ranks - 1) / ranks for sample in ordered]
    ts = [min(sample.seconds for sample in ordered[i:]) for i in range(len(ordered))]
    latency, per_byte = _fit_weighted_line(xs, ts)
    error = max(abs((latency + per_byte * x) / t - 1) for x, t in zip(xs, ts, strict=True))
    rate = CollectiveRate(
        base_seconds=0.0,
        hop_seconds=latency / (ranks - 1),
        bytes_per_second=1 / max(per_byte, 1e-15),
        curve=tuple(RatePoint(x, float(f"{x / t:.4g}")) for x, t in zip(xs, ts, strict=True)),
        curve_ranks=ranks,
    )
    return rate, error


def _fit_weighted_line(xs: Sequence[float], ts: Sequence[float]) -> tuple[float, float]:
    """Returns (a, b) of a + b x, fitted with weights 1 / t^2."""
    weights = [1 / t**2 for t in ts]
    s, sx = sum(weights), sum(w * x for w, x in zip(weights, xs, strict=True))
    sxx = sum(w * x * x for w, x in zip(weights, xs, strict=True))
    st = sum(w * t for w, t in zip(weights, ts, strict=True))
    sxt = sum(w * x * t for w, x, t in zip(weights, xs, ts, strict=True))
    determinant = s * sxx - sx * sx
    if determinant > 0:
        a, b = (sxx * st - sx * sxt) / determinant, (s * sxt - sx * st) / determinant
        if a >= 0 and b > 0:
            return a, b
        if b <= 0:
            return st / s, 0.0
    return 0.0, sxt / sxx
