"""Times of a profiled step by kind of kernel, for the terminal and for the page."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.quantities import format_seconds
from fullshard.report.profiled_step import (
    DeviceWork,
    HostOperation,
    KernelTrace,
    Work,
    disjoint_works,
    read_kernel_trace,
)
from fullshard.report.step_traces import earlier_attempt_text, list_profiles
from fullshard.report.table import percent_text, show_labelled_lines, show_table
from fullshard.spec.records.step_spans import COLLECTIVES, RANGE_PREFIX


class StepWorkKind(StrEnum):
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
KERNEL_HEADER = ("kernels", "time", "share", "count")
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
    (StepWorkKind.COLLECTIVES, re.compile(r"nccl", re.I)),
    (StepWorkKind.ATTENTION, re.compile(r"flash_|fmha|attention|sdpa|flex_", re.I)),
    (StepWorkKind.MATMUL, re.compile(r"gemm|cutlass|xmma|nvjet|wgmma|cublas|_mm_|matmul|triton_tem", re.I)),
    (StepWorkKind.NORM, _NORM),
    (StepWorkKind.COPIES, re.compile(r"memcpy|memset|copy_kernel|CatArray|split_with_sizes", re.I)),
    (StepWorkKind.OPTIMIZER, re.compile(r"FusedAdam|multi_tensor_apply", re.I)),
)

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


@dataclass(frozen=True)
class StepWorkTime:
    """The time of one kind of kernel in a step, or of the host's operations on the CPU, and their number."""

    kind: StepWorkKind
    seconds: float
    count: int


@dataclass(frozen=True)
class KernelSummary:
    """The times of a profiled step on one rank. Profiling makes the host slower than usual.

    name: file of the profile
    seconds: from the first operation to the last
    on_device: whether kernels of a device were recorded; else the times are the host's
    kinds: times by kind, the largest first. Time in which kernels of one kind overlap counts once.
    host_late_seconds: time in which the device was idle because the host had not launched its next kernel
    waiting_seconds: other time in which the device was idle: dependencies, and the delay of a launch
    attention: kernels with which attention ran
    attempt: number of the run's attempt that made the profile
    """

    name: str
    seconds: float
    on_device: bool
    kinds: tuple[StepWorkTime, ...]
    host_late_seconds: float = 0.0
    waiting_seconds: float = 0.0
    attention: tuple[str, ...] = ()
    attempt: int = 1


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
    works = [Work(one.begin, one.end, _device_kind(one)) for one in trace.device]
    works = works or [Work(one.begin, one.end, _host_kind(one)) for one in operations]
    counts = Counter(one.name for one in works)
    attention = {_ATTENTION_KERNELS.get(_name_without_library(one.name), "") for one in trace.host} - {""}
    late, waiting = _host_late_and_other_idle_seconds(trace.device)
    begin = min((one.begin for one in (*operations, *trace.device)), default=0.0)
    end = max((one.end for one in (*operations, *trace.device)), default=0.0)
    # Kernels of two kinds may run at once: each counts. The host's time is of the operation that began last.
    groups = [[one for one in works if one.name == kind] for kind in counts] if trace.device else [works]
    spans = [span for each in groups for span in disjoint_works(each, begin=begin, end=end, idle="")]
    seconds = {kind: sum(one.end - one.begin for one in spans if one.name == kind) * 1e-6 for kind in counts}
    kinds = [StepWorkTime(StepWorkKind(kind), seconds[kind], count) for kind, count in counts.items()]
    return KernelSummary(
        name=name,
        seconds=(end - begin) * 1e-6,
        on_device=bool(trace.device),
        kinds=tuple(sorted(kinds, key=lambda one: -one.seconds)),
        host_late_seconds=late,
        waiting_seconds=waiting,
        attention=tuple(sorted(attention)),
        attempt=trace.attempt,
    )


def _host_late_and_other_idle_seconds(works: Sequence[DeviceWork]) -> tuple[float, float]:
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


def _operations_of_busiest_thread(host: Sequence[HostOperation]) -> list[HostOperation]:
    """Returns the operations of the training thread: the one with the most operations of torch."""
    counts: dict[object, int] = defaultdict(int)
    for one in host:
        counts[one.thread] += one.name.startswith("aten::")
    busiest = max(counts, key=lambda thread: counts[thread], default=None)
    return [one for one in host if one.thread == busiest]


def _host_kind(operation: HostOperation) -> StepWorkKind:
    """Returns the kind of the time that the host spends in `operation` itself."""
    ranges = [one.name for one in operation.iterate_self_and_callers()]
    if any(name.startswith(_COLLECTIVE_RANGES) for name in ranges):
        return StepWorkKind.COLLECTIVES
    found = _kind_of_ranges(ranges)
    name = _name_without_library(operation.name)
    if found is StepWorkKind.COPIES or found is None:
        if name in _MATMULS:
            return StepWorkKind.MATMUL
        if name in _COPIES:
            return StepWorkKind.COPIES
    if found is not None:
        return found
    is_operation = operation.name.startswith("aten::") and name not in _NO_WORK
    return StepWorkKind.POINTWISE if is_operation else StepWorkKind.HOST


def _device_kind(work: DeviceWork) -> StepWorkKind:
    """Returns the kind of a kernel or copy of the device."""
    if "nccl" in work.name.lower():
        return StepWorkKind.COLLECTIVES
    ranges = [] if work.launch is None else [one.name for one in work.launch.iterate_self_and_callers()]
    found = _kind_of_ranges(ranges)
    if found is not None:
        return found
    if work.is_copy:
        return StepWorkKind.COPIES
    operation = next((_name_without_library(name) for name in ranges if name.startswith("aten::")), "")
    if operation in _MATMULS:
        return StepWorkKind.MATMUL
    if operation in _COPIES:
        return StepWorkKind.COPIES
    return next((kind for kind, name in _KERNEL_NAMES if name.search(work.name)), StepWorkKind.POINTWISE)


def _kind_of_ranges(ranges: list[str]) -> StepWorkKind | None:
    """Returns the kind by the enclosing operations and ranges; None if they do not determine it."""
    if any(name.startswith(_OPTIMIZER_RANGES) for name in ranges):
        return StepWorkKind.OPTIMIZER
    if any(_ATTENTION.search(name) for name in ranges):
        return StepWorkKind.ATTENTION
    if any(name.startswith(_ENGINE) and not name.startswith(_ENGINE_CASTS) for name in ranges):
        return StepWorkKind.COPIES  # in and out of the collectives' buffers
    return StepWorkKind.NORM if any(_NORM.search(name) for name in ranges) else None


def _name_without_library(name: str) -> str:
    """Returns the name of an operation without its library."""
    return name.rpartition("::")[2]


def kernel_table(summary: KernelSummary) -> list[tuple[str, ...]]:
    """Returns a row for each kind, with the cells of KERNEL_HEADER."""
    return [
        (
            str(one.kind),
            format_seconds(one.seconds),
            percent_text(one.seconds, summary.seconds),
            f"{one.count:,}",
        )
        for one in summary.kinds
    ]


def kernel_sentences(summary: KernelSummary, *, attempts: int) -> Iterable[str]:
    """Yields sentences about the step, the kernel of attention and idle time, and warnings.

    attempts: number of the run's attempts, of which an earlier one may have made the profile
    """
    profile = summary.name + earlier_attempt_text(summary.attempt, attempts=attempts)
    what = "of the device" if summary.on_device else "of the thread that trains, by operation"
    yield f"Times {what} in {format_seconds(summary.seconds)} of {profile}, which profiling slowed down."
    if summary.attention:
        yield f"Attention ran with: {', '.join(summary.attention)}."
    if summary.on_device:
        idle = summary.host_late_seconds + summary.waiting_seconds
        yield (
            f"The device was idle for {format_seconds(idle)}: {format_seconds(summary.host_late_seconds)} "
            f"because the host was late, and {format_seconds(summary.waiting_seconds)} waiting."
        )
    if "math" in summary.attention:
        yield (
            f"{WARNING}attention ran as matmuls and a softmax (math), which keeps whole scores: no kernel "
            "takes this mask, dtype or head size."
        )


def show_kernels(summary: KernelSummary, *, attempts: int) -> None:
    """Prints the table, and the sentences of `kernel_sentences`."""
    show_table(KERNEL_HEADER, kernel_table(summary))
    show_labelled_lines([("", sentence) for sentence in kernel_sentences(summary, attempts=attempts)])
