"""Time: the duration of steps, and the fastest matmul that a rank can do, which is the reference of MFU."""

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.spec.catalog import find_chip
from fullshard.spec.hardware import ComputeDtype
from fullshard.spec.measurement import MatmulPeak
from fullshard.spec.plan import Dtype

_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Sizes n of the n × n matrices to try. Larger ones are not faster, and the CUDA cache would keep them.
_EDGES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096)}


class ClockTimeline(Protocol):
    """A timeline to put marks on, whose distances are read later: the host's clock, or a CUDA stream."""

    def mark(self) -> Any: ...

    def passed(self, mark: Any) -> bool:
        """Returns whether the work before `mark` is done, without waiting."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the seconds from `start` to `end`. Waits until `end` has passed."""
        ...


class HostTimeline:
    """Marks as readings of the host's clock, for devices whose operations are synchronous."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def passed(self, mark: float) -> bool:
        del mark
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaTimeline:
    """Marks as events on the current stream: the host records them without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000


def timeline(device: torch.device) -> ClockTimeline:
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()


@dataclass(frozen=True)
class StepTime:
    """Duration of one step.

    seconds: the whole step
    data_seconds: the part that the host waited for data
    """

    seconds: float
    data_seconds: float


class StepClock:
    """Times steps without blocking the device.

        clock = StepClock(timeline(device))
        clock.start()
        with clock.waiting_for_data():
            batch = next(batches)
        ...
        clock.stop()
        clock.finished()   # the steps known by now; `read()` waits for the last: once per logging interval

    Time between `stop` and the next `start` (saving, validation, the caller's own code) belongs to no step.
    The clock does not decide which steps are warmup: see `fullshard.spec.measurement.Pace`.
    """

    def __init__(self, timeline: ClockTimeline, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._timeline, self._now = timeline, now
        self._start: Any = None
        self._data_seconds = 0.0
        self._open: deque[tuple[Any, Any, float]] = deque()

    def start(self) -> None:
        self._start, self._data_seconds = self._timeline.mark(), 0.0

    @contextmanager
    def waiting_for_data(self) -> Generator[None]:
        before = self._now()
        try:
            yield
        finally:
            self._data_seconds += self._now() - before

    def stop(self) -> None:
        assert self._start is not None, "a step stops that was not started"
        self._open.append((self._start, self._timeline.mark(), self._data_seconds))
        self._start = None

    def finished(self) -> list[StepTime]:
        """Returns the steps that the device has finished since the last call, in order. Does not wait."""
        times: list[StepTime] = []
        while self._open and self._timeline.passed(self._open[0][1]):
            times.append(self._take())
        return times

    def read(self) -> list[StepTime]:
        """Returns all stopped steps that were not returned yet, in order. Waits for the last one."""
        return [self._take() for _ in range(len(self._open))]

    def _take(self) -> StepTime:
        start, end, data_seconds = self._open.popleft()
        return StepTime(self._timeline.seconds(start, end), data_seconds)


def sustained_rate(work: Callable[[], object], *, seconds: float, on: ClockTimeline) -> float:
    """Returns the calls of `work` per second, over a window of about `seconds`.

    This is the mean over a window, not the best single call. With more ranks than cores, a call that falls
    between two context switches shows a whole core, while a window shows this rank's share of it.
    """
    work()  # the first call of a shape chooses a kernel
    single: list[float] = []
    while len(single) < 3 and sum(single) < seconds:
        start = on.mark()
        work()
        single.append(on.seconds(start, on.mark()))
    count = max(1, round(seconds / max(min(single), 1e-7)))
    start = on.mark()
    for _ in range(count):
        work()
    return count / max(on.seconds(start, on.mark()), 1e-9)


def measure_matmul_peak(device: torch.device, dtype: torch.dtype, *, seconds: float = 0.2) -> float:
    """Returns the FLOP/s of the fastest of a few square matmuls (2 · n³ FLOP), measured in about `seconds`.

    With a process group this is collective: all ranks measure at once, each with its own threads, and get the
    mean of all. Ranks that share cores thus measure their share while the others work too.
    """
    _mean_over_ranks(0.0, device)  # a barrier that every backend has
    on, best = timeline(device), 0.0
    begin = on.mark()
    edges = _EDGES.get(device.type, _EDGES["cpu"])
    window = seconds / len(edges)
    generator = torch.Generator(device).manual_seed(0)  # keeps the run's own random state unchanged
    for n in edges:
        if best and on.seconds(begin, on.mark()) > seconds:
            break  # slow in this dtype: the larger ones would take seconds
        a, b = (torch.randn(n, n, generator=generator, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        multiply = partial(torch.mm, a, b, out=out)
        best = max(best, 2 * n**3 * sustained_rate(multiply, seconds=window, on=on))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return _mean_over_ranks(best, device)


def find_matmul_peak(device: torch.device, dtype: Dtype) -> MatmulPeak:
    """Returns the reference of MFU: the catalog's figure for this chip, or else a measured one.

    dtype: dtype of the matmuls (`Plan.precision.param`)

    Collective if there is a process group, and the ranks agree: if any chip is unknown, all ranks measure;
    for different chips, the result is the mean.
    """
    arithmetic = _arithmetic(device, dtype)
    name, listed = _listed(device, arithmetic)
    if _mean_over_ranks(float(listed is not None), device) == 1:
        rate = _mean_over_ranks(listed or 0.0, device)
        return MatmulPeak(flops_per_second=rate, dtype=arithmetic, source="catalog", device=name)
    rate = measure_matmul_peak(device, _TORCH_DTYPES[dtype])
    return MatmulPeak(flops_per_second=rate, dtype=arithmetic, source="measured", device=name)


def _listed(device: torch.device, arithmetic: ComputeDtype) -> tuple[str, float | None]:
    """Returns (name, FLOP/s) of the device. The rate is None if the catalog does not list it."""
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}", None
    name = torch.cuda.get_device_name(device)
    chip = find_chip(name, memory_bytes=torch.cuda.get_device_properties(device).total_memory)
    return (name, None) if chip is None else (chip.name, chip.flops_per_second.get(arithmetic))


def _arithmetic(device: torch.device, dtype: Dtype) -> ComputeDtype:
    """Returns the arithmetic of matmuls in `dtype`: torch may be set to compute `fp32` ones in tf32."""
    rounded = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if dtype == "fp32" and rounded else dtype


def _mean_over_ranks(value: float, device: torch.device) -> float:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
