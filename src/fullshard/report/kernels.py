"""Times of a profiled step by kind of kernel, with achieved rates, for the terminal and for the page."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError
from fullshard.quantities import format_count, format_seconds
from fullshard.report.profiled_step import DeviceWork, HostOperation, KernelTrace, read_kernel_trace
from fullshard.report.step_traces import list_profiles
from fullshard.report.table import percent_text, show_table
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


WARNING = "Warning: "
"""Beginning of a sentence that warns."""
KERNEL_HEADER = ("kernels", "time", "share", "count", "FLOP/s")
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


@dataclass
class KindTime:
    """The time of one kind of kernel in a step.

    seconds: of its kernels, or of the host's operations on the CPU
    count: number of kernels or operations
    flops, counted_seconds: FLOP of those whose shapes are known, and their time
    """

    kind: KernelKind
    seconds: float = 0.0
    count: int = 0
    flops: float = 0.0
    counted_seconds: float = 0.0

    @property
    def flops_per_second(self) -> float | None:
        return self.flops / self.counted_seconds if self.flops and self.counted_seconds else None


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
    """

    name: str
    seconds: float
    on_device: bool
    kinds: tuple[KindTime, ...]
    exposed_collective_seconds: float = 0.0
    host_late_seconds: float = 0.0
    waiting_seconds: float = 0.0
    attention: tuple[str, ...] = ()


def summarise_last_profile(directory: Path) -> KernelSummary | None:
    """Returns the summary of the last profiled step on its first rank; None without a readable profile."""
    profiles = list_profiles(directory)
    if not profiles:
        return None
    last = next(iter(profiles[max(profiles)].values()))
    try:
        return summarise_kernels(read_kernel_trace(last), name=last.name)
    except SpecError:
        return None


def summarise_kernels(trace: KernelTrace, *, name: str) -> KernelSummary:
    """Returns the times of a profiled step. `name`: its file."""
    operations = _operations_of_busiest_thread(trace.host)
    works = [(_device_kind(one), (one.end - one.begin) * 1e-6, one.launch) for one in trace.device]
    if not works:
        works = [(_host_kind(one), one.own_seconds, one) for one in operations]
    attention = {_ATTENTION_KERNELS.get(_bare_name(one.name), "") for one in trace.host} - {""}
    late, waiting = _idle_seconds(trace.device)
    computing = [one for one in trace.device if _device_kind(one) is not KernelKind.COLLECTIVES]
    begin = min((one.begin for one in (*operations, *trace.device)), default=0.0)
    end = max((one.end for one in (*operations, *trace.device)), default=0.0)
    return KernelSummary(
        name=name,
        seconds=(end - begin) * 1e-6,
        on_device=bool(trace.device),
        kinds=_sum_by_kind(works),
        exposed_collective_seconds=(_covered(trace.device) - _covered(computing)) * 1e-6,
        host_late_seconds=late,
        waiting_seconds=waiting,
        attention=tuple(sorted(attention)),
    )


def _sum_by_kind(works: Iterable[tuple[KernelKind, float, HostOperation | None]]) -> tuple[KindTime, ...]:
    """Returns the sums of (kind, seconds, innermost operation around it), the largest first."""
    found: dict[KernelKind, KindTime] = {}
    counted: set[HostOperation] = set()
    for kind, seconds, within in works:
        one = found.setdefault(kind, KindTime(kind))
        one.seconds += seconds
        one.count += 1
        if kind in (KernelKind.MATMUL, KernelKind.ATTENTION) and within is not None:
            # All kernels of one operation share its FLOP.
            around = ((each, flops) for each in within.chain() if (flops := _count_flops(each)))
            operation, flops = next(around, (None, 0.0))
            if operation is not None:
                one.counted_seconds += seconds
                one.flops += 0.0 if operation in counted else flops
                counted.add(operation)
    return tuple(sorted(found.values(), key=lambda one: -one.seconds))


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


def _count_flops(operation: HostOperation) -> float:
    """Returns the FLOP of a matmul or of attention by its shapes; 0 for other operations.

    Causal attention counts the pairs of positions that it computes, as `fullshard calibrate` does.
    """
    name = _bare_name(operation.name)
    if name in _ATTENTION_ARGUMENTS:
        place, causal_place = _ATTENTION_ARGUMENTS[name]
        query, key = _shape(operation, place), _shape(operation, place + 1)
        if len(query) != 4 or len(key) != 4:
            return 0.0
        rows, columns = query[2], key[2]
        causal = causal_place < len(operation.values) and operation.values[causal_place] == "True"
        pairs = rows * (columns - rows) + rows * (rows + 1) // 2 if causal else rows * columns
        return float((10 if name.endswith("_backward") else 4) * query[0] * query[1] * query[3] * pairs)
    if name not in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        return 0.0
    first = {"addmm": 1, "baddbmm": 1}.get(name, 0)
    left, right = _shape(operation, first), _shape(operation, first + 1)
    if len(left) not in (2, 3) or len(right) != len(left):
        return 0.0
    return 2.0 * math.prod(left) * right[-1]


def _shape(operation: HostOperation, argument: int) -> list[int]:
    shape: Any = operation.dims[argument] if argument < len(operation.dims) else []
    is_shape = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    return shape if is_shape else []


def kernel_table(summary: KernelSummary) -> list[tuple[str, ...]]:
    """Returns a row for each kind, with the cells of KERNEL_HEADER."""
    return [
        (
            str(one.kind),
            format_seconds(one.seconds),
            percent_text(one.seconds, summary.seconds),
            f"{one.count:,}",
            "" if one.flops_per_second is None else format_count(one.flops_per_second),
        )
        for one in summary.kinds
    ]


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
    if "math" in summary.attention:
        yield (
            f"{WARNING}attention ran as matmuls and a softmax (math), which keeps whole scores: no kernel "
            "takes this mask, dtype or head size."
        )


def show_kernels(summary: KernelSummary) -> None:
    """Prints the table and the sentences."""
    show_table(KERNEL_HEADER, kernel_table(summary))
    for sentence in kernel_sentences(summary):
        print(sentence)
