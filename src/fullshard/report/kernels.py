"""Times of a profiled step by kind of kernel, with achieved rates, for the terminal and for the page."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.quantities import format_count, format_seconds
from fullshard.report.kernel_kinds import (
    AttentionKernelUse,
    CountedFlops,
    KernelKind,
    attention_kernel,
    counted_flops,
    device_kind,
    host_kind,
)
from fullshard.report.kernel_trace import DeviceWork, HostOperation, KernelTrace, read_kernel_trace
from fullshard.report.markup import escape, percent_text, table
from fullshard.report.measured_steps import list_profiles
from fullshard.report.table import show_table
from fullshard.spec.hardware import Rates, interpolate_rate

_HALF = ("bf16", "fp16")
_WARNING = "Warning: "
_HEADER = ("kernels", "time", "share", "count", "FLOP/s", "of calibrated")


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
    tally = _Tally(rates)
    operations = _operations_of_busiest_thread(trace.host)
    if trace.device:
        for work in trace.device:
            seconds = (work.end - work.begin) * 1e-6
            tally.add(device_kind(work), seconds, within=work.launch)
    else:
        for one in operations:
            tally.add(host_kind(one), one.own_seconds, within=one)
    uses = {use for one in trace.host if (use := attention_kernel(one)) is not None}
    busy = _DeviceIdle.of_works(trace.device)
    begin = min((one.begin for one in (*operations, *trace.device)), default=0.0)
    end = max((one.end for one in (*operations, *trace.device)), default=0.0)
    return KernelSummary(
        name=name,
        seconds=(end - begin) * 1e-6,
        on_device=bool(trace.device),
        kinds=tally.kinds(),
        exposed_collective_seconds=busy.exposed_collective_seconds,
        host_late_seconds=busy.host_late_seconds,
        waiting_seconds=busy.waiting_seconds,
        attention=tuple(sorted({use.kernel for use in uses})),
        warnings=tuple(_attention_warnings(uses, on_device=bool(trace.device))),
    )


class _Tally:
    """Sums of seconds and FLOP by kind."""

    def __init__(self, rates: Rates | None) -> None:
        self._rates = rates
        self._seconds: dict[KernelKind, float] = defaultdict(float)
        self._counts: dict[KernelKind, int] = defaultdict(int)
        self._counted: dict[KernelKind, float] = defaultdict(float)
        self._sources: dict[KernelKind, dict[int, CountedFlops]] = defaultdict(dict)

    def add(self, kind: KernelKind, seconds: float, *, within: HostOperation | None) -> None:
        """Adds a kernel, or the time of the host in an operation. `within`: innermost operation around it."""
        self._seconds[kind] += seconds
        self._counts[kind] += 1
        if kind not in (KernelKind.MATMUL, KernelKind.ATTENTION) or within is None:
            return
        for one in within.chain():
            flops = counted_flops(one)
            if flops is not None:  # all kernels of one operation share its FLOP
                self._counted[kind] += seconds
                self._sources[kind][id(one)] = flops
                return

    def kinds(self) -> tuple[KindTime, ...]:
        made = [
            KindTime(
                kind,
                seconds,
                self._counts[kind],
                flops=sum(one.flops for one in self._sources[kind].values()),
                counted_seconds=self._counted[kind],
                calibrated_seconds=self._calibrated_seconds(self._sources[kind].values()),
            )
            for kind, seconds in self._seconds.items()
        ]
        return tuple(sorted(made, key=lambda one: -one.seconds))

    def _calibrated_seconds(self, works: Iterable[CountedFlops]) -> float | None:
        total = 0.0
        for one in works:
            curves = {} if self._rates is None else getattr(self._rates, one.rates)
            if one.dtype not in curves:
                return None
            total += one.flops / interpolate_rate(curves[one.dtype], one.flops)
        return total or None


@dataclass(frozen=True)
class _DeviceIdle:
    """The time in which the device computed nothing."""

    exposed_collective_seconds: float = 0.0
    host_late_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @classmethod
    def of_works(cls, works: Sequence[DeviceWork]) -> "_DeviceIdle":
        """Returns the idle time between the works, which are sorted by their begin."""
        if not works:
            return cls()
        reached, late, waiting = works[0].begin, 0.0, 0.0
        for work in works:
            if work.begin > reached:
                launched = reached if work.launch is None else min(max(work.launch.end, reached), work.begin)
                late += launched - reached
                waiting += work.begin - launched
            reached = max(reached, work.end)
        computing = [one for one in works if device_kind(one) is not KernelKind.COLLECTIVES]
        exposed = _covered(works) - _covered(computing)
        return cls(exposed * 1e-6, late * 1e-6, waiting * 1e-6)


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


def _attention_warnings(uses: Iterable[AttentionKernelUse], *, on_device: bool) -> Iterable[str]:
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
        yield f"{_WARNING}{warning}."


def show_kernels(summary: KernelSummary) -> None:
    """Prints the table and the sentences."""
    header, *rows = kernel_table(summary)
    show_table(header, rows)
    for sentence in kernel_sentences(summary):
        print(sentence)


def kernel_section(summary: KernelSummary | None) -> str:
    """Returns the table and the sentences as HTML; "" without a profile."""
    if summary is None:
        return ""
    header, *rows = kernel_table(summary)
    cells = [[escape(text) for text in row] for row in rows]
    said = "".join(
        f'<p class="{"bad" if one.startswith(_WARNING) else "dim"}">{escape(one)}'
        for one in kernel_sentences(summary)
    )
    return f'<div class="scroll">{table(header, cells)}</div>{said}'
