"""Predicted time of a step, term by term, from a simulation of one rank's streams.

    total = (streams + contention + optimizer + offload) * (1 + stragglers)

streams      when the compute stream finishes all microbatches: see [Note: FSDP2's order] in
             `planner.predict.fsdp_time`. It is spent computing, copying, or waiting for a kind of collective.
contention   hardware.contention * overlapped: the seconds of collectives that overlap the compute stream,
                 overlapped = min(busy, sent + busy - streams)      busy = computing + copies
optimizer    the gradient norm (read once), gradient scaling (read and written), and the update. Fused AdamW
             reads value, gradient and two moments and writes all except the gradient: 28 bytes per parameter
             in fp32. All over the rank's shards. See `planner.predict.collective_updates` for Muon, SOAP and
             Adafactor, whose exchanges count as collectives of ranks that share work.
offload      the extra time of the streams compared with an infinitely fast host and drive, for a plan with an
             offload target or with activations on the host (see [Note: tiers] and [Note: activations on the
             host] in `planner.predict.offload`). It includes an offloaded update; `optimizer` does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from fullshard.errors import PlanError
from fullshard.planner.predict import collectives, fsdp_time, offload, simulate
from fullshard.planner.predict.collective_updates import collective_update_seconds
from fullshard.planner.predict.phases import build_schedule, memory_access_seconds, phase_costs
from fullshard.planner.predict.unit_bytes import UnitBytes, unit_bytes
from fullshard.spec.groups import ROUNDING_CHUNK_ELEMENTS
from fullshard.spec.machine.hardware import Hardware, Rates
from fullshard.spec.model import MicrobatchTrace, ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import ActivationOffloadTerms, OffloadTerms, TimeTerms
from fullshard.spec.settings.train_section import RecomputeSection

_ROUNDING = 1e-6  # bound on the relative error of rounding durations to whole ticks
_SUM_BYTES = 32  # loss, count, squared norm and stop, in fp64: see `training.step`


class UnitCosts(NamedTuple):
    """Sizes and costs of a trace's units on one mesh, and the optimizer step's costs."""

    trace: MicrobatchTrace
    sizes: tuple[UnitBytes, ...]
    costs: tuple[fsdp_time.UnitCost, ...]
    without_host: tuple[fsdp_time.UnitCost, ...]  # costs with an infinitely fast host and drive
    counts: tuple[int, ...]  # number of units of the model that each stands for
    all_reduce: int  # ticks of the optimizer step's sum over ranks, and of the one for scales of fp8
    update: int = 0  # ticks of the update on the device
    exchanges: int = 0  # ticks of the exchanges of Muon, SOAP and Adafactor
    norm: int | None = None  # ticks of the gradient norm on the host; None without an offload target
    records: tuple[int, ...] = ()  # bytes of each group's offloaded state
    spared: int = 0  # ticks of drive reads that a step saves
    ahead: int = 0  # ticks by which the drive's work is ahead when a step begins


class LeastTicks(NamedTuple):
    """Least ticks per step of each stream beside computing, for `StepTimePredictor.lower_bound_seconds`."""

    copied: int  # copies on the compute stream
    network: int  # collectives on the shard axis's network
    replicas: int  # all-reduces on a separate network
    tail: int  # the optimizer step with its sum over ranks
    host: int = 0  # the busiest stream of the host or the drive


class PhaseTicks(NamedTuple):
    """Ticks of all phases of a step."""

    device: int  # ticks of kernels on the device
    issue: int  # ticks of the host's launches


WorkKey = tuple[int, int, bool]


@dataclass
class StepTimePredictor:
    """Predicts the time of plans of one spec on one hardware. `skips`: see [Note: skipping] in `simulate`."""

    spec: ModelSpec
    hardware: Hardware
    skips: bool = True
    _work: dict[WorkKey, simulate.MicrobatchWork] = field(
        default_factory=dict[WorkKey, simulate.MicrobatchWork]
    )
    _units: dict[tuple[object, ...], UnitCosts] = field(default_factory=dict[tuple[object, ...], UnitCosts])

    def __post_init__(self) -> None:
        self._serial = self.hardware.device == "cpu"

    def predict_time(self, plan: Plan) -> TimeTerms:
        units = self.unit_costs(plan)
        slow = self.simulate_streams(plan, units=units)
        if units.norm is None and not offload.has_activation_copies(units.trace.phases):
            return self._time_terms(plan, slow)
        fast = units._replace(costs=units.without_host, norm=None, ahead=0)
        streams = self.simulate_streams(plan, units=fast, without_activation_copies=True)
        terms = self._time_terms(plan, streams)
        # The drive must finish all of its work within every step, no matter how far ahead it reads.
        end = max(slow.compute, self._host_busy_ticks(plan, shards_read=slow.shards_read).disk)
        waits = max(0, end - streams.compute) / fsdp_time.TICKS
        longer = terms.model_copy(update={"offload": waits, "stragglers": 0.0})
        return longer.model_copy(update={"stragglers": self.hardware.stragglers * longer.total})

    def predict_offload(self, plan: Plan) -> OffloadTerms | None:
        """Returns the predicted host and drive use of the plan's offload target; None without one."""
        units = self.unit_costs(plan)
        if units.norm is None:
            return None
        reads = plan.run.offload.is_on_drive and plan.run.offload.offloads_parameters
        shards_read = self.simulate_streams(plan, units=units).shards_read if reads else 0
        return offload.predict_offload_terms(
            plan,
            list(zip(units.sizes, units.counts, strict=True)),
            records=units.records,
            busy=self._host_busy_ticks(plan, shards_read=shards_read),
            shards_read=shards_read,
            hardware=self.hardware,
        )

    def predict_activation_offload(self, plan: Plan) -> ActivationOffloadTerms | None:
        """Returns the predicted host use of activations that are copied there; None if none are copied."""
        trace = self.spec.trace_for_plan(plan)
        phases = trace.phases
        if not offload.has_activation_copies(phases):
            return None
        runs = self._microbatch_work(plan, trace, adds=False).program.repeats
        return offload.predict_activation_offload_terms(
            plan, phases, runs_per_microbatch=runs, hardware=self.hardware
        )

    def simulate_streams(
        self, plan: Plan, *, units: UnitCosts, without_activation_copies: bool = False
    ) -> fsdp_time.StreamClocks:
        """Returns the streams after a step's last backward.

        without_activation_copies: leaves out the copies of offloaded activations
        """
        streams = fsdp_time.StreamClocks(self._serial, 1 - self.hardware.overlap, disk=-units.ahead)
        policy = simulate.EventOrderSettings(
            keeps=not plan.reshard_after_forward,
            syncs=plan.sync_each_microbatch,
            act=fsdp_time.to_ticks(self.hardware.rates.unit_seconds),
            norm=units.norm,
            skips=self.skips,
        )
        works = self._first_and_later_works(plan)
        if without_activation_copies:
            works = (works[0]._replace(moved=()), works[1]._replace(moved=()))
        simulate.simulate_next_step(streams, units.costs, policy, works=works, accumulation=plan.accumulation)
        return streams

    def unit_costs(self, plan: Plan) -> UnitCosts:
        trace = self.spec.trace_for_plan(plan)
        mesh = (plan.strategy, plan.replicate_degree, plan.shard_degree, plan.reshard_after_forward)
        apart = (plan.precision, plan.tensor_parallel, plan.run.offload, plan.run.communication)
        section = plan.run.optimizer
        update = (section.name, bool(section.options.get("momentum")), section.matrix_section, plan.run.ema)
        key = (*mesh, *apart, id(trace), *update)
        if key not in self._units:
            self._units[key] = self._compute_unit_costs(plan, trace)
        return self._units[key]

    def least_stream_ticks(self, plan: Plan) -> LeastTicks:
        """Returns the least ticks per step of each stream, for any recompute mode."""
        units = self.unit_costs(plan)
        begun = {phase.unit for phase in units.trace.phases if phase.event == "pre_backward"}
        gathers = offload.count_gathers_per_step(plan, units.trace, costs=units.costs, counts=units.counts)
        reductions = plan.accumulation if plan.sync_each_microbatch else 1
        rest = plan.accumulation - reductions
        copied = network = replicas = 0
        for index, (cost, count, loads) in enumerate(zip(units.costs, units.counts, gathers, strict=True)):
            if not cost.has_parameters:
                continue
            copied += loads * cost.copy_out
            network += loads * cost.gather
            if cost.is_trained and index in begun:
                copied += count * (reductions * cost.pack + rest * min(cost.keep_unsynced, cost.keep_again))
                network += count * reductions * cost.scatter if cost.is_sharded else 0
                if cost.shares_wires:
                    network += count * cost.all_reduce
                else:
                    replicas += count * cost.all_reduce
        host = 0 if units.norm is None else max(self._host_busy_ticks(plan))
        return LeastTicks(copied, network, replicas, units.update + units.exchanges + units.all_reduce, host)

    def sum_phase_ticks(self, plan: Plan) -> PhaseTicks:
        """Returns the ticks of all phases of a step, which do not depend on the mesh."""
        device = issue = 0
        for work, times in zip(self._first_and_later_works(plan), (1, plan.accumulation - 1), strict=True):
            for (length, launched), turns in zip(work.lengths, work.program.repeats, strict=True):
                device += length * turns * times
                issue += launched * turns * times
        return PhaseTicks(device, issue)

    def lower_bound_seconds(self, computing: PhaseTicks, demand: LeastTicks) -> float:
        """Returns a lower bound on a step's seconds, from each stream's work."""
        busy = computing.device + demand.copied
        if self._serial:
            busy += computing.issue
        sent = demand.network + demand.replicas
        end = busy + int((1 - self.hardware.overlap) * sent)
        end = max(end, computing.issue, demand.network, demand.replicas, demand.host)
        overlapped = min(busy, max(0, sent + busy - end))
        # If contention costs more than a collective's own time, waiting may be faster than overlapping.
        contention = self.hardware.contention if self.hardware.contention <= 1 else 0.0
        total = (end + contention * overlapped + demand.tail) / fsdp_time.TICKS
        return total * (1 + self.hardware.stragglers) * (1 - _ROUNDING)

    def _first_and_later_works(self, plan: Plan) -> tuple[simulate.MicrobatchWork, simulate.MicrobatchWork]:
        trace = self.spec.trace_for_plan(plan)
        adds = bool(trace.accumulating) and not plan.sync_each_microbatch
        first = self._microbatch_work(plan, trace, adds=False)
        return first, self._microbatch_work(plan, trace, adds=adds)

    def _microbatch_work(self, plan: Plan, trace: MicrobatchTrace, *, adds: bool) -> simulate.MicrobatchWork:
        key = (id(trace), plan.microbatch, adds)
        if key not in self._work:
            phases, rates = trace.accumulating if adds else trace.phases, self.hardware.rates_at_world_size
            kernels, received = self.spec.kernels, collectives.fullest_rank_rows_over_mean(self.spec, plan)
            costs = phase_costs(phases, kernels, rates=rates, microbatch=plan.microbatch, received=received)
            program = build_schedule(self.spec, trace, phases=phases)
            among = collectives.model_parallel_seconds(self.spec, phases, plan=plan, hardware=self.hardware)
            to_ticks = fsdp_time.to_ticks
            sent = tuple(map(to_ticks, among))
            lengths = tuple(
                (to_ticks(cost.seconds) + own, to_ticks(cost.launches * rates.launch_seconds))
                for cost, own in zip(costs, sent, strict=True)
            )
            moved = offload.activation_copy_ticks(phases, plan, hardware=self.hardware)
            waits = tuple(sum(n for index, n in one.work if kernels[index].waits) for one in phases)
            self._work[key] = simulate.MicrobatchWork(program, lengths, sent, moved, waits)
        return self._work[key]

    def _compute_unit_costs(self, plan: Plan, trace: MicrobatchTrace) -> UnitCosts:
        program = self._microbatch_work(plan, trace, adds=False).program
        hardware, world = self.hardware, plan.world_size
        firsts = map(program.traced.index, range(len(set(program.traced))))
        sizes = tuple(unit_bytes(self.spec.units[unit], plan) for unit in firsts)
        counts = tuple(program.traced.count(i) for i in range(len(sizes)))
        costs = tuple(fsdp_time.resident_unit_cost(size, hardware, world_size=world) for size in sizes)
        group = collectives.shard_group_layout(world, per_node=hardware.ranks_per_node, world_size=world)
        summed = collectives.collective_seconds("all_reduce", _SUM_BYTES, group=group, hardware=hardware)
        pairs = list(zip(sizes, counts, strict=True))
        summed += _fp8_scale_seconds(pairs, plan, hardware=hardware)
        units = UnitCosts(trace, sizes, costs, costs, counts, fsdp_time.to_ticks(summed))
        if not plan.run.offload.offloads_optimizer:
            shards = sum(s.trained * s.master_itemsize * n for s, n in pairs)
            norm = memory_access_seconds(3 * shards, hardware.rates.memory)
            if plan.precision.stochastic_rounding and plan.device == "cpu":
                update = sum(_stochastic_rounding_update_seconds(s, hardware.rates) * n for s, n in pairs)
            else:
                update = memory_access_seconds(_accesses_per_element(plan) * shards, hardware.rates.optimizer)
            more = collective_update_seconds(self.spec, plan, hardware=hardware)
            exchanges = fsdp_time.to_ticks(more.exchanges)
            update = fsdp_time.to_ticks(norm + update + more.computing)
            return units._replace(update=update, exchanges=exchanges)
        rates = offload.offload_seconds_per_byte_or_parameter(plan, hardware)
        records = offload.state_bytes_of_each_group(self.spec, plan)
        held = offload.slot_bytes_at_update_start(plan, records)
        return units._replace(
            costs=tuple(
                offload.add_offload_costs(c, s, plan=plan, rates=rates)
                for c, s in zip(costs, sizes, strict=True)
            ),
            norm=offload.host_norm_ticks(plan, sum(s.trained * n for s, n in pairs), rates=rates),
            records=records,
            spared=fsdp_time.to_ticks(rates.disk * held.kept),
            ahead=fsdp_time.to_ticks(rates.disk * sum(held)),
        )

    def _extra_recompute_ticks(self, plan: Plan) -> int:
        """Returns the ticks per step that recompute adds to the trace without it; 0 without such a trace."""
        trace, none = self.unit_costs(plan).trace, RecomputeSection(mode="none")
        sizes, compiled = plan.microbatch, trace.compiled
        valid = (one for one in self.spec.traces if one.is_valid_for(none, sizes, compiled=compiled))
        own, other = (self._microbatch_work(plan, one, adds=False) for one in (trace, next(valid, trace)))
        longer = _sum_compute_ticks(own, serial=self._serial) - _sum_compute_ticks(other, serial=self._serial)
        return max(0, longer) * plan.accumulation

    def _host_busy_ticks(self, plan: Plan, *, shards_read: int | None = None) -> offload.HostBusyTicks:
        """Returns the busy ticks of the host's streams. `shards_read`: bytes; None: the least possible."""
        units = self.unit_costs(plan)
        reductions = plan.accumulation if plan.sync_each_microbatch else 1
        gathers = offload.count_gathers_per_step(plan, units.trace, costs=units.costs, counts=units.counts)
        each = list(zip(units.costs, units.counts, gathers, strict=True))
        read = offload.least_shard_bytes_read(plan, each) if shards_read is None else shards_read
        rates = offload.offload_seconds_per_byte_or_parameter(plan, self.hardware)
        disk = fsdp_time.to_ticks(rates.disk * read) - units.spared
        return offload.host_busy_ticks(each, reductions=reductions, norm=units.norm or 0, disk=disk)

    def _time_terms(self, plan: Plan, streams: fsdp_time.StreamClocks) -> TimeTerms:
        units = self.unit_costs(plan)
        sent = sum(
            sent * turns * times
            for work, times in zip(self._first_and_later_works(plan), (1, plan.accumulation - 1), strict=True)
            for sent, turns in zip(work.sent, work.program.repeats, strict=True)
        )
        kernels = max(0, streams.computed - streams.idle - sent)
        recompute = min(self._extra_recompute_ticks(plan), kernels)
        busy = streams.computed + streams.copied - streams.idle
        overlapped = min(busy, max(0, streams.sent + busy - streams.compute))
        terms = TimeTerms(
            compute=(kernels - recompute) / fsdp_time.TICKS,
            recompute=recompute / fsdp_time.TICKS,
            launch_gaps=(streams.computed - sent - kernels) / fsdp_time.TICKS,
            exposed_all_gather=streams.waited_all_gather / fsdp_time.TICKS,
            exposed_reduce_scatter=streams.waited_reduce_scatter / fsdp_time.TICKS,
            exposed_all_reduce=(streams.waited_all_reduce + units.all_reduce) / fsdp_time.TICKS,
            engine=streams.copied / fsdp_time.TICKS,
            contention=self.hardware.contention * overlapped / fsdp_time.TICKS,
            model_parallel=(sent + units.exchanges) / fsdp_time.TICKS,
            optimizer=units.update / fsdp_time.TICKS,
        )
        return terms.model_copy(update={"stragglers": self.hardware.stragglers * terms.total})


def _fp8_scale_seconds(sizes: Sequence[tuple[UnitBytes, int]], plan: Plan, *, hardware: Hardware) -> float:
    """Returns the seconds in which the ranks agree on the scales of weights that are gathered in fp8.

    Every rank reads its shards, and one all-reduce finds the largest values: see `parallel.fp8`.
    """
    read = sum(size.in_fp8 * size.master_itemsize * count for size, count in sizes)
    if not read:
        return 0.0
    per_node, world = hardware.ranks_per_node, plan.world_size
    group = collectives.shard_group_layout(plan.shard_degree, per_node=per_node, world_size=world)
    matrices = 4 * sum(count for _, count in sizes)  # some matrices a unit, each an fp32 number
    reduced = collectives.collective_seconds("all_reduce", matrices, group=group, hardware=hardware)
    return reduced + memory_access_seconds(read, hardware.rates.memory)


def _stochastic_rounding_update_seconds(size: UnitBytes, rates: Rates) -> float:
    """Returns the seconds of AdamW's update of a unit with stochastic rounding on the CPU.

    Each chunk of a shard takes 185 operations, which move 1,594 bytes per element in all, both counted. The
    unit's shards are assumed to be equally large.
    """
    if not size.trained:
        return 0.0
    chunks = max(size.trained_parameters, ceil(size.trained / ROUNDING_CHUNK_ELEMENTS))
    return 185 * chunks * memory_access_seconds(1594 / 185 * size.trained / chunks, rates.memory)


def _accesses_per_element(plan: Plan) -> float:
    """Returns how often the optimizer's update reads or writes each element of the shards.

    On a GPU, stochastic rounding is one kernel, like AdamW's own (not measured there).

    Raises PlanError for an unknown optimizer.
    """
    section, average = plan.run.optimizer, plan.run.ema
    name = section.name.lower()
    averaging = 3 / average.every if average.decay else 0  # value and average, read; average, written
    if name in ("adamw", "muon", "soap"):
        return 7 + averaging
    if name == "adafactor":
        return 16 + averaging  # sums of rows and columns, three products, norm, scaling, decay, update
    if name == "adamw8bit":
        return 4 + averaging  # the least: value, gradient, and one byte of each moment, read and written
    if name == "sgd":
        return (5 if section.options.get("momentum") else 3) + averaging
    raise PlanError(
        "how long this optimizer's update takes is not known.",
        got=f"optimizer.name = {section.name!r}",
        fix="adamw, muon, soap, adafactor, adamw8bit or sgd, for a prediction",
    )


def _sum_compute_ticks(work: simulate.MicrobatchWork, *, serial: bool) -> int:
    """Returns the ticks of all phases of a microbatch, without those of `MicrobatchWork.sent`."""
    return sum(
        (length - sent + (launched if serial else 0)) * turns
        for (length, launched), sent, turns in zip(work.lengths, work.sent, work.program.repeats, strict=True)
    )
