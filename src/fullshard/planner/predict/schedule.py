"""Schedule of a trace: the order of FSDP2's events on the model's units, with repeats stored once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.errors import PlanError
from fullshard.spec.model import Event, MicrobatchTrace, ModelSpec, RepeatedUnits, TracePhase


class ScheduledPhase(NamedTuple):
    """One phase of a microbatch, as it runs on the model."""

    event: Event  # the FSDP2 event that opens it
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

    @property
    def first_model_unit_per_traced(self) -> tuple[int, ...]:
        """First unit of the model that each traced unit stands for."""
        found: dict[int, int] = {}
        for unit, traced in enumerate(self.traced):
            found.setdefault(traced, unit)
        return tuple(found[traced] for traced in range(len(found)))


def build_schedule(
    spec: ModelSpec, trace: MicrobatchTrace, *, phases: Sequence[TracePhase]
) -> MicrobatchSchedule:
    """Returns the schedule of `phases`. Raises PlanError if the trace and the model have different units."""
    traced, firsts = _map_traced_units(spec, trace)
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
    phases: Sequence[TracePhase], repeats: Sequence[RepeatedUnits]
) -> list[tuple[int, int, RepeatedUnits | None]]:
    """Returns (start, end, repeat) of each run of phases inside one repeat, or outside of all (None).

    Phases without a unit belong to a repeat if phases of that repeat surround them.
    """
    of_unit = {unit: r for r in repeats for unit in range(r.first, r.first + r.units)}
    runs: list[tuple[int, int, RepeatedUnits | None]] = []
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


def _map_traced_units(spec: ModelSpec, trace: MicrobatchTrace) -> tuple[tuple[int, ...], list[int]]:
    """Returns the traced unit of each unit of the model, and the first model unit of each traced unit."""
    starts: dict[int, RepeatedUnits] = {repeat.first: repeat for repeat in trace.repeats}
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
