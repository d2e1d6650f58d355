"""The work of each rank of `fullshard calibrate`: measures this machine or cluster with all ranks."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullshard.distributed.collectives import DirectAllGather, DirectReduceScatter, all_to_all_parts_pairwise
from fullshard.jobs.calibrate import device as meters
from fullshard.jobs.calibrate.device import BenchmarkTask, RateMeter, mean_over_ranks
from fullshard.jobs.calibrate.whole_step import fit_rates_to_step, measure_step_seconds
from fullshard.launch.detect import catalog_hardware_of_machine, detect_gpus
from fullshard.observe.clock import measure_matmul_peak
from fullshard.parallel.mesh import RankInfo, build_mesh_of_axes, process_group
from fullshard.spec.machine import hardware
from fullshard.spec.machine.catalog import find_catalog_entry_of_chip, round_to_four_digits
from fullshard.spec.run import Run

_LEAST_CORE_SHARE = 0.97  # of ranks on an idle machine, 0.99; with a busy program for each core, 0.89 to 0.95
# Share of the time that each measurement gets.
_MATMUL, _ATTENTION, _MEMORY, _OPTIMIZER, _LAUNCH, _COPIES, _LINKS = 12, 10, 6, 5, 3, 3, 15
_UNALIGNED, _HOST_ADAM = 2, 4
_STEP_SHARE = 0.6  # fraction of the time for whole steps, on CPU ranks
_SIZES = {
    "cpu": tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24)),
    "cuda": tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28)),
}

Collective = Callable[[Tensor], object]


def run_calibration(
    run: Run, *, seconds: float, out: str, drive: str | None = None, **_: object
) -> None:  # signature: a job's, see `LaunchRequest`
    """Runs this rank's part of `fullshard calibrate`. Rank 0 writes the hardware.toml `out`.

    seconds: approximate measuring time, excluding the start of the ranks
    drive: a directory on the drive to measure, a path that is valid on every rank; None for no drive
    """
    with process_group(run.run.device) as ranks:
        on_cpu = ranks.device.type == "cpu"
        operation_seconds = seconds * (1 - _STEP_SHARE) if on_cpu else seconds
        found = measure_hardware(
            ranks, seconds=operation_seconds, drive=None if drive is None else Path(drive)
        )
        step_seconds = measure_step_seconds(seconds=seconds - operation_seconds) if on_cpu else None
        if ranks.rank == 0:
            (found if step_seconds is None else fit_rates_to_step(found, step_seconds)).save(out)


def measure_hardware(ranks: RankInfo, *, seconds: float, drive: Path | None) -> hardware.Hardware:
    """Measures this hardware with all ranks. Collective.

    seconds: approximate duration
    drive: a directory on the drive to measure; None to measure no drive
    """
    compute = _MATMUL + _UNALIGNED + _ATTENTION + _MEMORY + _OPTIMIZER + _LAUNCH
    seconds_per_share = seconds / (compute + _COPIES + _LINKS + _HOST_ADAM)
    meter = RateMeter(ranks.device)
    gpus = detect_gpus(meter.kind)
    known = catalog_hardware_of_machine(gpus, ranks=ranks.world_size, ranks_per_node=ranks.local_world_size)
    at_start = meters.measure_bytes_outside_allocator(ranks.device)
    rates = _measure_rates(meter, known.rates, seconds_per_share=seconds_per_share)
    core_share = meters.mean_over_ranks(meter.core_share)  # before collectives, in which ranks wait
    is_gpu = meter.kind == "cuda"  # its kernels are loaded by now; a host's bytes include memory freed since
    now = meters.measure_bytes_outside_allocator(ranks.device) if is_gpu else at_start
    own_bytes = meters.max_over_ranks(now)
    updated: dict[str, object] = {
        "rates": rates,
        "context_bytes": int(own_bytes),
        "host_bytes_per_second": meters.measure_round_trip_copy_rate(
            meter, seconds=_COPIES * seconds_per_share
        ),
        "disk_bytes_per_second": None
        if drive is None
        else meters.read_plus_write_bandwidth(drive, pieces=max(1, min(16, round(seconds / 2)))),
        "adam_per_second": meters.host_adamw_params_per_second(seconds=_HOST_ADAM * seconds_per_share),
        "is_calibrated": True,
        "is_busy": not is_gpu and core_share < _LEAST_CORE_SHARE,
        "source": f"fullshard calibrate, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
        **_measure_links(ranks, meter, seconds_per_share=seconds_per_share),
    }
    if ranks.device.type == "cuda" and ranks.local_world_size > 1:
        mesh = _build_mesh(meter, sizes=(("all", ranks.world_size),))
        updated["contention"] = measure_matmul_slowdown_by_all_gathers(
            mesh, meter, seconds=_COPIES * seconds_per_share
        )
    if is_gpu:  # each measured link has a group, whose communicator has sent all-to-alls
        grown = meters.max_over_ranks(meters.measure_bytes_outside_allocator(ranks.device)) - own_bytes
        groups = sum(link in updated for link in ("within", "across"))
        updated |= {"communicator_bytes": int(max(0, grown) / max(1, groups)), "peer_bytes": 0}
    if find_catalog_entry_of_chip(known.chip) is None:  # not in the catalog, so its peak is unknown
        best: dict[hardware.ComputeDtype, float]
        best = {dtype: max(point.rate for point in curve) for dtype, curve in rates.matmul.items()}
        if not is_gpu:
            for dtype in best:  # of the fastest call: the curves are slower beside other programs
                peak = measure_matmul_peak(ranks.device, meters.TORCH_DTYPES[dtype])
                best[dtype] = round_to_four_digits(peak)
        peak = max(point.rate for point in rates.memory)
        measured = {"flops_per_second": best, "memory_bytes_per_second": peak, "source": "measured"}
        updated["chip"] = known.chip.model_copy(update=measured)
    return hardware.Hardware.model_validate(known.model_copy(update=updated).model_dump())


def _measure_rates(meter: RateMeter, known: hardware.Rates, *, seconds_per_share: float) -> hardware.Rates:
    """Measures rates. Keeps those of `known` for grouped matmuls, by width of heads, and of FSDP2's hooks."""
    dtypes = meters.matmul_dtypes_to_measure(meter.device)
    matmul: dict[hardware.ComputeDtype, hardware.Curve] = {}
    forward: dict[hardware.ComputeDtype, hardware.Curve] = {}
    backward: dict[hardware.ComputeDtype, hardware.Curve] = {}
    for dtype in dtypes:
        part = seconds_per_share / len(dtypes)
        matmul[dtype] = meters.measure_matmul(meter, dtype, seconds=_MATMUL * part)
        forward[dtype], backward[dtype] = meters.measure_attention(meter, dtype, seconds=_ATTENTION * part)
    memory, half_memory = meters.measure_elementwise_bandwidth(meter, seconds=_MEMORY * seconds_per_share)
    measured: dict[str, object] = {
        "matmul": matmul,
        "single_rank_matmul": 1.0,
        "attention": forward,
        "attention_backward": backward,
        "memory": memory,
        "half_memory": half_memory,
        "optimizer": meters.measure_adamw_bandwidth(meter, seconds=_OPTIMIZER * seconds_per_share),
        "launch_seconds": meters.measure_seconds_per_operation(meter, seconds=_LAUNCH * seconds_per_share),
        "unaligned_matmul": meters.measure_unaligned_matmul_rate_fraction(
            meter, dtypes[-1], seconds=_UNALIGNED * seconds_per_share
        ),
    }
    preferred, part = (forward[dtypes[-1]], backward[dtypes[-1]]), _ATTENTION * seconds_per_share / 10
    measured |= meters.measure_flash_factors(meter, known, preferred=preferred, seconds=part)
    return known.model_copy(update=measured)


def _measure_links(
    ranks: RankInfo, meter: RateMeter, *, seconds_per_share: float
) -> dict[str, hardware.Link]:
    """Measures collectives within a node and across nodes; returns the links, by the field of Hardware."""
    local = ranks.local_world_size
    nodes = ranks.world_size // local
    mesh = _build_mesh(meter, sizes=(("across", nodes), ("within", local)))
    axes = [axis for axis, size in (("within", local), ("across", nodes)) if size > 1]
    part = _LINKS * seconds_per_share / len(axes) if axes else 0.0
    return {axis: measure_link(mesh[axis], meter, name=axis, seconds=part) for axis in axes}


def _build_mesh(meter: RateMeter, *, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    assert dist.group.WORLD is not None, "process_group is open"
    return build_mesh_of_axes(dist.group.WORLD, device=meter.kind, sizes=sizes)


def measure_link(mesh: DeviceMesh, meter: RateMeter, *, name: str, seconds: float) -> hardware.Link:
    """Returns the link between the ranks of `mesh` (one axis). Collective.

    On CPU meshes these are fullshard's own collectives; on CUDA, NCCL's.
    """
    kinds = _build_collectives(mesh)
    part = seconds / len(kinds)
    rates = {kind: _measure_collective(work, mesh, meter=meter, seconds=part) for kind, work in kinds.items()}
    return hardware.Link(
        name=name,
        bytes_per_second=max(rate.bytes_per_second for rate in rates.values()),
        source=f"measured over {mesh.size()} ranks, {'gloo' if mesh.device_type == 'cpu' else 'NCCL'}",
        **rates,
    )


def _measure_collective(
    collective: Collective, mesh: DeviceMesh, *, meter: RateMeter, seconds: float
) -> hardware.CollectiveRate:
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
    return hardware.CollectiveRate(
        base_seconds=0.0,
        hop_seconds=curve[0].size / curve[0].rate / (ranks - 1),
        bytes_per_second=max(point.rate for point in curve),
        curve=curve,
        curve_ranks=ranks,
    )


def _build_collectives(mesh: DeviceMesh) -> dict[str, Collective]:
    """Returns the collectives of FSDP2 and of exchanges, each on a whole tensor with this rank's chunk."""
    group, own, ranks, mean = mesh.get_group(), mesh.get_local_rank(), mesh.size(), dist.ReduceOp.AVG

    def parts(whole: Tensor) -> Sequence[Tensor]:
        return whole.chunk(ranks)

    if mesh.device_type == "cpu":
        gather, scatter, exchange = DirectAllGather(), DirectReduceScatter(), all_to_all_parts_pairwise
        return {
            "all_gather": lambda x: gather(x, parts(x)[own], group, async_op=False),
            "reduce_scatter": lambda x: scatter(
                torch.empty_like(parts(x)[own]), x, group, mean, async_op=False
            ),
            "all_reduce": lambda x: dist.all_reduce(x, op=mean, group=group),
            "all_to_all": lambda x: exchange(parts(x), parts(torch.empty_like(x)), group=group),
        }
    # torch 2.13 renamed both, and deprecates the old names.
    functions = vars(dist)
    nccl_gather = functions.get("all_gather_single") or functions["all_gather_into_tensor"]
    nccl_scatter = functions.get("reduce_scatter_single") or functions["reduce_scatter_tensor"]
    return {
        "all_gather": lambda x: nccl_gather(x, parts(x)[own], group=group),
        "reduce_scatter": lambda x: nccl_scatter(torch.empty_like(parts(x)[own]), x, op=mean, group=group),
        "all_reduce": lambda x: dist.all_reduce(x, op=mean, group=group),
        "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x, group=group),
    }


def measure_matmul_slowdown_by_all_gathers(mesh: DeviceMesh, meter: RateMeter, *, seconds: float) -> float:
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
