"""Live bytes of a trace at one microbatch size, with only a few of its repeated periods.

[Note: skipping periods]
Equal units in the middle of a model behave equally: from one period to the next, live bytes grow or shrink by
the same amount. So the peak of a run of periods is in the first or the last period. The periods in between
are skipped; only their change of live bytes is needed. A few periods are shown on either side, as many as
FSDP2 can reach ahead (prefetch).
"""

from dataclasses import dataclass
from typing import NamedTuple

from fullshard.planner.predict.schedule import split_by_repeat
from fullshard.spec.model import Event, LiveTensorBytes, MicrobatchTrace, ModelSpec, RepeatedUnits, TracePhase
from fullshard.spec.plan import Plan


class LiveBytes(NamedTuple):
    """Live bytes by kind; see `fullshard.spec.model.LiveTensorBytes`."""

    activations: int = 0
    loss: int = 0
    backward: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.loss + self.backward + self.gradients


class PhaseBytes(NamedTuple):
    """Live bytes at the highest moment and at the end of one phase."""

    event: Event  # the FSDP2 event that opens it
    unit: int  # index of its unit among those shown; -1 if it has none
    phase: int  # index in the trace
    peak: LiveBytes  # bytes at its highest moment
    end: LiveBytes  # bytes at its end; after a phase with `skipped_periods`, at the end of the skipped ones
    starts_period: bool = False  # it begins a period
    skipped_periods: int = 0  # on the phase that ends a period, the number of equal periods skipped after it


@dataclass(frozen=True)
class MemoryTrace:
    """Phases of a trace. `units`: for each unit that the phases refer to, its index in the spec."""

    phases: tuple[PhaseBytes, ...]
    units: tuple[int, ...]


def memory_trace(spec: ModelSpec, plan: Plan, *, reach: int, accumulating: bool = False) -> MemoryTrace:
    """Returns the live bytes of each phase of the plan's trace, cached on `spec` for repeated calls.

    reach: the most units ahead that FSDP2 prefetches. See [Note: skipping periods].
    accumulating: earlier microbatches left unsharded gradients.
    """
    microbatch, trace = plan.microbatch, spec.trace_for_plan(plan)
    key = (id(trace), microbatch, reach, accumulating)
    found = spec.derived_value_cache.get(key)
    if not isinstance(found, MemoryTrace):
        units = len(spec.units)
        found = _skip_periods(trace, microbatch, units=units, reach=reach, accumulating=accumulating)
        spec.derived_value_cache[key] = found
    return found


def _skip_periods(
    trace: MicrobatchTrace, microbatch: int, *, units: int, reach: int, accumulating: bool
) -> MemoryTrace:
    traced = trace.accumulating if accumulating else trace.phases
    shown = {repeat: min(repeat.times, 2 * (reach // repeat.units) + 3) for repeat in trace.repeats}
    # One period's part of forward or of backward, by its first phase.
    runs = split_by_repeat(traced, trace.repeats)
    periods = {start: (end, repeat) for start, end, repeat in runs if repeat}
    phases: list[PhaseBytes] = []
    shift, at, done = LiveBytes(), 0, set[RepeatedUnits]()
    while at < len(traced):
        if at not in periods:
            phase = _phase_bytes(traced[at], at, microbatch=microbatch, shift=shift)
            phases.append(phase._replace(unit=_shown_unit_index(phase.unit, 0, shown=shown)))
            at += 1
            continue
        end, repeat = periods[at]
        before, after = (_live_bytes(traced[index].end, microbatch) for index in (at - 1, end - 1))
        growth = _add_bytes(after, before, times=-1)
        copies = shown[repeat]
        backward = repeat in done  # from the last period to the first
        done.add(repeat)
        for number in range(copies):
            skips = repeat.times - copies if number == copies // 2 else 0
            for index in range(at, end):
                phase = _phase_bytes(traced[index], index, microbatch=microbatch, shift=shift)
                copy = copies - 1 - number if backward else number
                phase = phase._replace(unit=_shown_unit_index(phase.unit, copy, shown=shown))
                if index == end - 1:
                    last = _add_bytes(phase.end, growth, times=skips)
                    phase = phase._replace(skipped_periods=skips, end=last)
                phases.append(phase._replace(starts_period=index == at and skips > 0))
            shift = _add_bytes(shift, growth, times=skips + (number < copies - 1))
        at = end
    return MemoryTrace(tuple(phases), _spec_indices_of_shown_units(shown, units=units))


def _shown_unit_index(unit: int, copy: int, *, shown: dict[RepeatedUnits, int]) -> int:
    """Returns the index of copy `copy` of a traced unit among the units shown."""
    place = unit
    for repeat in shown:
        if unit >= repeat.first + repeat.units:
            place += (shown[repeat] - 1) * repeat.units
        elif unit >= repeat.first:
            place += copy * repeat.units
    return place


def _spec_indices_of_shown_units(shown: dict[RepeatedUnits, int], *, units: int) -> tuple[int, ...]:
    """Returns the spec index of each unit shown: of repeated units, the first and the last copies."""
    found: list[int] = []
    index = skipped = 0
    for repeat in sorted(shown, key=lambda one: one.first):
        first = repeat.first + skipped
        found += range(index, first)
        for copy in range(shown[repeat]):
            period = copy if copy <= shown[repeat] // 2 else repeat.times - shown[repeat] + copy
            found += range(first + period * repeat.units, first + (period + 1) * repeat.units)
        index = first + repeat.times * repeat.units
        skipped += (repeat.times - 1) * repeat.units
    return (*found, *range(index, units))


def _phase_bytes(phase: TracePhase, index: int, *, microbatch: int, shift: LiveBytes) -> PhaseBytes:
    peaks = (_live_bytes(moment, microbatch) for moment in phase.peaks)
    peak = max(peaks, key=lambda live: live.total)
    end = _live_bytes(phase.end, microbatch)
    return PhaseBytes(phase.event, phase.unit, index, _add_bytes(peak, shift), _add_bytes(end, shift))


def _live_bytes(moment: LiveTensorBytes, microbatch: int) -> LiveBytes:
    return LiveBytes(*(round(line.value_at(microbatch)) for line in moment))


def _add_bytes(live: LiveBytes, change: LiveBytes, *, times: int = 1) -> LiveBytes:
    return LiveBytes(*(a + times * b for a, b in zip(live, change, strict=True)))
