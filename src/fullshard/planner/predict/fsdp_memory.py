"""Live bytes of a trace, and the replay of what FSDP2 allocates: see [Note: the replay] in `memory`.

[Note: skipping periods]
Equal units in the middle of a model behave equally: from one period to the next, live bytes grow or shrink by
the same amount. So the peak of a run of periods is in the first or the last period. The periods in between
are skipped; only their change of live bytes is needed. A few periods are shown on either side, because FSDP2
prefetches one unit ahead.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from fullshard.planner.predict.phases import split_by_repeat
from fullshard.planner.predict.unit_bytes import UnitBytes
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
    starts_period: bool = False  # it begins a period after which equal ones are skipped
    skipped_periods: int = 0  # on the phase that ends a period, the number of equal periods skipped after it


@dataclass(frozen=True)
class MemoryTrace:
    """Live bytes in the phases of a trace, without skipped periods.

    units: for each unit that the phases refer to, its index in the spec
    """

    phases: tuple[PhaseBytes, ...]
    units: tuple[int, ...]


def memory_trace(spec: ModelSpec, plan: Plan, *, accumulating: bool = False) -> MemoryTrace:
    """Returns the live bytes of each phase of the plan's trace, cached on `spec` for repeated calls.

    accumulating: earlier microbatches left unsharded gradients.
    """
    microbatch, trace = plan.microbatch, spec.trace_for_plan(plan)
    key = (id(trace), microbatch, accumulating)
    found = spec.derived_value_cache.get(key)
    if not isinstance(found, MemoryTrace):
        units = len(spec.units)
        found = _build_memory_trace(trace, microbatch, units=units, accumulating=accumulating)
        spec.derived_value_cache[key] = found
    return found


def _build_memory_trace(
    trace: MicrobatchTrace, microbatch: int, *, units: int, accumulating: bool
) -> MemoryTrace:
    traced = trace.accumulating if accumulating else trace.phases
    # See [Note: skipping periods].
    shown = {repeat: min(repeat.times, 5 if repeat.units == 1 else 3) for repeat in trace.repeats}
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


MAX_OFFLOADING_GRADIENTS = 2  # units whose gradients are in transit to the host at once


class FsdpBytes(NamedTuple):
    """Bytes that FSDP2 has allocated at one moment, by purpose."""

    in_flight: int = 0  # unsharded parameters and reduce-scatter inputs
    buffers: int = 0  # all-gather buffers, allocated on the all-gather stream
    reduced: int = 0  # reduce-scatter outputs, not yet gradients, allocated on the reduce-scatter stream
    gradients: int = 0  # sharded gradients, allocated on the reduce-scatter stream
    whole: int = 0  # unsharded gradients, kept until the last microbatch reduces them
    chunks: int = 0  # the part of `reduced` that lives until the end of backward


_FSDP_BYTES = attrgetter(*FsdpBytes._fields)


class MemoryLedger:
    """Bytes that FSDP2 has allocated now and at the highest moment, and the peak of each stream.

    Streams do not reuse each other's memory, so the allocator reserves the sum of their peaks.
    """

    def __init__(self) -> None:
        self.in_flight = self.buffers = self.reduced = self.gradients = self.whole = self.chunks = 0
        self.moment: tuple[str, int] = ("", -1)  # event, index of its unit
        self.highest = -1
        self.best: tuple[tuple[str, int], FsdpBytes, LiveBytes] = (self.moment, FsdpBytes(), LiveBytes())
        self.compute_pool = self.gather_pool = self.reduce_pool = 0

    def update_peaks(self, live: LiveBytes) -> None:
        """Updates the peaks with this moment. `live`: bytes of the model's own computation."""
        computed = self.in_flight + self.whole + live[0] + live[1] + live[2] + live[3]
        reduced = self.reduced + self.gradients
        held = computed + self.buffers + reduced
        # A search comes here millions of times, and `max` takes three times as long.
        self.compute_pool = computed if computed > self.compute_pool else self.compute_pool
        self.gather_pool = self.buffers if self.buffers > self.gather_pool else self.gather_pool
        self.reduce_pool = reduced if reduced > self.reduce_pool else self.reduce_pool
        if held > self.highest:
            self.highest = held
            self.best = (self.moment, self.current_bytes_by_purpose(), live)

    def current_bytes_by_purpose(self) -> FsdpBytes:
        return FsdpBytes(*_FSDP_BYTES(self))

    def repeat_change(self, before: FsdpBytes, times: int) -> None:
        """Adds the change since `before` another `times` times."""
        now = self.current_bytes_by_purpose()
        for name, earlier, later in zip(FsdpBytes._fields, before, now, strict=True):
            setattr(self, name, later + times * (later - earlier))


@dataclass
class _UnitParameterState:
    """State of one unit's parameters. `pending`: bytes of its all-gather buffer; None if it has none."""

    is_unsharded: bool = False
    pending: int | None = None
    places: list[int] = field(default_factory=list[int])  # its forwards' positions in the replay's `order`


class UnshardMemoryReplay:
    """Replays unshard, reshard and prefetch on a ledger."""

    def __init__(self, sizes: list[UnitBytes], ledger: MemoryLedger) -> None:
        self.sizes, self.ledger = sizes, ledger
        self.units = [_UnitParameterState() for _ in sizes]
        self.buffer = 0  # all-gather buffer of the last unit gathered in forward
        self.order: list[int] = []  # units in the order in which their forwards ended

    def replay_post_forward(self, index: int) -> None:
        unit, size = self.units[index], self.sizes[index]
        if not size.gathered:
            return
        if size.reshards:
            self.reshard_unit(index)
        unit.places.append(len(self.order))
        self.order.append(index)

    def free_forward_gather_buffer(self) -> None:
        self.ledger.buffers -= self.buffer
        self.buffer = 0

    def replay_pre_backward(self, index: int, live: LiveBytes) -> None:
        """Gathers the unit, and prefetches the one whose forward ended before its own."""
        if self.sizes[index].gathers_in_backward:
            self.unshard_unit(index, live, forward=False)
        place = self.units[index].places.pop() if self.units[index].places else 0
        if place and self.sizes[self.order[place - 1]].gathers_in_backward:
            self._start_all_gather(self.order[place - 1], live)

    def reshard_unit(self, index: int) -> None:
        if self.units[index].is_unsharded:
            self.units[index].is_unsharded = False
            self.ledger.in_flight -= self.sizes[index].gathered

    def free_unused_prefetches(self) -> None:
        """Frees the all-gather buffers of units that were prefetched and not used."""
        self.order.clear()
        for unit in self.units:
            self.ledger.buffers -= unit.pending or 0
            unit.pending = None
            unit.places.clear()

    def _start_all_gather(self, index: int, live: LiveBytes) -> None:
        """Allocates the all-gather buffer of a unit, unless it is unsharded or in flight."""
        unit, size = self.units[index], self.sizes[index]
        if unit.is_unsharded or unit.pending is not None:
            return
        if size.shard_degree == 1:
            unit.pending = 0
            return
        unit.pending = size.gathered
        beside = max(size.cast_copy, size.gather_wires.beside if size.gather_wires else 0)
        self.ledger.buffers += size.gathered + beside
        self.ledger.update_peaks(live)
        self.ledger.buffers -= beside

    def unshard_unit(self, index: int, live: LiveBytes, *, forward: bool) -> None:
        """Gathers a unit, if it is not unsharded, and copies it from the buffer into its parameters."""
        self._start_all_gather(index, live)
        unit, size = self.units[index], self.sizes[index]
        if unit.pending is None:
            return
        cast = size.largest_cast if size.shard_degree == 1 else 0
        self.ledger.in_flight += size.gathered + cast + size.unpacking
        self.ledger.update_peaks(live)
        self.ledger.in_flight -= size.unpacking + cast
        if forward:
            self.free_forward_gather_buffer()  # FSDP2 holds the last buffer until this copy is issued
            self.buffer = unit.pending
        else:
            self.ledger.buffers -= unit.pending
        unit.is_unsharded, unit.pending = True, None


@dataclass
class _UnitGradientState:
    """Bytes of one unit's gradients that FSDP2 references; autograd's are in `LiveBytes`."""

    whole: int = 0  # unsharded, kept without sync
    partial: int = 0  # reduced over shards, not yet over replicas
    has_gradient: bool = False


class GradientMemoryReplay:
    """Replays the reduction of gradients, unit by unit, from the end of each unit's backward."""

    def __init__(self, sizes: Sequence[UnitBytes], ledger: MemoryLedger, *, plan: Plan) -> None:
        self.sizes, self.ledger, self.plan = sizes, ledger, plan
        self.units = [_UnitGradientState() for _ in sizes]
        self.buffer = 0  # reduce-scatter input of the last unit
        self.leaving: deque[int] = deque()

    def replay_post_backward(self, index: int, live: LiveBytes, *, last: bool) -> None:
        """Reduces the unit's gradients; without sync, keeps them unsharded until the `last` microbatch."""
        unit, size, ledger = self.units[index], self.sizes[index], self.ledger
        fresh = min(size.whole, live.gradients)  # 0 if autograd accumulates into existing gradients
        taken = live._replace(gradients=live.gradients - fresh)
        if not last and not self.plan.sync_each_microbatch:
            self._keep_unsharded_gradients(index, taken, fresh=fresh)
            return
        ledger.in_flight -= self.buffer
        self.buffer = 0
        if not size.reduce_input:
            return
        self.buffer = size.reduce_input
        if unit.whole and fresh:
            self._keep_unsharded_gradients(index, taken, fresh=fresh)
            live = taken
        copies = size.reduce_copies_of_kept if unit.whole else size.reduce_copies
        ledger.in_flight += size.reduce_input + copies
        ledger.update_peaks(live)
        ledger.in_flight -= copies
        ledger.whole -= unit.whole
        unit.whole = 0
        beside = size.reduce_wires.beside if size.reduce_wires else 0
        ledger.reduced += size.reduce_output + beside
        # A loop variable of FSDP2 keeps one unsharded gradient alive meanwhile: assumed to be the largest.
        kept = size.largest_whole if beside else 0
        ledger.update_peaks(taken._replace(gradients=taken.gradients + kept))
        ledger.reduced -= beside
        self._store_reduced_gradient(index, taken, last=last)

    def free_buffers_after_backward(self, live: LiveBytes) -> None:
        """Frees all buffers of reductions; only gradients remain. `live`: the model's own bytes."""
        self.ledger.in_flight -= self.buffer
        self.ledger.reduced -= self.ledger.chunks
        self.ledger.chunks = 0
        self.buffer = 0
        self.ledger.update_peaks(live)

    def _keep_unsharded_gradients(self, index: int, live: LiveBytes, *, fresh: int) -> None:
        """Keeps unsharded gradients, in the reduce dtype. `fresh`: bytes that this backward allocated."""
        unit, size = self.units[index], self.sizes[index]
        is_cast = size.whole != size.whole_reduced
        kept = 0 if unit.whole else size.whole_reduced if is_cast else fresh
        unit.whole += kept
        self.ledger.whole += kept
        if fresh and is_cast:
            # Cast one by one: the last exists in both dtypes for a moment, or is cast to be added to the sum.
            both = size.largest_whole + (0 if kept else size.largest_whole_reduced)
            self.ledger.update_peaks(live._replace(gradients=live.gradients + both))

    def _store_reduced_gradient(self, index: int, live: LiveBytes, *, last: bool) -> None:
        """Makes the reduce-scatter's output the shard's gradient; with replicas, sums it until `last`."""
        unit, size, ledger = self.units[index], self.sizes[index], self.ledger
        chunk, replicated = size.reduce_output, size.replicate_degree > 1
        if replicated and not last:  # replicas are reduced once per step; until then the chunks are summed
            ledger.reduced -= chunk if unit.partial else 0
            unit.partial = chunk
            return
        is_cast = size.gradient != chunk
        if is_cast:
            ledger.reduced += size.gradient
            ledger.update_peaks(live)
            ledger.reduced -= size.gradient
        is_gradient = not is_cast and not unit.has_gradient
        # The chunk becomes the gradient, is cast to it, or is added to it. With replicas, it stays allocated
        # until the end of backward in the last two cases.
        held = chunk if replicated and not is_gradient else 0
        ledger.chunks += held
        ledger.reduced += held - chunk - unit.partial
        ledger.gradients += 0 if unit.has_gradient else size.gradient
        unit.has_gradient, unit.partial = True, 0
        if self.plan.copies_gradients_to_host:
            self.units[index].has_gradient = False
            self.leaving.append(self.sizes[index].gradient)
            if len(self.leaving) > MAX_OFFLOADING_GRADIENTS:
                self.ledger.gradients -= self.leaving.popleft()
