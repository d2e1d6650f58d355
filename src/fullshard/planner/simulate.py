"""Simulation of a step on the streams, event by event, with repeated turns skipped.

See [Note: skipping] in `planner.steady_state`, and [Note: the engine's order] in `planner.streams`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fullshard.planner.activations import Moved
from fullshard.planner.offload_streams import (
    InBuffers,
    fetch_shard,
    offload_gradient,
    touch_buffer,
    wait_for_gradients,
)
from fullshard.planner.schedule import Schedule, ScheduleSegment, ScheduleStep
from fullshard.planner.steady_state import (
    GATHER_CLOCKS,
    NEVER,
    REDUCE_CLOCKS,
    StreamSnapshot,
    raise_to_compute,
    skip_repeated,
    snapshot,
)
from fullshard.planner.streams import Streams
from fullshard.planner.unit_costs import UnitCost
from fullshard.spec.model import Event
from fullshard.spec.run import PrefetchSection

# Phases that start, and wait for, copies of activations when they begin; in forward, when they end.
_BACKWARD = ("pre_backward", "post_backward", "end_backward")


class Work(NamedTuple):
    """Work of one microbatch.

    program: the events.
    lengths: for each phase, ticks of the device and of the host's launches.
    sent: for each phase, the device ticks of tensor-parallel collectives.
    moved: for each phase, its copies of activations; empty if there are none.
    """

    program: Schedule
    lengths: tuple[tuple[int, int], ...]
    sent: tuple[int, ...] = ()
    moved: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Settings of a plan that decide the order of events.

    prefetch: the run's prefetch settings.
    keeps: parameters stay unsharded between microbatches.
    syncs: gradients are reduced in each microbatch.
    by_position: the model's units in registration order.
    place: index of each unit in `by_position`.
    act: ticks of the host to gather a unit, or to reduce its gradients.
    norm: ticks of the host for the norm of offloaded gradients; None without an offload target.
    skips: skip repeated turns, see [Note: skipping].
    """

    prefetch: PrefetchSection
    keeps: bool
    syncs: bool
    by_position: Sequence[int]
    place: Mapping[int, int]
    act: int
    norm: int | None = None
    skips: bool = True


@dataclass
class StepSimulation:
    """Runs microbatches on `streams`. `costs`: for each unit of the trace.

    pending: when each unit's all-gather is done, for units in flight.
    put_back: when each unit's copy for fewer ranks (hpZ) is made.
    unsharded: units whose parameters are unsharded.
    uses: number of backward prefetch decisions made for each unit.
    in_buffers: units in the host's buffers.
    buffered: the last all-gather buffer of forward is still allocated.
    in_backward: backward has begun.
    updates: this is the step's first microbatch.
    """

    streams: Streams
    costs: Sequence[UnitCost]
    policy: Policy
    pending: dict[int, int] = field(default_factory=dict[int, int])
    put_back: dict[int, int] = field(default_factory=dict[int, int])
    unsharded: set[int] = field(default_factory=set[int])
    uses: dict[int, int] = field(default_factory=dict[int, int])
    in_buffers: InBuffers = field(default_factory=InBuffers)
    buffered: bool = False
    in_backward: bool = False
    updates: bool = False

    def step(self, work: Work, *, accumulating: Work, accumulation: int) -> None:
        """Runs all microbatches of a step. `accumulating`: the work of those after the first."""
        marks: list[StreamSnapshot] = []
        index = 0
        while index < accumulation:
            self.streams.slack = NEVER
            first, last = index == 0, index == accumulation - 1
            self._microbatch(work if first else accumulating, first=first, last=last)
            # At the next forward the gather streams wait for the compute stream, which waited for reductions.
            raise_to_compute(self.streams, (*GATHER_CLOCKS, *REDUCE_CLOCKS))
            if not first:
                marks.append(snapshot(self.streams, self.pending, in_buffers=self.in_buffers))
            index += 1
            index += self._skip(marks, left=accumulation - 1 - index, stride=0)
        if self.policy.norm is not None:
            wait_for_gradients(self.streams, norm=self.policy.norm)

    def _microbatch(self, work: Work, *, first: bool, last: bool) -> None:
        self.uses.clear()
        self.in_backward, self.updates = False, first
        for segment in work.program.segments:
            self._segment(segment, work, first=first, last=last)

    def _segment(self, segment: ScheduleSegment, work: Work, *, first: bool, last: bool) -> None:
        if segment.times == 1:
            self._turn(segment.steps, work, shift=0, first=first, last=last)
            return
        prefetch = self.policy.prefetch
        ahead = max(prefetch.forward, prefetch.backward) if prefetch.mode == "explicit" else 1
        behind = ahead // abs(segment.stride) + 1  # last turns, which reach units behind the segment
        marks: list[StreamSnapshot] = []
        turn, slack = 0, self.streams.slack
        while turn < segment.times:
            self.streams.slack = NEVER
            self._turn(segment.steps, work, shift=turn * segment.stride, first=first, last=last)
            turn += 1
            left = segment.times - behind - turn
            if left > 0 and self.policy.skips:
                raise_to_compute(self.streams, REDUCE_CLOCKS)
                marks.append(snapshot(self.streams, self.pending, in_buffers=self.in_buffers))
                skipped = self._skip(marks, left=left, stride=segment.stride)
                self._copy_states(segment, turn, skipped=skipped)
                turn += skipped
            slack = min(slack, self.streams.slack)
        self.streams.slack = slack

    def _turn(
        self, steps: Sequence[ScheduleStep], work: Work, *, shift: int, first: bool, last: bool
    ) -> None:
        streams, lengths, program = self.streams, work.lengths, work.program
        for event, unit, traced, phase in steps:
            if unit < 0:
                self._of_the_run(event)
            elif (cost := self.costs[traced]).has_parameters:
                if event == "pre_forward":
                    self._pre_forward(unit + shift, cost, program=program)
                elif event == "post_forward":
                    self._post_forward(unit + shift, cost)
                elif event == "pre_backward":
                    self._pre_backward(unit + shift, cost, program=program)
                else:
                    self._post_backward(unit + shift, cost, first=first, last=last)
            length, issue = lengths[phase]
            moved = work.moved[phase] if work.moved else None
            if moved and event in _BACKWARD:
                streams.move(**moved._asdict())
            if issue or length:
                streams.work(length, issue=issue)
            if moved and event not in _BACKWARD:
                streams.move(**moved._asdict())

    def _of_the_run(self, event: Event) -> None:
        if event == "end_forward" and self.buffered:
            self.streams.hold_gathers(self.streams.copied_out)
            self.buffered = False
        elif event == "end_backward":
            self.pending.clear()
            self.put_back.clear()
            self.streams.finish(is_sharded=any(cost.is_sharded for cost in self.costs))
            self.streams.reduce_input_free = self.streams.compute

    def _pre_forward(self, unit: int, cost: UnitCost, *, program: Schedule) -> None:
        self._charge_hook(unit)
        self._issue(unit, cost)
        self._wait_and_copy_out(unit, cost, forward=True)
        if self.policy.prefetch.mode == "explicit":
            at = self.policy.place[unit] + 1
            self._prefetch(self.policy.by_position[at : at + self.policy.prefetch.forward], program)

    def _post_forward(self, unit: int, cost: UnitCost) -> None:
        if cost.reshards and unit in self.unsharded:
            self.unsharded.discard(unit)
            if cost.resharded:
                self.streams.copy(cost.hpz_copy)
                self.put_back[unit] = self.streams.compute

    def _pre_backward(self, unit: int, cost: UnitCost, *, program: Schedule) -> None:
        self.in_backward = True
        self._charge_hook(unit)
        self._issue(unit, cost)
        self._wait_and_copy_out(unit, cost, forward=False)
        prefetch, order = self.policy.prefetch, self.policy.by_position
        if prefetch.mode == "implicit":
            before, used = program.before[unit], self.uses.get(unit, 0)
            self.uses[unit] = used + 1
            if used < len(before) and before[-1 - used] >= 0:
                self._prefetch((before[-1 - used],), program)
        elif prefetch.mode == "explicit":
            at = self.policy.place[unit]
            self._prefetch(order[max(at - prefetch.backward, 0) : at][::-1], program)

    def _post_backward(self, unit: int, cost: UnitCost, *, first: bool, last: bool) -> None:
        streams = self.streams
        if last or not self.policy.keeps:
            self.unsharded.discard(unit)
        if not (last or self.policy.syncs):
            streams.copy(cost.keep_unsynced if first else cost.keep_again)
            return
        if not cost.is_trained:
            return
        if not first and not self.policy.syncs:
            streams.copy(cost.keep_again)
        streams.on_host(self.policy.act)
        streams.scatter(cost)
        adds = not first and self.policy.syncs
        if cost.is_replicated:
            if adds:
                streams.on_reduce(cost.add_partial)
            if not last:
                return
            streams.start_all_reduce(cost, settle=cost.cast_gradient)
        else:
            streams.on_reduce(cost.settle_again if adds and not cost.leave else cost.cast_gradient)
        offload_gradient(streams, cost, adds=adds and not cost.is_replicated)

    def _charge_hook(self, unit: int) -> None:
        """Charges the host for gathering a unit; the hook does nothing if it is already unsharded."""
        if unit not in self.unsharded:
            self.streams.on_host(self.policy.act)

    def _prefetch(self, units: Sequence[int], program: Schedule) -> None:
        for unit in units:
            cost = self.costs[program.traced[unit]]
            if cost.has_parameters:
                self._issue(unit, cost)

    def _issue(self, unit: int, cost: UnitCost) -> None:
        """Starts the all-gather of a unit that is neither unsharded nor in flight."""
        if unit in self.unsharded or unit in self.pending:
            return
        again = self.in_backward and cost.reshards
        there = 0
        # Parameters kept over fewer ranks (hpZ) are gathered from the device, not from the host.
        if not (again and cost.resharded):
            updates = self.updates and not self.in_backward
            is_there = not cost.shards_on_disk or touch_buffer(unit, self.in_buffers.trained)
            reads = not is_there and not updates
            frozen_too = bool(cost.frozen_on_disk) and not touch_buffer(unit, self.in_buffers.frozen)
            there = fetch_shard(self.streams, cost, updates=updates, reads=reads, reads_frozen=frozen_too)
        if not cost.is_sharded:
            self.pending[unit] = there
            return
        self.pending[unit] = self.streams.start_gather(
            cost,
            again=again,
            inline=self.policy.prefetch.mode == "none",
            after=max(self.put_back.pop(unit, 0), there),
        )

    def _wait_and_copy_out(self, unit: int, cost: UnitCost, *, forward: bool) -> None:
        """Waits for a unit's all-gather, and copies its parameters out."""
        there = self.pending.pop(unit, None)
        if there is None:
            return
        streams, defers = self.streams, forward and self.policy.prefetch.mode != "none" and cost.is_sharded
        if forward:
            self._of_the_run("end_forward")
        streams.wait(there, "all_gather")
        streams.copy(cost.copy_out)
        if not cost.is_sharded:
            streams.fetched = streams.compute  # the next own shard is copied in while this unit computes
        if defers:
            streams.copied_out, self.buffered = streams.compute, True
        elif cost.is_sharded:
            streams.hold_gathers(streams.compute)
        self.unsharded.add(unit)

    def _skip(self, marks: Sequence[StreamSnapshot], *, left: int, stride: int) -> int:
        if not self.policy.skips or left <= 0:
            return 0
        return skip_repeated(
            self.streams, marks, left=left, stride=stride, pending=self.pending, in_buffers=self.in_buffers
        )

    def _copy_states(self, segment: ScheduleSegment, turn: int, *, skipped: int) -> None:
        """Gives skipped units the state in which the last turn left its units."""
        if not skipped:
            return
        units = {step.unit for step in segment.steps}
        for unit in units:
            is_unsharded = unit + (turn - 1) * segment.stride in self.unsharded
            gone = range(
                unit + turn * segment.stride, unit + (turn + skipped) * segment.stride, segment.stride
            )
            if is_unsharded:
                self.unsharded.update(gone)
            else:
                self.unsharded.difference_update(gone)


def simulate_steady_step(  # signature: as `StepSimulation`
    streams: Streams,
    costs: Sequence[UnitCost],
    policy: Policy,
    *,
    works: tuple[Work, Work],
    accumulation: int,
) -> None:
    """Simulates a step after an equal one, so that frozen shards are still in the host's buffers.

    `works`: of the first microbatch, and of the later ones.
    """
    found = InBuffers()
    if any(cost.frozen_on_disk for cost in costs):
        before = StepSimulation(replace(streams), costs, policy)
        before.step(works[0], accumulating=works[1], accumulation=accumulation)
        found.frozen += before.in_buffers.frozen
    last = StepSimulation(streams, costs, policy, in_buffers=found)
    last.step(works[0], accumulating=works[1], accumulation=accumulation)
