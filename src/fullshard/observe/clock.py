"""Measures the time of calls, and the highest FLOP/s of matmuls on a rank, which is the reference of MFU."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import world_size
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.spec.machine.catalog import find_chip_by_device_name
from fullshard.spec.machine.hardware import ComputeDtype
from fullshard.spec.plan import Dtype
from fullshard.spec.records.measurement import MatmulPeak
from fullshard.system.process import count_cores_of_rank
from fullshard.training.figures import StepTimer

# Sizes n of the n × n matrices to try.
_EDGES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
_MOST_WINDOWS, _AGREEMENT = 10, 0.05

Timer = Callable[[Callable[[], object], int], float]
"""Function `timer(work, calls)`, which returns the seconds that `calls` calls of `work` take."""


def total_seconds_of_calls(work: Callable[[], object], calls: int, *, device: torch.device) -> float:
    """Calls `work` `calls` times, waits until the device has finished, and returns the seconds taken."""
    timer = StepTimer(device)
    for _ in range(calls):
        work()
    timer.stop()
    return timer.seconds


def measure_calls_per_second(work: Callable[[], object], *, seconds: float, timer: Timer) -> float:
    """Returns the calls of `work` per second, measured over a window of about `seconds`."""
    work()  # the first call of a shape chooses a kernel
    single: list[float] = []
    while len(single) < 3 and sum(single) < seconds:
        single.append(timer(work, 1))
    count = max(1, round(seconds / max(min(single), 1e-7)))
    return count / max(timer(work, count), 1e-9)


def measure_fastest_calls_per_second(
    work: Callable[[], object],
    *,
    seconds: float,
    timer: Timer,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the rate of the fastest single call of `work` among those that begin within `seconds`."""
    work()  # the first call of a shape chooses a kernel
    end, fastest = clock() + seconds, timer(work, 1)
    while clock() < end:
        fastest = min(fastest, timer(work, 1))
    return 1 / max(fastest, 1e-9)


def measure_steady_calls_per_second(work: Callable[[], object], *, seconds: float, timer: Timer) -> float:
    """Returns the calls of `work` per second, once two windows in a row agree: idle GPUs have low clocks."""
    rate = 0.0
    for _ in range(_MOST_WINDOWS):
        before, rate = rate, measure_calls_per_second(work, seconds=seconds, timer=timer)
        if abs(rate - before) <= _AGREEMENT * before:
            break
    return rate


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> float:
    """Returns the FLOP/s of the fastest of a few square matmuls (2 · n³ FLOP), measured in about `seconds`.

    Each size is measured with the layouts of a linear layer's forward and backward: in bf16, some CPUs are
    ten times as fast with one of them as with another.

    On the CPU, the result is the rate of the fastest single call times the rank's share of the cores, so it
    depends little on other programs.

    Collective if there is a process group: all ranks measure at once. Returns the mean over the ranks.
    """
    _mean_over_ranks(0.0, device)  # a barrier that every backend has
    best, started = 0.0, time.perf_counter()
    edges = _EDGES.get(device.type, _EDGES["cpu"])
    window, timer = seconds / (3 * len(edges)), partial(total_seconds_of_calls, device=device)
    measure, limit, share = measure_fastest_calls_per_second, seconds, 1.0
    if device.type == "cuda":
        measure, limit = measure_steady_calls_per_second, seconds * _MOST_WINDOWS
    else:
        share = min(1.0, count_cores_of_rank(int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))))
    generator = torch.Generator(device).manual_seed(0)  # keeps the run's own random state unchanged
    for n in edges:
        if best and time.perf_counter() - started > limit:
            break  # slow in this dtype: the larger ones would take seconds
        a, b = (torch.randn(n, n, generator=generator, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        for left, right in ((a.t(), b), (a, b.t()), (a, b)):
            multiply = partial(torch.mm, left, right, out=out)
            best = max(best, 2 * n**3 * measure(multiply, seconds=window, timer=timer))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return _mean_over_ranks(share * best, device)


def find_matmul_peak(
    device: torch.device, dtype: Dtype, *, calibrated: Mapping[ComputeDtype, float] | None = None
) -> MatmulPeak:
    """Returns the matmul FLOP/s that MFU refers to: the catalog's, else the calibration's, else measured now.

    calibrated: FLOP/s that a calibration of this machine measured, for a device that is not in the catalog

    Collective if there is a process group: returns the mean over the ranks' chips. If the rate of any of them
    is unknown, all ranks measure.
    """
    rounded = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    arithmetic = "tf32" if dtype == "fp32" and rounded else dtype
    name, listed = _name_and_catalog_rate(device, arithmetic)
    known = listed or (calibrated or {}).get(arithmetic)
    if _mean_over_ranks(float(known is not None), device) == 1:
        rate, source = _mean_over_ranks(known or 0.0, device), "catalog" if listed else "measured"
        return MatmulPeak(flops_per_second=rate, dtype=arithmetic, source=source, device=name)
    rate = measure_matmul_peak(device, TORCH_DTYPE[dtype])
    return MatmulPeak(flops_per_second=rate, dtype=arithmetic, source="measured", device=name)


def _name_and_catalog_rate(device: torch.device, arithmetic: ComputeDtype) -> tuple[str, float | None]:
    """Returns (name, FLOP/s) of the device; the FLOP/s are None if the catalog does not list them."""
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}", None
    name = torch.cuda.get_device_name(device)
    chip = find_chip_by_device_name(name, memory_bytes=torch.cuda.get_device_properties(device).total_memory)
    return (name, None) if chip is None else (chip.name, chip.flops_per_second.get(arithmetic))


def _mean_over_ranks(value: float, device: torch.device) -> float:
    if world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / world_size()
