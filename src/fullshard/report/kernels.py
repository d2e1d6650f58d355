"""Times of a profiled step by kind of kernel, with achieved rates, for the terminal and for the page."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.errors import SpecError
from fullshard.quantities import format_count, format_seconds
from fullshard.report.kernel_trace import DeviceWork, HostOperation, KernelTrace, read_kernel_trace
from fullshard.report.markup import percent_text
from fullshard.report.step_traces import list_profiles
from fullshard.report.table import show_table
from fullshard.spec.machine.hardware import ComputeDtype, Rates, interpolate_rate
from fullshard.spec.records.step_spans import COLLECTIVES, RANGE_PREFIX


class KernelKind(StrEnum):
    """A kind of work in a step. `host` is work of the host alone, such as views and allocation."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    POINTWISE = "pointwise"
    COPIES = "copies"
    COLLECTIVES = "collectives"
    OPTIMIZER = "optimizer"
    HOST = "host"


_HALF = ("bf16", "fp16")
WARNING = "Warning: "
"""Beginning of a sentence that warns."""
_HEADER = ("kernels", "time", "share", "count", "FLOP/s", "of calibrated")
_COLLECTIVE_RANGES = (*(RANGE_PREFIX + kind for kind in COLLECTIVES), "gloo:", "nccl:", "c10d::")
_OPTIMIZER_RANGES = (f"{RANGE_PREFIX}norm", f"{RANGE_PREFIX}update", "Optimizer.step")
_ENGINE, _ENGINE_CASTS = "FSDP::", "FSDP::cast_"
_ATTENTION = re.compile(r"scaled_?dot_?product|flash_?attention|flex_?attention|efficient_?attention", re.I)
_NORM = re.compile(r"(layer|rms|batch|group|instance)_?norm", re.I)
_COPIES = {"copy_", "_to_copy", "to", "clone", "contiguous", "cat", "stack", "split_with_sizes_copy"}
_DENSE = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "mkldnn_linear", "_int_mm"}
_SCALED = {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
_MATMULS = _DENSE | _SCALED | {"convolution", "mkldnn_convolution", "cudnn_convolution"}
_VIEWS = (
    {"t", "transpose", "view", "as_strided", "detach", "reshape", "expand", "slice", "select", "narrow"}
    | {"unsqueeze", "squeeze", "permute", "flatten", "unflatten", "split", "chunk", "alias", "view_as"}
    | {"_unsafe_view", "_reshape_alias", "resolve_conj", "resolve_neg", "lift_fresh", "set_", "resize_"}
)
_ALLOCATIONS = {"empty", "empty_like", "empty_strided"}
_READS = {"item", "_local_scalar_dense", "result_type", "is_nonzero"}
_WRAPPERS = {"matmul"}  # whose work is in the operation that they call
_NO_WORK = _VIEWS | _ALLOCATIONS | _READS | _WRAPPERS
# Parts of the names of kernels, where the operation that launched them is not known.
_KERNEL_NAMES = (
    (KernelKind.COLLECTIVES, re.compile(r"nccl", re.I)),
    (KernelKind.ATTENTION, re.compile(r"flash_|fmha|attention|sdpa|flex_", re.I)),
    (KernelKind.MATMUL, re.compile(r"gemm|cutlass|xmma|nvjet|wgmma|cublas|_mm_|matmul|triton_tem", re.I)),
    (KernelKind.NORM, _NORM),
    (KernelKind.COPIES, re.compile(r"memcpy|memset|copy_kernel|CatArray|split_with_sizes", re.I)),
    (KernelKind.OPTIMIZER, re.compile(r"FusedAdam|multi_tensor_apply", re.I)),
)
_DTYPES: dict[str, ComputeDtype] = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16"}

# Operation -> (argument that has the queries, argument that says whether it is causal).
_ATTENTION_ARGUMENTS = {
    "_scaled_dot_product_flash_attention": (0, 4),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "_scaled_dot_product_efficient_attention": (0, 6),
    "_scaled_dot_product_cudnn_attention": (0, 6),
    "_scaled_dot_product_flash_attention_backward": (1, 11),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "_scaled_dot_product_efficient_attention_backward": (1, 11),
    "_scaled_dot_product_cudnn_attention_backward": (1, 14),
}
_ATTENTION_KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_flash_attention_forward": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_efficient_attention_forward": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_attention_math": "math",
    "flex_attention": "flex",
}


class _CountedFlops(NamedTuple):
    """FLOP of one operation, and the curve of rates (`Rates`) for their comparison."""

    flops: float
    rates: str  # matmul, attention or attention_backward
    dtype: ComputeDtype | None


class _AttentionKernelUse(NamedTuple):
    """The kernel with which attention ran, and the dtype of its inputs; None if it is not known."""

    kernel: str
    dtype: ComputeDtype | None


@dataclass(frozen=True)
class KindTime:
    """The time of one kind of kernel in a step.

    seconds: of its kernels, or of the host's operations on the CPU
    count: number of kernels or operations
    flops, counted_seconds: FLOP of those whose shapes are known, and their time
    calibrated_seconds: their time at the calibrated rates; None without these
    """

    kind: KernelKind
    seconds: float
    count: int
    flops: float = 0.0
    counted_seconds: float = 0.0
    calibrated_seconds: float | None = None

    @property
    def flops_per_second(self) -> float | None:
        return self.flops / self.counted_seconds if self.flops and self.counted_seconds else None

    @property
    def share_of_calibrated(self) -> float | None:
        """Achieved rate over the calibrated one; None if either is not known."""
        if not self.calibrated_seconds or not self.counted_seconds:
            return None
        return self.calibrated_seconds / self.counted_seconds


@dataclass(frozen=True)
class KernelSummary:
    """The times of a profiled step on one rank. Profiling makes the host slower than usual.

    name: file of the profile
    seconds: from the first operation to the last
    on_device: whether kernels of a device were recorded; else the times are the host's
    kinds: times by kind, the largest first. Kernels that overlap count in full, each in its kind.
    exposed_collective_seconds: time in which only collectives ran on the device
    host_late_seconds: time in which the device was idle because the host had not launched its next kernel
    waiting_seconds: other time in which the device was idle: dependencies, and the delay of a launch
    attention: kernels with which attention ran
    warnings: sentences about kernels that are slower than necessary
    """

    name: str
    seconds: float
    on_device: bool
    kinds: tuple[KindTime, ...]
    exposed_collective_seconds: float = 0.0
    host_late_seconds: float = 0.0
    waiting_seconds: float = 0.0
    attention: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def summarise_last_profile(directory: Path, *, rates: Rates | None) -> KernelSummary | None:
    """Returns the summary of the last profiled step on its first rank; None without a readable profile."""
    profiles = list_profiles(directory)
    if not profiles:
        return None
    last = next(iter(profiles[max(profiles)].values()))
    try:
        return summarise_kernels(read_kernel_trace(last), name=last.name, rates=rates)
    except SpecError:
        return None


def summarise_kernels(trace: KernelTrace, *, name: str, rates: Rates | None = None) -> KernelSummary:
    """Returns the times of a profiled step. `rates`: calibrated rates of the hardware, if they are known."""
    operations = _operations_of_busiest_thread(trace.host)
    works = [(_device_kind(one), (one.end - one.begin) * 1e-6, one.launch) for one in trace.device]
    if not works:
        works = [(_host_kind(one), one.own_seconds, one) for one in operations]
    uses = {use for one in trace.host if (use := _attention_kernel(one)) is not None}
    late, waiting = _idle_seconds(trace.device)
    computing = [one for one in trace.device if _device_kind(one) is not KernelKind.COLLECTIVES]
    begin = min((one.begin for one in (*operations, *trace.device)), default=0.0)
    end = max((one.end for one in (*operations, *trace.device)), default=0.0)
    return KernelSummary(
        name=name,
        seconds=(end - begin) * 1e-6,
        on_device=bool(trace.device),
        kinds=_sum_by_kind(works, rates),
        exposed_collective_seconds=(_covered(trace.device) - _covered(computing)) * 1e-6,
        host_late_seconds=late,
        waiting_seconds=waiting,
        attention=tuple(sorted({use.kernel for use in uses})),
        warnings=tuple(_attention_warnings(uses, on_device=bool(trace.device))),
    )


def _sum_by_kind(
    works: Iterable[tuple[KernelKind, float, HostOperation | None]], rates: Rates | None
) -> tuple[KindTime, ...]:
    """Returns the sums of (kind, seconds, innermost operation around it), the largest first."""
    found: dict[KernelKind, KindTime] = {}
    sources: dict[KernelKind, dict[int, _CountedFlops]] = defaultdict(dict)
    for kind, seconds, within in works:
        one = found.setdefault(kind, KindTime(kind, 0.0, 0))
        counted = 0.0
        if kind in (KernelKind.MATMUL, KernelKind.ATTENTION) and within is not None:
            # All kernels of one operation share its FLOP.
            around = ((id(each), flops) for each in within.chain() if (flops := _counted_flops(each)))
            if (source := next(around, None)) is not None:
                sources[kind] |= [source]
                counted = seconds
        found[kind] = replace(
            one,
            seconds=one.seconds + seconds,
            count=one.count + 1,
            counted_seconds=one.counted_seconds + counted,
        )
    made = [
        replace(
            one,
            flops=sum(each.flops for each in sources[kind].values()),
            calibrated_seconds=_calibrated_seconds(sources[kind].values(), rates),
        )
        for kind, one in found.items()
    ]
    return tuple(sorted(made, key=lambda one: -one.seconds))


def _calibrated_seconds(works: Iterable[_CountedFlops], rates: Rates | None) -> float | None:
    total = 0.0
    for one in works:
        curves = {} if rates is None else getattr(rates, one.rates)
        if one.dtype not in curves:
            return None
        total += one.flops / interpolate_rate(curves[one.dtype], one.flops)
    return total or None


def _idle_seconds(works: Sequence[DeviceWork]) -> tuple[float, float]:
    """Returns the time in which the device waited for launches by the host, and that in which it just waited.

    works: sorted by their begin
    """
    reached, late, waiting = works[0].begin if works else 0.0, 0.0, 0.0
    for work in works:
        if work.begin > reached:
            launched = reached if work.launch is None else min(max(work.launch.end, reached), work.begin)
            late += launched - reached
            waiting += work.begin - launched
        reached = max(reached, work.end)
    return late * 1e-6, waiting * 1e-6


def _covered(works: Sequence[DeviceWork]) -> float:
    """Returns the time in which at least one of the works runs. They are sorted by their begin."""
    total, reached = 0.0, float("-inf")
    for work in works:
        total += max(0.0, work.end - max(work.begin, reached))
        reached = max(reached, work.end)
    return total


def _operations_of_busiest_thread(host: Sequence[HostOperation]) -> list[HostOperation]:
    """Returns the operations of the training thread: the one with the most operations of torch."""
    counts: dict[object, int] = defaultdict(int)
    for one in host:
        counts[one.thread] += one.name.startswith("aten::")
    busiest = max(counts, key=lambda thread: counts[thread], default=None)
    return [one for one in host if one.thread == busiest]


def _host_kind(operation: HostOperation) -> KernelKind:
    """Returns the kind of the time that the host spends in `operation` itself."""
    ranges = [one.name for one in operation.chain()]
    if any(name.startswith(_COLLECTIVE_RANGES) for name in ranges):
        return KernelKind.COLLECTIVES
    found = _kind_of_ranges(ranges)
    name = _bare_name(operation.name)
    if found is KernelKind.COPIES or found is None:
        if name in _MATMULS:
            return KernelKind.MATMUL
        if name in _COPIES:
            return KernelKind.COPIES
    if found is not None:
        return found
    is_operation = operation.name.startswith("aten::") and name not in _NO_WORK
    return KernelKind.POINTWISE if is_operation else KernelKind.HOST


def _device_kind(work: DeviceWork) -> KernelKind:
    """Returns the kind of a kernel or copy of the device."""
    if "nccl" in work.name.lower():
        return KernelKind.COLLECTIVES
    ranges = [] if work.launch is None else [one.name for one in work.launch.chain()]
    found = _kind_of_ranges(ranges)
    if found is not None:
        return found
    if work.is_copy:
        return KernelKind.COPIES
    operation = next((_bare_name(name) for name in ranges if name.startswith("aten::")), "")
    if operation in _MATMULS:
        return KernelKind.MATMUL
    if operation in _COPIES:
        return KernelKind.COPIES
    return next((kind for kind, name in _KERNEL_NAMES if name.search(work.name)), KernelKind.POINTWISE)


def _kind_of_ranges(ranges: list[str]) -> KernelKind | None:
    """Returns the kind by the enclosing operations and ranges; None if they do not determine it."""
    if any(name.startswith(_OPTIMIZER_RANGES) for name in ranges):
        return KernelKind.OPTIMIZER
    if any(_ATTENTION.search(name) for name in ranges):
        return KernelKind.ATTENTION
    if any(name.startswith(_ENGINE) and not name.startswith(_ENGINE_CASTS) for name in ranges):
        return KernelKind.COPIES  # in and out of the collectives' buffers
    return KernelKind.NORM if any(_NORM.search(name) for name in ranges) else None


def _bare_name(name: str) -> str:
    """Returns the name of an operation without its library."""
    return name.rpartition("::")[2]


def _counted_flops(operation: HostOperation) -> _CountedFlops | None:
    """Returns the FLOP of a matmul or of attention by its shapes; None for other operations.

    Causal attention counts the pairs of positions that it computes, as `fullshard calibrate` does.
    """
    name = _bare_name(operation.name)
    if name in _ATTENTION_ARGUMENTS:
        return _attention_flops(operation, name)
    first = {"addmm": 1, "baddbmm": 1}.get(name, 0)
    if name not in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        return None
    left, right = _shape(operation, first), _shape(operation, first + 1)
    if len(left) not in (2, 3) or len(right) != len(left):
        return None
    dtype = "fp8" if name == "_scaled_mm" else _dtype(operation, first)
    return _CountedFlops(2.0 * math.prod(left) * right[-1], "matmul", dtype)


def _attention_kernel(operation: HostOperation) -> _AttentionKernelUse | None:
    """Returns the kernel of an operation that is a forward of attention; None for other operations."""
    kernel = _ATTENTION_KERNELS.get(_bare_name(operation.name))
    return None if kernel is None else _AttentionKernelUse(kernel, _dtype(operation, 0))


def _attention_flops(operation: HostOperation, name: str) -> _CountedFlops | None:
    place, causal_place = _ATTENTION_ARGUMENTS[name]
    query, key = _shape(operation, place), _shape(operation, place + 1)
    if len(query) != 4 or len(key) != 4:
        return None
    rows, columns = query[2], key[2]
    causal = causal_place < len(operation.values) and operation.values[causal_place] == "True"
    pairs = rows * (columns - rows) + rows * (rows + 1) // 2 if causal else rows * columns
    backward = name.endswith("_backward")
    flops = float((10 if backward else 4) * query[0] * query[1] * query[3] * pairs)
    rates = "attention_backward" if backward else "attention"
    return _CountedFlops(flops, rates, _dtype(operation, place))


def _shape(operation: HostOperation, argument: int) -> list[int]:
    shape: Any = operation.dims[argument] if argument < len(operation.dims) else []
    is_shape = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    return shape if is_shape else []


def _dtype(operation: HostOperation, argument: int) -> ComputeDtype | None:
    kind = operation.types[argument] if argument < len(operation.types) else ""
    return _DTYPES.get(str(kind).lower())


def _attention_warnings(uses: Iterable[_AttentionKernelUse], *, on_device: bool) -> Iterable[str]:
    uses = sorted(uses, key=str)
    if any(use.kernel == "math" for use in uses):
        yield (
            "attention ran as matmuls and a softmax (math), which keeps whole scores: no kernel takes this "
            "mask, dtype or head size"
        )
    if on_device and any(use.kernel == "efficient" and use.dtype in _HALF for use in uses):
        yield (
            "attention ran with the memory-efficient kernel, although flash or cuDNN are faster in half "
            "precision: they take no mask except the causal one, and head sizes up to 256"
        )


def kernel_table(summary: KernelSummary) -> list[tuple[str, ...]]:
    """Returns the header and a row for each kind. The last column is left out without calibrated rates."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for one in summary.kinds:
        rate, share = one.flops_per_second, one.share_of_calibrated
        rows.append(
            (
                str(one.kind),
                format_seconds(one.seconds),
                percent_text(one.seconds, summary.seconds),
                f"{one.count:,}",
                "" if rate is None else format_count(rate),
                "" if share is None else f"{100 * share:.0f} %",
            )
        )
    has_rates = any(one.share_of_calibrated is not None for one in summary.kinds)
    return rows if has_rates else [row[:-1] for row in rows]


def kernel_sentences(summary: KernelSummary) -> Iterable[str]:
    """Yields sentences about the step, the kernel of attention and idle time, and warnings."""
    what = "of the device" if summary.on_device else "of the thread that trains, by operation"
    yield f"Times {what} in {format_seconds(summary.seconds)} of {summary.name}, which profiling slowed down."
    if summary.attention:
        yield f"Attention ran with: {', '.join(summary.attention)}."
    if summary.on_device:
        idle = summary.host_late_seconds + summary.waiting_seconds
        yield (
            f"The device was idle for {format_seconds(idle)}: {format_seconds(summary.host_late_seconds)} "
            f"because the host was late, and {format_seconds(summary.waiting_seconds)} waiting. For "
            f"{format_seconds(summary.exposed_collective_seconds)} only collectives ran."
        )
    for warning in summary.warnings:
        yield f"{WARNING}{warning}."


def show_kernels(summary: KernelSummary) -> None:
    """Prints the table and the sentences."""
    header, *rows = kernel_table(summary)
    show_table(header, rows)
    for sentence in kernel_sentences(summary):
        print(sentence)
