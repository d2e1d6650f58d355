"""The work of each rank of `fullshard calibrate`: measures this machine or cluster with all ranks."""

import socket
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from fullshard.distributed.agreement import all_gather_object
from fullshard.jobs.calibrate import device as meters
from fullshard.jobs.calibrate.collectives import measure_link, measure_matmul_slowdown
from fullshard.jobs.calibrate.device import RateMeter
from fullshard.launch.detect import catalog_hardware_of_machine, detect_gpus
from fullshard.parallel.mesh import RankInfo, process_group
from fullshard.spec.machine.catalog import find_catalog_entry_of_chip
from fullshard.spec.machine.hardware import (
    ComputeDtype,
    Curve,
    Hardware,
    Link,
    Rates,
)
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.system.process import ProcessorSeconds, other_programs_fraction

# Share of the time that each measurement gets.
_MATMUL, _ATTENTION, _MEMORY, _OPTIMIZER, _LAUNCH, _COPIES, _LINKS = 12, 10, 6, 5, 3, 3, 15
_UNALIGNED, _HOST_ADAM = 2, 4


def run_calibration(
    run: Run, *, resume: bool, plan: Plan | None, command_started: float, seconds: float, drive: str, out: str
) -> None:
    """Runs this rank's part of `fullshard calibrate`. Rank 0 writes the hardware.toml `out`.

    seconds: approximate measuring time, excluding the start of the ranks
    drive: a directory on the drive to measure, as a path that is valid on every rank
    """
    del resume, plan, command_started
    with process_group(run.run.device) as ranks:
        found = measure_hardware(ranks, seconds=seconds, drive=Path(drive))
        if ranks.rank == 0:
            found.save(out)


def measure_hardware(ranks: RankInfo, *, seconds: float, drive: Path) -> Hardware:
    """Measures this hardware with all ranks. Collective.

    seconds: approximate duration
    drive: a directory on the drive to measure
    """
    before = ProcessorSeconds.now()
    compute = _MATMUL + _UNALIGNED + _ATTENTION + _MEMORY + _OPTIMIZER + _LAUNCH
    share = seconds / (compute + _COPIES + _LINKS + _HOST_ADAM)
    meter = RateMeter(ranks.device)
    gpus = detect_gpus(meter.kind)
    known = catalog_hardware_of_machine(gpus, ranks=ranks.world_size, ranks_per_node=ranks.local_world_size)
    context = meters.measure_bytes_outside_allocator(ranks.device)
    rates = _measure_rates(meter, known.rates, share=share)
    updated: dict[str, object] = {
        "rates": rates,
        "context_bytes": int(meters.mean_over_ranks(context)),
        "host_bytes_per_second": meters.measure_round_trip_copy_rate(meter, seconds=_COPIES * share),
        "disk_bytes_per_second": meters.read_plus_write_bandwidth(
            drive, pieces=max(1, min(16, round(seconds / 2)))
        ),
        "adam_per_second": meters.host_adamw_params_per_second(seconds=_HOST_ADAM * share),
        "calibration_load": _load_by_other_programs(ProcessorSeconds.now().since(before)),
        "source": f"fullshard calibrate, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
        **_measure_links(ranks, meter, share=share),
    }
    if ranks.device.type == "cuda" and ranks.local_world_size > 1:
        mesh = init_device_mesh("cuda", (ranks.world_size,))
        updated["contention"] = measure_matmul_slowdown(mesh, meter, seconds=_COPIES * share)
    if find_catalog_entry_of_chip(known.chip) is None:  # not in the catalog, so its peak is unknown
        best = {dtype: max(point.rate for point in curve) for dtype, curve in rates.matmul.items()}
        peak = max(point.rate for point in rates.memory)
        measured = {"flops_per_second": best, "memory_bytes_per_second": peak, "source": "measured"}
        updated["chip"] = known.chip.model_copy(update=measured)
    return Hardware.model_validate(known.model_copy(update=updated).model_dump())


def _load_by_other_programs(own: ProcessorSeconds) -> float:
    """Returns the fraction of the processors that other programs used, on the busiest machine. Collective."""
    machines: dict[str, list[ProcessorSeconds]] = {}
    for host, seconds in all_gather_object((socket.gethostname(), own)):
        machines.setdefault(host, []).append(seconds)
    return max(map(other_programs_fraction, machines.values()))


def _measure_rates(meter: RateMeter, known: Rates, *, share: float) -> Rates:
    """Measures rates. Those of grouped matmuls, by the width of heads and of FSDP2's hooks are `known`."""
    dtypes = meters.matmul_dtypes_to_measure(meter.device)
    matmul: dict[ComputeDtype, Curve] = {}
    forward: dict[ComputeDtype, Curve] = {}
    backward: dict[ComputeDtype, Curve] = {}
    for dtype in dtypes:
        part = share / len(dtypes)
        matmul[dtype] = meters.measure_matmul(meter, dtype, seconds=_MATMUL * part)
        forward[dtype], backward[dtype] = meters.measure_attention(meter, dtype, seconds=_ATTENTION * part)
    memory, half_memory = meters.measure_elementwise_bandwidth(meter, seconds=_MEMORY * share)
    return Rates(
        matmul=matmul,
        attention=forward,
        attention_backward=backward,
        attention_by_head_dim=known.attention_by_head_dim,
        attention_backward_by_head_dim=known.attention_backward_by_head_dim,
        grouped_matmul=known.grouped_matmul,
        grouped_tile_rows=known.grouped_tile_rows,
        memory=memory,
        half_memory=half_memory,
        optimizer=meters.measure_adamw_bandwidth(meter, seconds=_OPTIMIZER * share),
        launch_seconds=meters.measure_seconds_per_operation(meter, seconds=_LAUNCH * share),
        unit_seconds=known.unit_seconds,
        unaligned_matmul=meters.measure_unaligned_matmul(meter, dtypes[-1], seconds=_UNALIGNED * share),
    )


def _measure_links(ranks: RankInfo, meter: RateMeter, *, share: float) -> dict[str, Link]:
    """Measures collectives within a node and across nodes; returns the links, by the field of Hardware."""
    local = ranks.local_world_size
    nodes = ranks.world_size // local
    mesh = init_device_mesh(ranks.device.type, (nodes, local), mesh_dim_names=("across", "within"))
    axes = [axis for axis, size in (("within", local), ("across", nodes)) if size > 1]
    part = _LINKS * share / len(axes) if axes else 0.0
    return {axis: measure_link(mesh[axis], meter, name=axis, seconds=part) for axis in axes}
