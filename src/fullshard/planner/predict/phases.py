"""Order and costs of a trace's phases.

The schedule is the order of FSDP2's events on the model's units, with repeats stored once. The costs are of a
roofline model: each launch takes as long as the slower of its arithmetic and its memory traffic. Williams et
al., "Roofline", CACM 52(4), 2009. The rates are data (`Rates`): curves over the size of a launch.

[Note: grouped matmul]
The matrices of a mixture's experts are multiplied in one launch on Hopper and on Blackwell of data centres,
in bf16. With m rows of each matrix on average and tiles of t rows, the kernel computes m + t / 2 of them,
since the rows that come to an expert fill its last tile by half on average. At f FLOP per matrix so computed:

    rate = large matmul · part(f)

Elsewhere, and in other dtypes, torch multiplies one matrix after the other (`_grouped_mm_fallback`): each is
a launch with the rate of a matmul of its size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fullshard.errors import PlanError
from fullshard.spec import model
from fullshard.spec.machine.hardware import ComputeDtype, Curve, Rates, interpolate_rate
from fullshard.spec.plan import Dtype


class ScheduledPhase(NamedTuple):
    """One phase of a microbatch, as it runs on the model."""

    event: model.Event  # the FSDP2 event that opens it
    unit: int  # the model's unit; in a repeated segment, that of the first turn; -1 for none
    traced: int  # the traced unit that stands for it
    phase: int  # index of the phase in the trace


class ScheduleSegment(NamedTuple):
    """Phases that run in order, `times` times; each repeat advances by `stride` units of the model."""

    steps: tuple[ScheduledPhase, ...]
    times: int = 1
    stride: int = 0


@dataclass(frozen=True)
class MicrobatchSchedule:
    """Phases of one microbatch in the order in which they run, and the units they belong to."""

    segments: tuple[ScheduleSegment, ...]
    repeats: tuple[int, ...]  # number of times that each phase runs
    traced: tuple[int, ...]  # for each unit of the model, the traced unit that stands for it
    # for each unit of the model, the unit whose forward ended before each of its own forwards; -1 for none.
    # FSDP2 prefetches these units in backward.
    before: tuple[tuple[int, ...], ...]


def build_schedule(
    spec: model.ModelSpec, trace: model.MicrobatchTrace, *, phases: Sequence[model.TracePhase]
) -> MicrobatchSchedule:
    """Returns the schedule of `phases`. Raises PlanError if the trace and the model have different units."""
    traced, firsts = _map_units(spec, trace)
    segments: list[ScheduleSegment] = []
    turns = [1] * len(phases)
    for start, end, repeat in split_by_repeat(phases, trace.repeats):
        run = phases[start:end]
        times, units = (repeat.times, repeat.units) if repeat else (1, 0)
        descends = any(phase.event in ("pre_backward", "post_backward") for phase in run)
        last = (times - 1) * units if descends else 0
        steps = tuple(
            ScheduledPhase(p.event, firsts[p.unit] + last if p.unit >= 0 else -1, p.unit, i)
            for i, p in enumerate(run, start)
        )
        turns[start:end] = [times] * len(run)
        segments.append(ScheduleSegment(steps, times, -units if descends else units))
    has_parameters = [bool(spec.units[firsts[unit]].parameters) for unit in range(len(firsts))]
    before = _forward_predecessors(segments, count=len(spec.units), has_parameters=has_parameters)
    return MicrobatchSchedule(tuple(segments), tuple(turns), traced, before)


def split_by_repeat(
    phases: Sequence[model.TracePhase], repeats: Sequence[model.RepeatedUnits]
) -> list[tuple[int, int, model.RepeatedUnits | None]]:
    """Returns (start, end, repeat) of each run of phases inside one repeat, or outside of all (None).

    Phases without a unit belong to a repeat if phases of that repeat surround them.
    """
    of_unit = {unit: r for r in repeats for unit in range(r.first, r.first + r.units)}
    runs: list[tuple[int, int, model.RepeatedUnits | None]] = []
    start, current = 0, None
    pending = 0  # phases without a unit at the end of a run that may or may not continue
    for index, phase in enumerate(phases):
        if phase.unit < 0:
            pending += 1
            continue
        repeat = of_unit.get(phase.unit)
        if repeat is not current:
            end = index if current is None else index - pending
            runs.append((start, end, current))
            if end < index:
                runs.append((end, index, None))
            start, current = index, repeat
        pending = 0
    end = len(phases) if current is None else len(phases) - pending
    runs += [(start, end, current), (end, len(phases), None)]
    return [run for run in runs if run[0] < run[1]]


def _map_units(spec: model.ModelSpec, trace: model.MicrobatchTrace) -> tuple[tuple[int, ...], list[int]]:
    """Returns the traced unit of each unit of the model, and the first model unit of each traced unit."""
    starts: dict[int, model.RepeatedUnits] = {repeat.first: repeat for repeat in trace.repeats}
    missing = sum((repeat.times - 1) * repeat.units for repeat in trace.repeats)
    count = len(spec.units) - missing
    traced: list[int] = []
    firsts: list[int] = []
    unit = 0
    while unit < count:
        repeat = starts.get(unit)
        period = repeat.units if repeat else 1
        firsts += range(len(traced), len(traced) + period)
        traced += list(range(unit, unit + period)) * (repeat.times if repeat else 1)
        unit += period
    if len(traced) != len(spec.units):
        raise PlanError(
            f"the trace of {spec.name} is not of its units.",
            got=f"{len(traced)} units in the trace, {len(spec.units)} in the model",
            fix="describe(model, plan) again",
        )
    return tuple(traced), firsts


def _forward_predecessors(
    segments: Sequence[ScheduleSegment], *, count: int, has_parameters: Sequence[bool]
) -> tuple[tuple[int, ...], ...]:
    before: list[list[int]] = [[] for _ in range(count)]
    last = -1
    for segment in segments:
        ends = [s for s in segment.steps if s.event == "post_forward" and has_parameters[s.traced]]
        for turn in range(segment.times if ends else 0):
            for step in ends:
                unit = step.unit + turn * segment.stride
                before[unit].append(last)
                last = unit
    return tuple(tuple(units) for units in before)


# Fallback order if a dtype has no curve: first dtypes of the same compute units, then wider ones.
_NEAREST: dict[Dtype | Literal["fp8"], tuple[ComputeDtype, ...]] = {
    "fp8": ("fp8", "bf16"),  # where fp8 was not measured, it is at least as fast as bf16
    "fp32": ("fp32", "tf32", "bf16", "fp16"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
}

_NO_ROWS = model.LinearInMicrobatch()
_COPIED_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_PASSES_OF_COPIES = 2  # times that the tensor of such a collective is read or written, before and after it


class PhaseSecondsAndLaunches(NamedTuple):
    """Cost of a phase: device time in `seconds`, and the number of kernels that the host launches."""

    seconds: float
    launches: float


def kernel_seconds(kernel: model.Kernel, rates: Rates, *, microbatch: int) -> float:
    """Returns the seconds of one launch of a kernel, or of all of its pieces.

        max(flops / rate(flops), bytes / memory(bytes))

    The FLOP rate is that of the kernel's kind and nearest dtype, times `rates.unaligned_matmul` for matrices
    that tensor cores cannot load in vectors, or a factor for the width of attention's heads. Elementwise
    launches count bytes only, in half precision at a part of the rate. See [Note: grouped matmul] for the
    rate of experts.
    Of collectives, only the copies around them count here: see `planner.predict.collectives`.
    """
    if kernel.axis is not None:
        return memory_access_seconds(_bytes_to_reorder_collective(kernel, microbatch), rates.memory)
    pieces = count_kernel_launches(kernel, rates, microbatch=microbatch)
    moved = pieces * memory_access_seconds(kernel.bytes.value_at(microbatch) / pieces, rates.memory)
    if kernel.kind not in ("matmul", "attention", "attention_backward"):
        return moved / (rates.half_memory if kernel.dtype in ("bf16", "fp16") else 1.0)
    flops = kernel.flops.value_at(microbatch)
    if flops <= 0:
        return moved
    curve = nearest_dtype_rate_curve(getattr(rates, kernel.kind), kernel.dtype)
    rate = interpolate_rate(curve, flops / pieces) * (rates.unaligned_matmul if kernel.unaligned else 1.0)
    if rates.grouped_matmul is not None and _is_one_grouped_launch(kernel, rates):
        rows = kernel.rows.value_at(microbatch)
        flops *= (rows + rates.grouped_tile_rows / 2) / rows
        each = flops / max(1.0, kernel.pieces.value_at(microbatch))
        rate = curve[-1].rate * interpolate_rate(rates.grouped_matmul, each)
    if kernel.head_dim:
        rate *= interpolate_rate(_factors_by_head_dim(kernel, rates), kernel.head_dim)
    return max(flops / rate, moved)


def _factors_by_head_dim(kernel: model.Kernel, rates: Rates) -> Curve:
    """Returns the factors on the rates of attention by the width of a head, of the kernel that runs."""
    forward = kernel.kind == "attention"
    by_flash = rates.flash_by_head_dim if forward else rates.flash_backward_by_head_dim
    if kernel.by_flash and by_flash is not None:
        return by_flash
    return rates.attention_by_head_dim if forward else rates.attention_backward_by_head_dim


def _bytes_to_reorder_collective(kernel: model.Kernel, microbatch: int) -> float:
    """Returns the bytes that are read and written to bring the parts of a collective into the order of ranks.

    0 for ranks that share the matmuls of a single sequence, whose parts are in this order already, and for
    rows of experts, which operations of their own copy.
    """
    if (kernel.axis == "tensor" and microbatch == 1) or kernel.kind not in _COPIED_COLLECTIVES:
        return 0.0
    return _PASSES_OF_COPIES * kernel.bytes.value_at(microbatch)


def count_kernel_launches(kernel: model.Kernel, rates: Rates, *, microbatch: int) -> float:
    """Returns the number of launches of which a kernel consists, 1 or more."""
    return 1.0 if _is_one_grouped_launch(kernel, rates) else max(1.0, kernel.pieces.value_at(microbatch))


def _is_one_grouped_launch(kernel: model.Kernel, rates: Rates) -> bool:
    return kernel.rows != _NO_ROWS and kernel.dtype == "bf16" and rates.grouped_matmul is not None


def memory_access_seconds(byte_count: float, curve: Curve) -> float:
    """Returns the seconds of one launch that reads and writes `byte_count` bytes in all; 0 for 0 bytes."""
    return byte_count / interpolate_rate(curve, byte_count) if byte_count > 0 else 0.0


def nearest_dtype_rate_curve(curves: Mapping[ComputeDtype, Curve], dtype: Dtype | Literal["fp8"]) -> Curve:
    """Returns the curve of `dtype`, or of the nearest dtype that has one. Raises PlanError if none has."""
    for name in _NEAREST[dtype]:
        if name in curves:
            return curves[name]
    raise PlanError(
        f"the hardware has no rate for {dtype}.",
        got=f"rates for {', '.join(curves) or 'nothing'}",
        fix="fullshard calibrate, which measures them",
    )


def phase_costs(
    phases: Sequence[model.TracePhase],
    kernels: Sequence[model.Kernel],
    *,
    rates: Rates,
    microbatch: int,
    received: float = 1.0,
) -> tuple[PhaseSecondsAndLaunches, ...]:
    """Returns the cost of each phase. `received`: rows that come to this rank's experts, over the mean."""
    seconds: dict[int, float] = {}
    costs: list[PhaseSecondsAndLaunches] = []
    for phase in phases:
        total, launches = 0.0, 0.0
        for index, times in phase.work:
            if index not in seconds:
                factor = received if kernels[index].received else 1.0
                seconds[index] = factor * kernel_seconds(kernels[index], rates, microbatch=microbatch)
            total += seconds[index] * times
            launches += times * count_kernel_launches(kernels[index], rates, microbatch=microbatch)
        costs.append(PhaseSecondsAndLaunches(total, launches))
    return tuple(costs)
