"""step_seconds(spec, plan, hardware): how long a step takes, term by term, by simulating one rank's streams.

    total = (streams + contention + optimizer + offload) * (1 + stragglers)

streams      when the compute stream is done with all microbatches: see [Note: the engine's order] in
             `planner.streams`. The time is computing, copies, or waiting for one kind of collective.
contention   hardware.contention * overlapped, where of the seconds of all collectives
                 overlapped = min(busy, sent + busy - streams)      busy = computing + copies
             pass beside what the compute stream does.
optimizer    the norm of the gradients (read once), their scaling (read and written), and the update, which
             for fused AdamW reads value, gradient and two moments and writes all but the gradient: 28 bytes a
             parameter in fp32. All over the own shards. In backward it takes the same, unit by unit, and a
             second sum over ranks: of the loss before backward, of the norm after it.
offload      of a plan with a tier, or with activations on the host, by how much its streams take longer than
             with an infinitely fast host and drive (see [Note: tiers] in `planner.offload`, and [Note:
             activations on the host]); a tier's update is there, and no part of `optimizer`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.errors import PlanError
from fullshard.planner.activations import activation_terms, moved_of, moves
from fullshard.planner.collectives import collective_seconds, shard_group
from fullshard.planner.offload import (
    Busy,
    HostRates,
    busy_of,
    gathers_of,
    host_rates,
    least_shards_read,
    norm_ticks,
    offload_terms,
    records_of,
    slots_hold,
    with_host,
    without_host,
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

_ROUNDING = 1e-6  # what whole ticks may be below their durations, and more
_SUM_BYTES = 32  # loss, count, squared norm and stop, in fp64: see `training.step`


def step_seconds(  # signature: as `search.predict`
    spec: ModelSpec, plan: Plan, hardware: Hardware
) -> TimeTerms:
    """Seconds of one optimizer step of `plan`. Raises PlanError where `spec` or `hardware` cannot tell."""
    return StepTimer(spec, hardware).seconds(plan)


class Units(NamedTuple):
    """The units of a trace on one mesh: their sizes and costs, how often each stands in the model, and ticks
    of the optimizer's step (`all_reduce`: of it, the sum over ranks; `norm`: of a tier's, on the host).
    `records`: bytes of each group of a tier's state; `spared`, `ahead`: ticks of the drive that a step saves,
    and that are behind it when it begins."""

    sizes: tuple[UnitBytes, ...]
    costs: tuple[UnitCost, ...]
    counts: tuple[int, ...]
    update: int
    all_reduce: int
    norm: int | None = None
    records: tuple[int, ...] = ()
    spared: int = 0
    ahead: int = 0


class Demand(NamedTuple):
    """Ticks of a step that no order of acts can save: see `least_seconds`."""

    copied: int
    network: int
    apart: int
    replicas: int
    inline: int  # on top of `copied` where gathers are not prefetched
    tail: int
    host: int = 0  # of the host's or the drive's busiest stream


class Computing(NamedTuple):
    """Ticks of a step's phases: of the device, and of the host's launches."""

    device: int
    issue: int


WorkKey = tuple[int, int, bool, bool, int]


@dataclass
class StepTimer:
    """Times plans of one spec on one hardware; remembers what they share. `skips`: see [Note: skipping]."""

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
        """Seconds of one step of `plan`, term by term."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        units = self.units(plan, trace)
        again = self._recomputed(plan, trace)
        if units.norm is None and not moves(trace.phases):
            return self._terms(plan, self._simulated(plan, trace, units=units), units=units, recompute=again)
        slow = self._simulated(plan, trace, units=units)
        fast = units._replace(costs=tuple(map(without_host, units.costs)), norm=None, ahead=0)
        streams = self._simulated(plan, trace, units=fast, moves_nothing=True)
        terms = self._terms(plan, streams, units=units, recompute=again)
        # However far ahead it reads, the drive has all of its own to do in every step.
        busy = _busy(plan, trace, units=units, hardware=self.hardware, shards_read=slow.shards_read)
        end = max(slow.compute, busy.disk)
        waits = max(0, end - streams.compute) / TICKS
        longer = terms.model_copy(update={"offload": waits, "stragglers": 0.0})
        return longer.model_copy(update={"stragglers": self.hardware.stragglers * longer.total})

    def offload(self, plan: Plan) -> OffloadTerms | None:
        """What the plan's tier takes; None without one."""
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
        """What activations that are saved on the host take; None where none are."""
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
            update_first=plan.run.offload.order == "alternate",
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
        """Sizes and costs of the trace's units on the plan's mesh."""
        mesh = (plan.replicate_degree, plan.shard_degree, plan.reshard_after_forward, plan.precision)
        apart = (plan.tensor_parallel, plan.run.offload)
        update = (plan.run.optimizer.name, plan.run.optimizer.momentum, plan.run.optimizer.in_backward)
        key = (*mesh, *apart, id(trace), *update)
        if key not in self._units:
            self._units[key] = self._measure(plan, trace)
        return self._units[key]

    def demand(self, plan: Plan) -> Demand:
        """What a step takes at least beside computing; the same for all recompute modes and prefetches."""
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
        host = max(_busy(plan, trace, units=units, hardware=self.hardware)) if units.norm is not None else 0
        return Demand(copied, network, apart, replicas, inline, units.update + units.all_reduce, host)

    def computing(self, plan: Plan) -> Computing:
        """What a step computes; the same for all meshes."""
        trace = self.spec.trace(plan.run.recompute, plan.microbatch)
        device = issue = 0
        for work, times in zip(self._works(plan, trace), (1, plan.accumulation - 1), strict=True):
            for (length, launched), turns in zip(work.lengths, work.program.repeats, strict=True):
                device += length * turns * times
                issue += launched * turns * times
        return Computing(device, issue)

    def least_seconds(self, computing: Computing, demand: Demand, *, inline: bool) -> float:
        """A bound below `seconds(plan).total`: no stream is done before it has done its own.

        `inline`: gathers are not prefetched.
        """
        busy = computing.device + demand.copied
        if self._serial:
            busy += computing.issue
        sent = demand.network + demand.apart + demand.replicas
        end = busy + (demand.inline if inline and not self._serial else 0)
        end += int((1 - self.hardware.overlap) * sent) if not inline or self._serial else 0
        end = max(end, computing.issue, demand.network, demand.apart, demand.replicas, demand.host)
        overlapped = min(busy, max(0, sent + busy - end))
        # Where collectives cost computing more than their own time, waiting for them may be the shorter way.
        contention = self.hardware.contention if self.hardware.contention <= 1 else 0.0
        total = (end + contention * overlapped + demand.tail) / TICKS + self.hardware.rates.step_seconds
        return total * (1 + self.hardware.stragglers) * (1 - _ROUNDING)

    def _works(self, plan: Plan, trace: Trace) -> tuple[Work, Work]:
        """The first microbatch, and the others."""
        fused = plan.run.run.compile is True
        adds = bool(trace.accumulating) and not plan.sync_each_microbatch
        return tuple(  # pyright: ignore[reportReturnType]
            self._work_of(plan, trace, fused=fused, adds=one) for one in (False, adds)
        )

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
            axis = axis_seconds(
                self.spec, phases, plan=plan, units=program.first_units, hardware=self.hardware
            )
            sent = tuple(map(ticks, axis))
            lengths = tuple(
                (ticks(cost.seconds) + own, cost.launches * launch)
                for cost, own in zip(costs, sent, strict=True)
            )
            self._work[key] = Work(program, lengths, sent, moved_of(phases, plan, hardware=self.hardware))
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
        if plan.run.offload.takes_optimizer:
            units = Units(sizes, costs, counts, 0, ticks(summed))
            rates = host_rates(plan, self.hardware)
            return _with_tier(units, plan, records=records_of(self.spec, plan), rates=rates)
        update = ticks(self._update_seconds(plan, sizes, counts=counts))
        return Units(sizes, costs, counts, update, ticks(summed))

    def _update_seconds(self, plan: Plan, sizes: tuple[UnitBytes, ...], *, counts: tuple[int, ...]) -> float:
        rates = self.hardware.rates
        shards = sum(
            size.trained * size.master_itemsize * count for size, count in zip(sizes, counts, strict=True)
        )
        return memory_seconds(3 * shards, rates.memory) + memory_seconds(
            _touched(plan) * shards, rates.optimizer
        )

    def _recomputed(self, plan: Plan, trace: Trace) -> int:
        """Ticks of a step by which its phases take longer than those of the trace that saves everything."""
        none = RecomputeSection(mode="none")
        plain = next((one for one in self.spec.traces if one.holds_for(none, plan.microbatch)), trace)
        if plain is trace:
            return 0
        own, other = (
            self._work_of(plan, one, fused=plan.run.run.compile is True, adds=False) for one in (trace, plain)
        )
        return (
            max(0, _device_ticks(own, serial=self._serial) - _device_ticks(other, serial=self._serial))
            * plan.accumulation
        )

    def _terms(self, plan: Plan, streams: Streams, *, units: Units, recompute: int) -> TimeTerms:
        works = self._works(plan, self.spec.trace(plan.run.recompute, plan.microbatch))
        sent = _sent(works, accumulation=plan.accumulation)
        recompute = min(recompute, streams.computed - sent)
        busy = streams.computed + streams.copied - streams.idle
        overlapped = min(busy, max(0, streams.sent + busy - streams.compute))
        # The step before ended with the host reading the loss: the device waits for what it does in between.
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


def _with_tier(units: Units, plan: Plan, *, records: tuple[int, ...], rates: HostRates) -> Units:
    """The same with what the plan's tier adds."""
    pairs = list(zip(units.sizes, units.counts, strict=True))
    trained, held = sum(size.trained * count for size, count in pairs), slots_hold(plan, records)
    return units._replace(
        costs=tuple(
            with_host(cost, size, plan=plan, rates=rates)
            for cost, size in zip(units.costs, units.sizes, strict=True)
        ),
        norm=norm_ticks(plan, trained, rates=rates),
        records=records,
        spared=ticks(rates.disk * held.kept),
        ahead=ticks(rates.disk * sum(held)),
    )


def _touched(plan: Plan) -> float:
    """How often the update reads or writes a value of the size of the shards.

    Rounding stochastically takes some fifty launches, not one: measured, 0.69 s for 8.03e9 bf16 parameters on
    an H200 that moves 4.0 TB/s (bench/results/2026-11-20-gpu.md), which is 344 bytes a parameter.
    Raises PlanError for an optimizer that is not known.
    """
    section = plan.run.optimizer
    name = section.name.lower()
    if name == "adamw":
        return 344 / ITEMSIZE[plan.precision.master] if plan.precision.stochastic_rounding else 7
    if name == "adamw8bit":
        return 4  # value, gradient, and a byte of each moment read and written: what cannot be spared
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
    """`shards_read`: bytes that the drive reads besides; None: at least what any order of acts reads."""
    reductions = plan.accumulation if plan.sync_each_microbatch and plan.replicate_degree == 1 else 1
    gathers = gathers_of(plan, trace, costs=units.costs, counts=units.counts)
    each = list(zip(units.costs, units.counts, gathers, strict=True))
    read = least_shards_read(plan, each) if shards_read is None else shards_read
    disk = ticks(host_rates(plan, hardware).disk * read) - units.spared
    return busy_of(each, reductions=reductions, norm=units.norm or 0, disk=disk)


def _device_ticks(work: Work, *, serial: bool) -> int:
    """Without what is sent between ranks that share matmuls."""
    return sum(
        (length - sent + (launched if serial else 0)) * turns
        for (length, launched), sent, turns in zip(work.lengths, work.sent, work.program.repeats, strict=True)
    )


def _sent(works: tuple[Work, Work], *, accumulation: int) -> int:
    """Ticks of a step that computing waits for ranks which share its matmuls."""
    return sum(
        sent * turns * times
        for work, times in zip(works, (1, accumulation - 1), strict=True)
        for sent, turns in zip(work.sent, work.program.repeats, strict=True)
    )
