"""Rates of one rank's computing, copying and writing, measured while all ranks do the same."""

import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullshard.distributed.agreement import world_size
from fullshard.distributed.host import allocate_host_memory, as_memoryview
from fullshard.errors import OffloadError
from fullshard.models.document_attention import QueryKeyValue, attend_with_varlen_kernel
from fullshard.observe.clock import total_seconds_of_calls
from fullshard.observe.memory import read_memory_and_reset_peaks
from fullshard.offload.drive import DriveFile
from fullshard.spec.machine.catalog import round_to_four_digits
from fullshard.spec.machine.hardware import (
    ComputeDtype,
    Curve,
    RatePoint,
    Rates,
    curve_with_slowdown,
    interpolate_rate,
)

TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_MATMUL_EDGES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192)}
_SEQUENCES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (128, 512, 1024, 2048, 4096, 8192)}
_LONG_SEQUENCE = {"cpu": 256, "cuda": 4096}
_HEADS, _HEAD_DIM = {"cpu": 4, "cuda": 32}, {"cpu": 64, "cuda": 128}
_ELEMENTS = {
    "cpu": tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22)),
    "cuda": tuple(2**power for power in (12, 15, 18, 20, 22, 24, 26)),
}
_COPY_BYTES = 64 * 1024**2
_HOST_PARAMETERS, _HOST_UPDATES = 1 << 24, 4  # 256 MiB, far beyond any cache
_LEAST_PARAMETERS = 1 << 18
_PIECE_BYTES = 16 << 20
_WINDOWS, _LEAST_WINDOWS = 8, 2
_ISSUED, _TURNS = 64, 3  # operations of a chain, and its turns, in `measure_seconds_per_operation`


Attend = Callable[[QueryKeyValue], Tensor]


class BenchmarkTask(NamedTuple):
    """A piece of work to time, with the FLOP or bytes of one launch (`size`) and of one call (`amount`)."""

    work: Callable[[], object]
    size: float
    amount: float


class RateMeter:
    """Times tasks on one device, on all ranks at once. Every rank gets the mean over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
        self._generator = torch.Generator(device).manual_seed(0)
        self._seconds = self._thread_seconds = 0.0

    @property
    def core_share(self) -> float:
        """Fraction of the time of CPU work in which this thread had a core; about 1 on an idle machine.

        The seconds of a rank's other threads are left out: those of two threads that each wait half of the
        time would add up to a whole core.
        """
        return self._thread_seconds / max(self._seconds, 1e-9)

    def random_tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns a tensor of normally distributed numbers. (GPUs compute faster on constant data.)"""
        return torch.randn(*shape, generator=self._generator, device=self.device).to(dtype)

    def measure_calls_per_second(self, work: Callable[[], object], *, seconds: float) -> float:
        """Returns the calls of `work` per second on each rank, from the second fastest window.

        A window is several calls on all ranks, from the first rank's start until the last has finished: with
        more ranks than cores, a rank may have a whole core to itself in between. The mean of the windows
        would contain other load on the machine, and the fastest may be an outlier.
        """
        work()  # the first call of a shape chooses a kernel
        once = self._time_calls(work, 2) / 2
        fit = round(seconds / max(once, 1e-7))
        windows, calls = max(min(fit, _WINDOWS), _LEAST_WINDOWS), max(round(fit / _WINDOWS), 1)
        rates: list[float] = []
        for _ in range(windows):
            rates.append(calls / self._time_calls(work, calls))
        return sorted(rates)[-2]

    def _time_calls(self, work: Callable[[], object], calls: int) -> float:
        """Returns the seconds in which each rank makes `calls` calls. Collective."""
        mean_over_ranks(0.0)  # a barrier: all ranks start together
        started, worked = time.perf_counter(), time.thread_time()
        seconds = total_seconds_of_calls(work, calls, device=self.device)
        self._thread_seconds += time.thread_time() - worked
        self._seconds += seconds
        if self.kind == "cpu":
            mean_over_ranks(0.0)  # the first rank to start waits here for the last to finish
            seconds = time.perf_counter() - started
        return max(max_over_ranks(seconds), 1e-9)

    def measure_rate_curve(
        self, make: Callable[[int], BenchmarkTask], sizes: Sequence[int], *, seconds: float
    ) -> Curve:
        """Returns the rate of the task `make(size)` for each size, measured in about `seconds` in total.

        Sizes increase. The larger ones are skipped once 8 calls take over twice a size's share of the time.
        """
        window, points = seconds / len(sizes), list[RatePoint]()
        for size in sizes:
            task = make(size)  # one at a time, because all would not fit in memory
            rate = self.measure_calls_per_second(task.work, seconds=window)
            points.append(RatePoint(task.size, round_to_four_digits(rate * task.amount)))
            if _WINDOWS / rate > 2 * window:
                break
        return tuple(points)


def mean_over_ranks(value: float) -> float:
    """Returns the mean of `value` over ranks, sent as a CPU tensor on any device. Collective."""
    return _reduce_over_ranks(value, dist.ReduceOp.SUM) / world_size()


def max_over_ranks(value: float) -> float:
    """Returns the highest `value` of the ranks. Collective."""
    return _reduce_over_ranks(value, dist.ReduceOp.MAX)


def _reduce_over_ranks(value: float, op: dist.ReduceOp.RedOpType) -> float:
    if world_size() == 1:
        return value
    reduced = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(reduced, op=op)
    return reduced.item()


def matmul_dtypes_to_measure(device: torch.device) -> tuple[ComputeDtype, ...]:
    if device.type != "cuda":
        return ("fp32", "bf16")  # fp16 is emulated, and some 50 times slower than fp32
    tensor_cores = torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    return ("fp32", "tf32", "bf16", "fp16") if tensor_cores else ("fp32", "fp16")


def measure_matmul(meter: RateMeter, dtype: ComputeDtype, *, seconds: float) -> Curve:
    """Returns the FLOP/s of the three matmuls of an n × n linear layer on 2n tokens: 4 n³ FLOP each."""

    def make_task(n: int) -> BenchmarkTask:
        x, g = (meter.random_tensor(2 * n, n, dtype=TORCH_DTYPES[dtype]) for _ in range(2))
        weight = meter.random_tensor(n, n, dtype=TORCH_DTYPES[dtype])

        def run_matmuls() -> None:
            torch.mm(x, weight.t())
            torch.mm(g, weight)
            torch.mm(g.t(), x)

        return BenchmarkTask(run_matmuls, size=4 * n**3, amount=12 * n**3)

    with _use_matmul_precision(dtype):
        return meter.measure_rate_curve(make_task, _MATMUL_EDGES[meter.kind], seconds=seconds)


def measure_unaligned_matmul_rate_fraction(meter: RateMeter, dtype: ComputeDtype, *, seconds: float) -> float:
    """Returns the rate of a matmul whose rows are not a multiple of 16 bytes, over that of an aligned one."""
    aligned = {"cpu": 256, "cuda": 4096}[meter.kind]

    def measure_rate(n: int) -> float:
        x, w = (meter.random_tensor(rows, n, dtype=TORCH_DTYPES[dtype]) for rows in (2 * n, n))
        return n**3 * meter.measure_calls_per_second(lambda: torch.mm(x, w.t()), seconds=seconds / 2)

    return min(1.0, measure_rate(aligned + 1) / measure_rate(aligned))


def attend_by_preferred_kernel(inputs: QueryKeyValue) -> Tensor:
    """Returns causal attention, (1, heads, sequence, head_dim), by the kernel that torch prefers."""
    return F.scaled_dot_product_attention(*inputs, is_causal=True)


def attend_within_one_document(inputs: QueryKeyValue) -> Tensor:
    """Returns the same by the kernel that a GPU has for attention within documents."""
    ends = torch.arange(2, device=inputs.query.device, dtype=torch.int32)
    bounds = inputs.query.shape[2] * ends
    y = attend_with_varlen_kernel(inputs, bounds, scale=None, window=None, begins=(0,))
    return y.transpose(1, 2)


def measure_flash_factors(
    meter: RateMeter,
    known: Rates,
    *,
    preferred: tuple[Curve, Curve],
    seconds: float,
    attend: Attend = attend_within_one_document,
) -> dict[str, Curve]:
    """Returns `flash_by_head_dim` and `flash_backward_by_head_dim` as measured with one long document.

    Only the width of the measurement is measured; the rest of `known` is scaled. Empty if `known` has none.

    preferred: measured rates of bf16 by the kernel that torch prefers, for forward and for backward
    """
    curves = {name: getattr(known, name) for name in ("flash_by_head_dim", "flash_backward_by_head_dim")}
    if None in curves.values():
        return {}
    long, width = (_LONG_SEQUENCE[meter.kind],), _HEAD_DIM[meter.kind]
    flash = measure_attention(meter, "bf16", seconds=seconds, sequences=long, attend=attend)
    return {
        name: curve_with_slowdown(
            curve, interpolate_rate(curve, width) * interpolate_rate(usual, own.size) / own.rate
        )
        for (name, curve), usual, (own,) in zip(curves.items(), preferred, flash, strict=True)
    }


def measure_attention(
    meter: RateMeter,
    dtype: ComputeDtype,
    *,
    seconds: float,
    sequences: Sequence[int] = (),
    attend: Attend = attend_by_preferred_kernel,
) -> tuple[Curve, Curve]:
    """Returns the FLOP/s of causal attention by size, for forward and for backward.

    Only the computed pairs of positions count, S (S + 1) / 2 per head: two matmuls in forward (4 · head size
    FLOP per pair), five in backward.

    sequences: lengths to measure; if empty, those of the device's kind
    """
    heads, size = _HEADS[meter.kind], _HEAD_DIM[meter.kind]

    def random_inputs(sequence: int) -> list[Tensor]:
        return [meter.random_tensor(1, heads, sequence, size, dtype=TORCH_DTYPES[dtype]) for _ in range(4)]

    def make_forward_task(sequence: int) -> BenchmarkTask:
        q, k, v, _ = random_inputs(sequence)
        flops = 4 * size * heads * sequence * (sequence + 1) / 2
        return BenchmarkTask(lambda: attend(QueryKeyValue(q, k, v)), size=flops, amount=flops)

    def make_backward_task(sequence: int) -> BenchmarkTask:
        q, k, v, gradient = random_inputs(sequence)
        needed = [one.requires_grad_() for one in (q, k, v)]
        out = attend(QueryKeyValue(q, k, v))
        flops = 10 * size * heads * sequence * (sequence + 1) / 2
        run = partial(torch.autograd.grad, out, needed, gradient, retain_graph=True)
        return BenchmarkTask(run, size=flops, amount=flops)

    sequences = sequences or _SEQUENCES[meter.kind]
    with torch.no_grad():
        first = meter.measure_rate_curve(make_forward_task, sequences, seconds=seconds * 0.4)
    return first, meter.measure_rate_curve(make_backward_task, sequences, seconds=seconds * 0.6)


def measure_elementwise_bandwidth(meter: RateMeter, *, seconds: float) -> tuple[Curve, float]:
    """Returns the bytes/s, read plus written, of product and SiLU by size; and bf16's fraction of it.

    A product moves three numbers per element, and a SiLU two. Both write into new memory, as in a model.
    """

    def make_task(n: int, dtype: torch.dtype = torch.float32) -> BenchmarkTask:
        a, b = meter.random_tensor(n, dtype=dtype), meter.random_tensor(n, dtype=dtype)

        def run_product_and_silu() -> None:
            torch.mul(a, b)
            F.silu(a)

        count = a.element_size() * n
        return BenchmarkTask(run_product_and_silu, size=2.5 * count, amount=5 * count)

    curve = meter.measure_rate_curve(make_task, _ELEMENTS[meter.kind], seconds=seconds * 0.8)
    half = make_task(_ELEMENTS[meter.kind][4], torch.bfloat16)
    rate = half.amount * meter.measure_calls_per_second(half.work, seconds=seconds * 0.2)
    return curve, min(1.0, rate / interpolate_rate(curve, half.size))


def measure_adamw_bandwidth(meter: RateMeter, *, seconds: float) -> Curve:
    """Returns the bytes/s of fused AdamW in fp32, which reads four tensors and writes three."""

    def make_task(n: int) -> BenchmarkTask:
        parameter = meter.random_tensor(n).requires_grad_()
        parameter.grad = meter.random_tensor(n)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        return BenchmarkTask(optimizer.step, size=28 * n, amount=28 * n)

    return meter.measure_rate_curve(make_task, _ELEMENTS[meter.kind], seconds=seconds)


def measure_seconds_per_operation(meter: RateMeter, *, seconds: float) -> float:
    """Returns the host seconds that torch and autograd take per operation, over forward and backward.

    A chain of small products is timed, each with 2 operations. On the CPU, the time of the products
    themselves is subtracted. Both are timed in turn, and the median of the differences is taken: a machine
    may become slower or faster in between. It is 0 if the median is negative.
    """
    start, factor = meter.random_tensor(64).requires_grad_(), meter.random_tensor(64)

    def run_chain_with_autograd() -> None:
        x = start
        for _ in range(_ISSUED):
            x = x * factor
        x.backward(factor)

    def run_chain_without_autograd() -> None:
        with torch.no_grad():
            x = start
            for _ in range(2 * _ISSUED):
                x = x * factor

    def measure_chain_overhead() -> float:
        taken = 1 / meter.measure_calls_per_second(run_chain_with_autograd, seconds=part)
        if meter.kind == "cpu":
            taken -= 1 / meter.measure_calls_per_second(run_chain_without_autograd, seconds=part)
        return taken

    part = seconds / _TURNS / (2 if meter.kind == "cpu" else 1)
    return max(median(measure_chain_overhead() for _ in range(_TURNS)), 0.0) / (2 * _ISSUED)


def measure_round_trip_copy_rate(meter: RateMeter, *, seconds: float) -> float | None:
    """Returns the bytes/s between pinned host memory and the device, in both directions; None on the CPU."""
    if meter.kind == "cpu":
        return None
    there = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=meter.device)
    here = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy_there_and_back() -> None:
        there.copy_(here, non_blocking=True)
        here.copy_(there, non_blocking=True)

    rate = meter.measure_calls_per_second(copy_there_and_back, seconds=seconds)
    return round_to_four_digits(2 * _COPY_BYTES * rate)


def host_adamw_params_per_second(*, seconds: float) -> float:
    """Returns the parameters per second that fused AdamW updates on the host, per rank while all ranks do.

    With less than a second, fewer parameters are updated, which may then fit in a cache.
    """
    count = max(_LEAST_PARAMETERS, int(_HOST_PARAMETERS * min(seconds, 1.0)))
    parameter = torch.randn(count).requires_grad_()
    parameter.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # creates its state
    mean_over_ranks(0.0)
    started = time.perf_counter()
    for _ in range(_HOST_UPDATES):
        optimizer.step()
    return round_to_four_digits(mean_over_ranks(count * _HOST_UPDATES / (time.perf_counter() - started)))


def measure_bytes_outside_allocator(device: torch.device) -> int:
    """Returns the bytes of device memory outside torch's allocator; on the CPU, all resident memory.

    On CUDA this includes the memory of other processes, so none should run on the device.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(total - free - torch.cuda.memory_reserved(device), 0)
    return int(read_memory_and_reset_peaks(device).get("resident_bytes", 0))


def read_plus_write_bandwidth(directory: Path, *, pieces: int = 16) -> float | None:
    """Returns the bytes/s, read plus written, per rank while all ranks work. Collective.

    Each rank has two files in `directory`, of `pieces` × 16 MiB each. One is read while the other is written
    and flushed. The result is None on all ranks if any of them cannot write there.
    """
    files, rate = None, 0.0
    with ExitStack() as stack:
        with suppress(OSError, OffloadError):
            files = open_two_random_files(directory, stack, pieces=pieces)
        mean_over_ranks(0.0)  # all ranks begin together
        if files is not None:
            with suppress(OffloadError):
                rate = _own_read_plus_write_rate(*files)
    everywhere, mean = mean_over_ranks(float(rate > 0)) == 1, mean_over_ranks(rate)
    return float(f"{mean:.3g}") if everywhere else None


def open_two_random_files(directory: Path, stack: ExitStack, *, pieces: int) -> tuple[DriveFile, DriveFile]:
    """Returns two open, unlinked files of random numbers. (Zeros may be faster, and holes are not read.)"""
    with tempfile.TemporaryDirectory(prefix="fullshard-calibrate-", dir=directory) as name:
        one, other = (
            stack.enter_context(DriveFile.open_or_create(Path(name, own), pieces * _PIECE_BYTES))
            for own in ("one", "other")
        )
    for file in (one, other):
        _write_whole_file(file, _random_piece())
    return one, other


def _own_read_plus_write_rate(one: DriveFile, other: DriveFile) -> float:
    data, into = _random_piece(), as_memoryview(allocate_host_memory(_PIECE_BYTES, pinned=False))
    with ThreadPoolExecutor(max_workers=1) as beside:
        started = time.perf_counter()
        for source, target in ((one, other), (other, one)):
            reading = beside.submit(_read_whole_file, source, into)
            _write_whole_file(target, data)
            reading.result()
        return 4 * one.size_bytes / (time.perf_counter() - started)


def _random_piece() -> memoryview:
    found = allocate_host_memory(_PIECE_BYTES, pinned=False)
    found.view(torch.int32).random_()
    return as_memoryview(found)


def _write_whole_file(file: DriveFile, data: memoryview) -> None:
    for offset in range(0, file.size_bytes, _PIECE_BYTES):
        file.write(data, offset)
    file.flush()


def _read_whole_file(file: DriveFile, into: memoryview) -> None:
    for offset in range(0, file.size_bytes, _PIECE_BYTES):
        file.read(into, offset)


@contextmanager
def _use_matmul_precision(dtype: ComputeDtype) -> Generator[None]:
    """Context in which fp32 matmuls on CUDA are computed in tf32 if `dtype` is that, else in fp32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
