"""Predicted time of a step, term by term, from a simulation of one rank's streams.

    total = (streams + contention + optimizer + offload) * (1 + stragglers)

streams      when the compute stream finishes all microbatches: see [Note: FSDP2's order] in
             `planner.streams`. The time is spent computing, copying, or waiting for a kind of collective.
contention   hardware.contention * overlapped: the seconds of collectives that overlap the compute stream,
                 overlapped = min(busy, sent + busy - streams)      busy = computing + copies
optimizer    the gradient norm (read once), gradient scaling (read and written), and the update. Fused AdamW
             reads value, gradient and two moments and writes all except the gradient: 28 bytes per parameter
             in fp32. All over the own shards. In backward it takes as long, unit by unit, plus a second sum
             over ranks: the loss is summed before backward, the norm after it.
offload      the extra time of the streams compared with an infinitely fast host and drive, for a plan with an
             offload target or with activations on the host (see [Note: tiers] in `planner.offload`, and
             [Note: activations on the host]). It includes an offloaded update; `optimizer` does not.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.errors import PlanError
from fullshard.planner.collectives import collective_seconds, shard_group
from fullshard.planner.offload import (
    Busy,
    activation_terms,
    busy_of,
    gathers_of,
    host_rates,
    least_shards_read,
    moved_of,
    moves,
    norm_ticks,
    offload_terms,
    records_of,
    slots_hold,
    with_host,
)
from fullshard.planner.roofline import memory_seconds, phase_costs
from fullshard.planner.schedule import program_of
from fullshard.planner.simulate import Policy, Work, simulate_steady_step
from fullshard.planner.streams import Streams
from fullshard.planner.tensor_parallel import axis_seconds
from fullshard.planner.unit_bytes import UnitBytes, unit_bytes
from fullshard.planner.unit_costs import TICKS, UnitCost, ticks, unit_cost
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec, Trace
from fullshard.spec.plan import ITEMSIZE, Plan
from fullshard.spec.prediction import ActivationTerms, OffloadTerms, TimeTerms
from fullshard.spec.run import RecomputeSection

_ROUNDING = 1e-6  # bound on the relative error of rounding durations to whole ticks
_SUM_BYTES = 32  # loss, count, squared norm and stop, in fp64: see `training.step`


def step_seconds(spec: ModelSpec, plan: Plan, hardware: Hardware) -> TimeTerms:  # signature: as `predict`
    """Returns the predicted seconds of one optimizer step, term by term.

    Raises PlanError if `spec` lacks the trace, or `hardware` a rate, that `plan` needs.
    """
    return StepTimer(spec, hardware).seconds(plan)


class Units(NamedTuple):
    """Sizes and costs of a trace's units on one mesh, and the optimizer step's costs."""

    sizes: tuple[UnitBytes, ...]
    costs: tuple[UnitCost, ...]
    without_host: tuple[UnitCost, ...]  # costs with an infinitely fast host and drive
    counts: tuple[int, ...]  # number of units of the model that each stands for
    all_reduce: int  # ticks of the optimizer step's sum over ranks
    update: int = 0  # ticks of the update on the device
    norm: int | None = None  # ticks of the gradient norm on the host; None without an offload target
    records: tuple[int, ...] = ()  # bytes of each group's offloaded state
    spared: int = 0  # ticks of drive reads that a step saves
    ahead: int = 0  # ticks by which the drive's work is ahead when a step begins


class Demand(NamedTuple):
    """Least ticks per step of each stream beside computing; inputs of `StepTimer.least_seconds`."""

    copied: int  # copies on the compute stream
    network: int  # collectives on the shard axis's network
    apart: int  # backward all-gathers on a separate network
    replicas: int  # all-reduces on a separate network
    inline: int  # added to `copied` if all-gathers are not prefetched
    tail: int  # the optimizer step with its sum over ranks
    host: int = 0  # the busiest stream of the host or the drive


class Computing(NamedTuple):
    """Ticks of all phases of a step."""

    device: int  # ticks of kernels on the device
    issue: int  # ticks of the host's launches


WorkKey = tuple[int, int, bool, bool, int]


@dataclass
class StepTimer:
    """Predicts the time of plans of one spec on one hardware. `skips`: see [Note: skipping] in `simulate`."""

    spec: ModelSpec
    hardware: Hardware
    skips: bool = True
    _work: dict[WorkKey, Work] = field(default_factory=dict[WorkKey, Work])
    _units: dict[tuple[object, ...], Units] = field(default_factory=dict[tuple[object, ...], Units])

    def __post_init__(self) -> None:
        units = self.spec.units
        self._by_position = tuple(sorted(range(len(units)), key=lambda i: units[i].position))
        self._place = {unit: place for place, unit in enumerate(self._by_position)}
        self._serial = self.hardware.device == "cpu"

    def seconds(self, plan: Plan) -> TimeTerms:
        """Returns the predicted seconds of one step of `plan`, term by term."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        units = self.units(plan, trace)
        again = self._recomputed(plan, trace)
        slow = self._simulated(plan, trace, units=units)
        if units.norm is None and not moves(trace.phases):
            return self._terms(plan, slow, units=units, recompute=again)
        fast = units._replace(costs=units.without_host, norm=None, ahead=0)
        streams = self._simulated(plan, trace, units=fast, moves_nothing=True)
        terms = self._terms(plan, streams, units=units, recompute=again)
        # The drive must finish all of its work within every step, no matter how far ahead it reads.
        busy = _busy(plan, trace, units=units, hardware=self.hardware, shards_read=slow.shards_read)
        end = max(slow.compute, busy.disk)
        waits = max(0, end - streams.compute) / TICKS
        longer = terms.model_copy(update={"offload": waits, "stragglers": 0.0})
        return longer.model_copy(update={"stragglers": self.hardware.stragglers * longer.total})

    def offload(self, plan: Plan) -> OffloadTerms | None:
        """Returns the predicted host and drive use of the plan's offload target; None without one."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        units = self.units(plan, trace)
        if units.norm is None:
            return None
        reads = plan.run.offload.on_disk and plan.run.offload.takes_parameters
        shards_read = self._simulated(plan, trace, units=units).shards_read if reads else 0
        return offload_terms(
            plan,
            list(zip(units.sizes, units.counts, strict=True)),
            records=units.records,
            busy=_busy(plan, trace, units=units, hardware=self.hardware, shards_read=shards_read),
            shards_read=shards_read,
            hardware=self.hardware,
        )

    def activations(self, plan: Plan) -> ActivationTerms | None:
        """Returns the predicted host use of activations that are copied there; None if there are none."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        if not moves(trace.phases):
            return None
        turns = self._work_of(plan, trace, fused=False, adds=False).program.repeats
        return activation_terms(plan, trace.phases, turns=turns, hardware=self.hardware)

    def _simulated(self, plan: Plan, trace: Trace, *, units: Units, moves_nothing: bool = False) -> Streams:
        streams = Streams(serial=self._serial, blocking=1 - self.hardware.overlap, disk=-units.ahead)
        policy = Policy(
            prefetch=plan.run.prefetch,
            keeps=plan.reshard_after_forward is False,
            syncs=plan.sync_each_microbatch,
            by_position=self._by_position,
            place=self._place,
            act=ticks(self.hardware.rates.unit_seconds),
            norm=units.norm,
            skips=self.skips,
        )
        work, accumulating = self._works(plan, trace)
        if moves_nothing:
            work, accumulating = work._replace(moved=()), accumulating._replace(moved=())
        simulate_steady_step(
            streams, units.costs, policy, works=(work, accumulating), accumulation=plan.accumulation
        )
        return streams

    def units(self, plan: Plan, trace: Trace) -> Units:
        """Returns the sizes and costs of the trace's units on the plan's mesh."""
        mesh = (plan.replicate_degree, plan.shard_degree, plan.reshard_after_forward, plan.precision)
        apart = (plan.tensor_parallel, plan.run.offload)
        update = (plan.run.optimizer.name, plan.run.optimizer.momentum, plan.run.optimizer.in_backward)
        key = (*mesh, *apart, id(trace), *update)
        if key not in self._units:
            self._units[key] = self._measure(plan, trace)
        return self._units[key]

    def demand(self, plan: Plan) -> Demand:
        """Returns the least ticks per step of each stream, for any recompute mode and prefetch."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        units = self.units(plan, trace)
        begun = [
            {p.unit for p in trace.phases if p.event == event} for event in ("pre_forward", "pre_backward")
        ]
        frees = plan.reshard_after_forward is not False
        reductions = plan.accumulation if plan.sync_each_microbatch else 1
        copied = network = apart = replicas = inline = 0
        for index, (cost, count) in enumerate(zip(units.costs, units.counts, strict=True)):
            if not cost.has_parameters:
                continue
            times = (plan.accumulation if frees else 1) * count
            forward = times if index in begun[0] else 0
            again = times if frees and cost.reshards and index in begun[1] else 0
            copied += (forward + again) * cost.copy_out + again * cost.hpz_copy
            inline += forward * (cost.copy_in + cost.gather) + again * (cost.again_in + cost.backward_gather)
            network += forward * cost.gather
            if cost.separate_network:
                apart += again * cost.backward_gather
            else:
                network += again * cost.backward_gather
            if cost.is_trained and index in begun[1]:
                copied += count * (
                    reductions * cost.pack
                    + (plan.accumulation - reductions) * min(cost.keep_unsynced, cost.keep_again)
                )
                network += count * reductions * cost.scatter if cost.is_sharded else 0
                if cost.shares_wires:
                    network += count * cost.all_reduce
                else:
                    replicas += count * cost.all_reduce
        host = 0 if units.norm is None else max(_busy(plan, trace, units=units, hardware=self.hardware))
        return Demand(copied, network, apart, replicas, inline, units.update + units.all_reduce, host)

    def computing(self, plan: Plan) -> Computing:
        """Returns the ticks of all phases of a step, which do not depend on the mesh."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        device = issue = 0
        for work, times in zip(self._works(plan, trace), (1, plan.accumulation - 1), strict=True):
            for (length, launched), turns in zip(work.lengths, work.program.repeats, strict=True):
                device += length * turns * times
                issue += launched * turns * times
        return Computing(device, issue)

    def least_seconds(self, computing: Computing, demand: Demand, *, inline: bool) -> float:
        """Returns a lower bound on a step's seconds, from each stream's work. `inline`: without prefetch."""
        busy = computing.device + demand.copied
        if self._serial:
            busy += computing.issue
        sent = demand.network + demand.apart + demand.replicas
        end = busy + (demand.inline if inline and not self._serial else 0)
        end += int((1 - self.hardware.overlap) * sent) if not inline or self._serial else 0
        end = max(end, computing.issue, demand.network, demand.apart, demand.replicas, demand.host)
        overlapped = min(busy, max(0, sent + busy - end))
        # If contention costs more than a collective's own time, waiting may be faster than overlapping.
        contention = self.hardware.contention if self.hardware.contention <= 1 else 0.0
        total = (end + contention * overlapped + demand.tail) / TICKS + self.hardware.rates.step_seconds
        return total * (1 + self.hardware.stragglers) * (1 - _ROUNDING)

    def _works(self, plan: Plan, trace: Trace) -> tuple[Work, Work]:
        fused = plan.run.run.compile is True
        adds = bool(trace.accumulating) and not plan.sync_each_microbatch
        first = self._work_of(plan, trace, fused=fused, adds=False)
        return first, self._work_of(plan, trace, fused=fused, adds=adds)

    def _work_of(self, plan: Plan, trace: Trace, *, fused: bool, adds: bool) -> Work:
        key = (id(trace), plan.microbatch, fused, adds, plan.tensor_parallel)
        if key not in self._work:
            phases, rates = trace.accumulating if adds else trace.phases, self.hardware.rates
            costs = phase_costs(
                phases,
                self.spec.kernels,
                rates=rates,
                microbatch=plan.microbatch,
                fused=fused,
                split=plan.tensor_parallel,
            )
            watched = trace.recompute.mode == "selective" and not fused
            launch = ticks(rates.launch_seconds + (rates.watched_seconds if watched else 0.0))
            program = program_of(self.spec, trace, phases=phases)
            firsts = program.first_units
            axis = axis_seconds(self.spec, phases, plan=plan, units=firsts, hardware=self.hardware)
            sent = tuple(map(ticks, axis))
            lengths = tuple(
                (ticks(cost.seconds) + own, cost.launches * launch)
                for cost, own in zip(costs, sent, strict=True)
            )
            moved = moved_of(phases, plan, hardware=self.hardware)
            self._work[key] = Work(program, lengths, sent, moved)
        return self._work[key]

    def _measure(self, plan: Plan, trace: Trace) -> Units:
        program = self._work_of(plan, trace, fused=False, adds=False).program
        firsts, tensor = program.first_units, plan.tensor_parallel
        sizes = tuple(unit_bytes(self.spec.units[unit], plan) for unit in firsts)
        counts = tuple(program.traced.count(i) for i in range(len(firsts)))
        costs = tuple(
            unit_cost(size, self.hardware, world_size=plan.world_size, tensor=tensor) for size in sizes
        )
        group = shard_group(
            plan.world_size, per_node=self.hardware.ranks_per_node, world_size=plan.world_size
        )
        summed = collective_seconds("all_reduce", _SUM_BYTES, group=group, hardware=self.hardware)
        summed *= 2 if plan.run.optimizer.in_backward else 1
        units = Units(sizes, costs, costs, counts, ticks(summed))
        pairs = list(zip(sizes, counts, strict=True))
        if not plan.run.offload.takes_optimizer:
            curves, shards = self.hardware.rates, sum(s.trained * s.master_itemsize * n for s, n in pairs)
            norm = memory_seconds(3 * shards, curves.memory)
            return units._replace(
                update=ticks(norm + memory_seconds(_touched(plan) * shards, curves.optimizer))
            )
        rates, records = host_rates(plan, self.hardware), records_of(self.spec, plan)
        held = slots_hold(plan, records)
        return units._replace(
            costs=tuple(with_host(c, s, plan=plan, rates=rates) for c, s in zip(costs, sizes, strict=True)),
            norm=norm_ticks(plan, sum(size.trained * count for size, count in pairs), rates=rates),
            records=records,
            spared=ticks(rates.disk * held.kept),
            ahead=ticks(rates.disk * sum(held)),
        )

    def _recomputed(self, plan: Plan, trace: Trace) -> int:
        """Returns the ticks per step that recompute adds to the trace without recompute."""
        none = RecomputeSection(mode="none")
        plain = next((one for one in self.spec.traces if one.holds_for(none, plan.microbatch)), trace)
        if plain is trace:
            return 0
        fused = plan.run.run.compile is True
        own, other = (self._work_of(plan, one, fused=fused, adds=False) for one in (trace, plain))
        longer = _device_ticks(own, serial=self._serial) - _device_ticks(other, serial=self._serial)
        return max(0, longer) * plan.accumulation

    def _terms(self, plan: Plan, streams: Streams, *, units: Units, recompute: int) -> TimeTerms:
        works = self._works(plan, self.spec.trace(plan.run.recompute, plan.microbatch))
        sent = _sent(works, accumulation=plan.accumulation)
        recompute = min(recompute, streams.computed - sent)
        busy = streams.computed + streams.copied - streams.idle
        overlapped = min(busy, max(0, streams.sent + busy - streams.compute))
        # The previous step ended with the host reading the loss: the device idles in between.
        between = self.hardware.rates.step_seconds
        terms = TimeTerms(
            compute=(streams.computed - recompute - sent) / TICKS + between,
            recompute=recompute / TICKS,
            exposed_all_gather=streams.waited_all_gather / TICKS,
            exposed_reduce_scatter=streams.waited_reduce_scatter / TICKS,
            exposed_all_reduce=(streams.waited_all_reduce + units.all_reduce) / TICKS,
            engine=streams.copied / TICKS,
            contention=self.hardware.contention * overlapped / TICKS,
            tensor_parallel=sent / TICKS,
            optimizer=units.update / TICKS,
        )
        return terms.model_copy(update={"stragglers": self.hardware.stragglers * terms.total})


def _touched(plan: Plan) -> float:
    """Returns how often the optimizer's update reads or writes each element of the shards.

    Stochastic rounding takes about fifty launches instead of one: measured, 0.69 s for 8.03e9 bf16 parameters
    on an H200 that moves 4.0 TB/s (bench/results/2026-11-20-gpu.md), which is 344 bytes per parameter. Raises
    PlanError for an unknown optimizer.
    """
    section = plan.run.optimizer
    name = section.name.lower()
    if name == "adamw":
        return 344 / ITEMSIZE[plan.precision.master] if plan.precision.stochastic_rounding else 7
    if name == "adamw8bit":
        return 4  # the least: value, gradient, and one byte of each moment, read and written
    if name == "sgd":
        return 5 if section.momentum else 3
    raise PlanError(
        "how long this optimizer's update takes is not known.",
        got=f"optimizer.name = {section.name!r}",
        fix="adamw, adamw8bit or sgd, for a prediction",
    )


def _busy(
    plan: Plan, trace: Trace, *, units: Units, hardware: Hardware, shards_read: int | None = None
) -> Busy:
    """Returns the busy ticks of the host's streams. `shards_read`: bytes; None: the least possible."""
    reductions = plan.accumulation if plan.sync_each_microbatch and plan.replicate_degree == 1 else 1
    gathers = gathers_of(plan, trace, costs=units.costs, counts=units.counts)
    each = list(zip(units.costs, units.counts, gathers, strict=True))
    read = least_shards_read(plan, each) if shards_read is None else shards_read
    disk = ticks(host_rates(plan, hardware).disk * read) - units.spared
    return busy_of(each, reductions=reductions, norm=units.norm or 0, disk=disk)


def _device_ticks(work: Work, *, serial: bool) -> int:
    """Returns the ticks of all phases of a microbatch, without tensor-parallel collectives."""
    return sum(
        (length - sent + (launched if serial else 0)) * turns
        for (length, launched), sent, turns in zip(work.lengths, work.sent, work.program.repeats, strict=True)
    )


def _sent(works: tuple[Work, Work], *, accumulation: int) -> int:
    """Returns the ticks per step in which computing waits for tensor-parallel collectives."""
    return sum(
        sent * turns * times
        for work, times in zip(works, (1, accumulation - 1), strict=True)
        for sent, turns in zip(work.sent, work.program.repeats, strict=True)
    )
