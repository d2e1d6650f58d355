"""Simulation of a step on the streams, by events. See [Note: FSDP2's order] in `planner.predict.fsdp_time`.

[Note: skipping]
A step consists of similar turns: blocks in forward and in backward, and microbatches. A turn's effect on the
clocks depends only on the differences between clocks. If the differences after a turn equal those some turns
ago, all further turns except the last few take as long, and are added at once. Clocks are whole numbers, so
this is exact. Three kinds of clock may differ, because no later event depends on them:

- reduction clocks that are behind the compute stream's, since every later reduction waits for that stream;
- clocks that no event of the turn has touched;
- the host's clock, as long as the host is ahead and stays ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import NamedTuple

from fullshard.planner.predict import fsdp_time
from fullshard.planner.predict.offload import ActivationIoTicks
from fullshard.planner.predict.phases import MicrobatchSchedule, ScheduledPhase, ScheduleSegment
from fullshard.spec.model import Event

# Phases that copy activations, and wait for copies, when they begin; phases of forward do so when they end.
_BACKWARD = ("pre_backward", "post_backward", "end_backward")
_NEVER = 1 << 62
_REDUCE_CLOCKS = (
    "reduce",
    "all_reduce",
    "reduce_input_free",
    "host_out",
    "last_gradient_out",
    "previous_gradient_out",
    "host_sum",
    "activation_copy",
)
_GATHER_CLOCKS = ("copy_in", "gather", "network", "copied_out", "disk", "updating", "host_in", "fetched")
# All clocks and sums. A skipped turn adds to each as much as the turn before it.
_CLOCKS_AND_SUMS = tuple(
    part.name for part in fields(fsdp_time.StreamClocks) if part.name not in ("serial", "blocking", "slack")
)
_LONGEST_CYCLE = 4


class MicrobatchWork(NamedTuple):
    """Work of one microbatch: its schedule, and the ticks of each phase."""

    program: MicrobatchSchedule
    lengths: tuple[tuple[int, int], ...]  # for each phase, ticks of the device and of the host's launches
    sent: tuple[int, ...] = ()  # for each phase, ticks of collectives between ranks that share work
    moved: tuple[ActivationIoTicks, ...] = ()  # for each phase, its copies of activations; or ()
    waits: tuple[int, ...] = ()  # for each phase, how often the host waits for the device; or ()


@dataclass(frozen=True)
class EventOrderSettings:
    """Settings of a plan that decide the order of events."""

    keeps: bool  # parameters stay unsharded between microbatches
    syncs: bool  # gradients are reduced in each microbatch
    act: int  # ticks of the host to gather a unit, or to reduce its gradients
    norm: int | None = None  # host ticks for the norm of offloaded gradients; None without any
    skips: bool = True  # skip repeated turns, see [Note: skipping]


class _StreamSnapshot(NamedTuple):
    """State of the simulation at the end of a turn."""

    compute: int  # clock of the compute stream
    host: int  # clock of the host
    gathers: tuple[int, ...]  # clocks named in _GATHER_CLOCKS
    reduces: tuple[int, ...]  # clocks named in _REDUCE_CLOCKS
    values: tuple[int, ...]  # clocks and sums named in _CLOCKS_AND_SUMS
    pending: dict[int, int]  # units in flight, and when they arrive
    buffered: tuple[tuple[int, ...], ...]  # as in `BufferedUnits`
    slack: int  # the least lead of the host over the turn


@dataclass
class StepSimulation:
    """Simulation of a step's microbatches on `streams`. `costs`: of each unit of the trace."""

    streams: fsdp_time.StreamClocks
    costs: Sequence[fsdp_time.UnitCost]
    policy: EventOrderSettings
    pending: dict[int, int] = field(default_factory=dict[int, int])  # when each all-gather in flight is done
    unsharded: set[int] = field(default_factory=set[int])  # units whose parameters are unsharded
    uses: dict[int, int] = field(default_factory=dict[int, int])  # backward prefetches decided per unit
    in_buffers: fsdp_time.BufferedUnits = field(default_factory=lambda: fsdp_time.BufferedUnits([], []))
    buffered: bool = False  # the last all-gather buffer of forward is still allocated
    in_backward: bool = False  # backward has begun
    is_first: bool = False  # this is the step's first microbatch
    is_last: bool = False  # this is the step's last microbatch

    def simulate_step(self, work: MicrobatchWork, *, accumulating: MicrobatchWork, accumulation: int) -> None:
        """Simulates all microbatches of a step. `accumulating`: the work of each one after the first."""
        marks: list[_StreamSnapshot] = []
        index = 0
        while index < accumulation:
            self.streams.slack = _NEVER
            self.is_first, self.is_last = index == 0, index == accumulation - 1
            self.uses.clear()
            self.in_backward = False
            own = work if self.is_first else accumulating
            for segment in own.program.segments:
                self._simulate_segment(segment, own)
            # At the next forward the gather streams wait for the compute stream, which waited for reductions.
            _advance_clocks_to_compute(self.streams, (*_GATHER_CLOCKS, *_REDUCE_CLOCKS))
            if not self.is_first:
                marks.append(_take_snapshot(self))
            index += 1
            index += _skip_repeated_turns(self, marks, left=accumulation - 1 - index, stride=0)
        if self.policy.norm is not None:
            fsdp_time.wait_for_offloaded_gradients(self.streams, norm=self.policy.norm)

    def _simulate_segment(self, segment: ScheduleSegment, work: MicrobatchWork) -> None:
        if segment.times == 1:
            self._simulate_phases(segment.steps, work, shift=0)
            return
        # The last turns are simulated one by one, because FSDP2 then prefetches units behind the segment.
        behind = 2 if abs(segment.stride) == 1 else 1
        marks: list[_StreamSnapshot] = []
        turn, slack = 0, self.streams.slack
        while turn < segment.times:
            self.streams.slack = _NEVER
            self._simulate_phases(segment.steps, work, shift=turn * segment.stride)
            turn += 1
            left = segment.times - behind - turn
            if left > 0 and self.policy.skips:
                _advance_clocks_to_compute(self.streams, _REDUCE_CLOCKS)
                marks.append(_take_snapshot(self))
                skipped = _skip_repeated_turns(self, marks, left=left, stride=segment.stride)
                self._update_unsharded_after_skip(segment, turn, skipped=skipped)
                turn += skipped
            slack = min(slack, self.streams.slack)
        self.streams.slack = slack

    def _simulate_phases(self, steps: Sequence[ScheduledPhase], work: MicrobatchWork, *, shift: int) -> None:
        streams, lengths, program = self.streams, work.lengths, work.program
        for event, unit, traced, phase in steps:
            if unit < 0:
                self._end_forward_or_backward(event)
            elif (cost := self.costs[traced]).has_parameters:
                if event == "pre_forward":
                    self._gather(unit + shift, cost, forward=True)
                elif event == "post_forward":
                    self.unsharded -= {unit + shift} if cost.reshards else set()
                elif event == "pre_backward":
                    self._simulate_pre_backward(unit + shift, cost, program=program)
                else:
                    self._simulate_post_backward(unit + shift, cost)
            length, issue = lengths[phase]
            moved = work.moved[phase] if work.moved else None
            if moved and event in _BACKWARD:
                streams.copy_activations(**moved._asdict())
            if issue or length:
                waits = work.waits[phase] if work.waits else 0
                streams.run_kernels_between_waits(length, issue=issue, waits=waits)
            if moved and event not in _BACKWARD:
                streams.copy_activations(**moved._asdict())

    def _end_forward_or_backward(self, event: Event) -> None:
        """Lets gathers wait for forward's last copy-out, or computing for all of backward's reductions."""
        if event == "end_forward" and self.buffered:
            self.streams.delay_gather_streams(self.streams.copied_out)
            self.buffered = False
        elif event == "end_backward":
            self.pending.clear()
            streams, is_sharded = self.streams, any(cost.is_sharded for cost in self.costs)
            streams.stall_compute_until(streams.reduce, "reduce_scatter" if is_sharded else "copy")
            streams.stall_compute_until(streams.all_reduce, "all_reduce")
            streams.reduce_input_free = streams.compute

    def _gather(self, unit: int, cost: fsdp_time.UnitCost, *, forward: bool) -> None:
        if unit not in self.unsharded:
            self.streams.run_fsdp_host_work(self.policy.act)
        self._start_all_gather(unit, cost)
        self._wait_and_copy_out(unit, cost, forward=forward)

    def _simulate_pre_backward(
        self, unit: int, cost: fsdp_time.UnitCost, *, program: MicrobatchSchedule
    ) -> None:
        self.in_backward = True
        self._gather(unit, cost, forward=False)
        before, used = program.before[unit], self.uses.get(unit, 0)
        self.uses[unit] = used + 1
        if used < len(before) and before[-1 - used] >= 0:
            following = before[-1 - used]
            self._start_all_gather(following, self.costs[program.traced[following]])

    def _simulate_post_backward(self, unit: int, cost: fsdp_time.UnitCost) -> None:
        streams, first, last = self.streams, self.is_first, self.is_last
        if last or not self.policy.keeps:
            self.unsharded.discard(unit)
        if not (last or self.policy.syncs):
            streams.copy_on_compute_stream(cost.keep_unsynced if first else cost.keep_again)
            return
        if not cost.is_trained:
            return
        if not first and not self.policy.syncs:
            streams.copy_on_compute_stream(cost.keep_again)
        streams.run_fsdp_host_work(self.policy.act)
        streams.run_reduce_scatter(cost)
        adds = not first and self.policy.syncs
        if cost.is_replicated:
            if adds:
                streams.copy_on_reduce_stream(cost.add_partial)
            if not last:
                return
            streams.start_all_reduce(cost, settle=cost.cast_gradient)
        else:
            adds_on_device = adds and not cost.leave
            streams.copy_on_reduce_stream(cost.settle_again if adds_on_device else cost.cast_gradient)
        fsdp_time.simulate_gradient_offload(streams, cost, adds=adds and not cost.is_replicated)

    def _start_all_gather(self, unit: int, cost: fsdp_time.UnitCost) -> None:
        """Starts a unit's all-gather, unless it is unsharded, in flight, or not gathered in backward."""
        if unit in self.unsharded or unit in self.pending:
            return
        if self.in_backward and not cost.gathers_in_backward:
            return
        updates = self.is_first and not self.in_backward
        reads = bool(cost.shards_on_disk) and not fsdp_time.reuse_buffer(unit, self.in_buffers.trained)
        frozen_too = bool(cost.frozen_on_disk) and not fsdp_time.reuse_buffer(unit, self.in_buffers.frozen)
        there = fsdp_time.simulate_update_and_shard_fetch(
            self.streams, cost, updates=updates, reads=reads, reads_frozen=frozen_too
        )
        if cost.is_sharded:
            there = self.streams.start_all_gather(cost, after=there)
        self.pending[unit] = there

    def _wait_and_copy_out(self, unit: int, cost: fsdp_time.UnitCost, *, forward: bool) -> None:
        """Waits for a unit's all-gather, if one is in flight, and copies its parameters out."""
        there = self.pending.pop(unit, None)
        if there is None:
            return
        streams = self.streams
        if forward:
            self._end_forward_or_backward("end_forward")
        streams.stall_compute_until(there, "all_gather")
        streams.copy_on_compute_stream(cost.copy_out)
        if not cost.is_sharded:
            streams.fetched = streams.compute  # the next shard is copied in while this unit computes
        if forward and cost.is_sharded:
            streams.copied_out, self.buffered = streams.compute, True
        elif cost.is_sharded:
            streams.delay_gather_streams(streams.compute)
        self.unsharded.add(unit)

    def _update_unsharded_after_skip(self, segment: ScheduleSegment, turn: int, *, skipped: int) -> None:
        """Marks units of skipped turns as sharded or unsharded, like those of the last turn."""
        stride = segment.stride
        for unit in {step.unit for step in segment.steps} if skipped else ():
            gone = range(unit + turn * stride, unit + (turn + skipped) * stride, stride)
            if unit + (turn - 1) * stride in self.unsharded:
                self.unsharded.update(gone)
            else:
                self.unsharded.difference_update(gone)


def simulate_next_step(  # signature: as `StepSimulation`
    streams: fsdp_time.StreamClocks,
    costs: Sequence[fsdp_time.UnitCost],
    policy: EventOrderSettings,
    *,
    works: tuple[MicrobatchWork, MicrobatchWork],
    accumulation: int,
) -> None:
    """Simulates a step after an equal one, so that frozen shards are still in the host's buffers.

    The update has dropped the trained ones.

    works: the work of the first microbatch, and of each later one
    """
    found = fsdp_time.BufferedUnits([], [])
    if any(cost.frozen_on_disk for cost in costs):
        before = StepSimulation(replace(streams), costs, policy)
        before.simulate_step(works[0], accumulating=works[1], accumulation=accumulation)
        found = found._replace(frozen=before.in_buffers.frozen)
    last = StepSimulation(streams, costs, policy, in_buffers=found)
    last.simulate_step(works[0], accumulating=works[1], accumulation=accumulation)


def _advance_clocks_to_compute(streams: fsdp_time.StreamClocks, clocks: Sequence[str]) -> None:
    """Raises `clocks` to the compute stream's clock if they are behind it. See [Note: skipping]."""
    for clock in clocks:
        setattr(streams, clock, max(getattr(streams, clock), streams.compute))


def _take_snapshot(simulation: StepSimulation) -> _StreamSnapshot:
    streams = simulation.streams
    return _StreamSnapshot(
        streams.compute,
        streams.host,
        attrgetter(*_GATHER_CLOCKS)(streams),
        attrgetter(*_REDUCE_CLOCKS)(streams),
        attrgetter(*_CLOCKS_AND_SUMS)(streams),
        dict(simulation.pending),
        tuple(tuple(units) for units in simulation.in_buffers),
        streams.slack,
    )


def _skip_repeated_turns(
    simulation: StepSimulation, marks: Sequence[_StreamSnapshot], *, left: int, stride: int
) -> int:
    """Adds as many of the `left` turns as must repeat the last ones, and returns their number.

    marks: the state after each turn so far. stride: number of units by which each turn advances.
    """
    if not simulation.policy.skips:
        return 0
    for turns in range(1, min(_LONGEST_CYCLE, len(marks) - 1, left) + 1):
        most = _count_exact_repeats(marks, turns, stride=stride)
        if most:
            break
    else:
        return 0
    before, now, times = marks[-1 - turns], marks[-1], min(left // turns, most)
    length = now.compute - before.compute
    streams = simulation.streams
    streams.slack = min(streams.slack, streams.slack - times * (now.host - before.host - length))
    for name, old, new in zip(_CLOCKS_AND_SUMS, before.values, now.values, strict=True):
        setattr(streams, name, new + times * (new - old))
    shift, grown = times * stride * turns, times * length
    simulation.pending = {unit + shift: at + grown if at else 0 for unit, at in now.pending.items()}
    for units, old, new in zip(simulation.in_buffers, before.buffered, now.buffered, strict=True):
        units[:] = new if old == new else (unit + shift for unit in new)
    return times * turns


def _count_exact_repeats(marks: Sequence[_StreamSnapshot], turns: int, *, stride: int) -> int:
    """Returns how often the last `turns` turns repeat exactly while the host stays ahead; 0 if never."""
    before, now = marks[-1 - turns], marks[-1]
    length = now.compute - before.compute
    if any(new - old not in (0, length) for old, new in zip(before.gathers, now.gathers, strict=True)):
        return 0
    if any(new - old != length for old, new in zip(before.reduces, now.reduces, strict=True)):
        return 0
    shift = stride * turns
    pending = {unit + shift: at + length if at else 0 for unit, at in before.pending.items()}
    kinds = zip(before.buffered, now.buffered, strict=True)
    follows = all(new in (old, tuple(unit + shift for unit in old)) for old, new in kinds)
    if now.pending != pending or not follows:
        return 0
    behind = (now.host - before.host) - length
    if behind == 0:
        return _NEVER
    slack = min(mark.slack for mark in marks[len(marks) - turns :])
    if slack < 0:
        return 0
    return slack // behind if behind > 0 else _NEVER
