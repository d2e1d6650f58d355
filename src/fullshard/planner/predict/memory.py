"""Peak memory of one rank in a step, term by term, computed from shapes alone.

[Note: the replay]
A step consists of the model's own computation (the trace in the ModelSpec: phases, each with its highest
moment) and of FSDP2's events between phases. FSDP2's memory does not change within a phase. So the peak is
the maximum over all phases of (the phase's highest moment + FSDP2's bytes then), and over a few moments
inside the events. These are the events of `torch.distributed.fsdp._fully_shard`:

unshard       a unit's shards, cast to the compute dtype (W/N bytes, freed at once), are gathered into one
              buffer of W bytes, which is copied out into the parameters, another W bytes. W: the parameters
              of the unit in that dtype, dim 0 padded to a multiple of N. Over one rank there is only the
              copy. In forward the buffer lives until after the next unit's copy-out (so that the next gather
              may overlap), or until forward ends. In backward it is freed after its own copy-out.
reshard       the parameters' W bytes are freed.
experts       sharded in another dim than 0 (`expert_shard_dim`) are copied out twice, through W more bytes.
prefetch      in backward, once a unit is unsharded, the buffer of the one before it is already gathered.
reduce        a unit's gradients are copied into one buffer of R bytes (in the reduce dtype, padded; on the
              CPU, some are copied twice, `UnitBytes.reduce_copies`),
              and freed. The reduced chunk of R/N bytes, cast to the master dtype, becomes the gradients. The
              buffer lives until the next unit's backward ends. With replicas, the all-reduced chunk is kept
              until the end of backward, beside its cast.
without sync  gradients stay unsharded, in the reduce dtype, until the last microbatch.

Collectives need no tensor memory of their own: NCCL's is not a tensor, gloo's are replaced
(`distributed.collectives`). The random state that recompute saves for each block (5,056 bytes on the
CPU) is not counted.
"""

from typing import NamedTuple, cast

from fullshard.errors import PlanError
from fullshard.planner.predict import fsdp_memory
from fullshard.planner.predict.collective_updates import collective_temporary_bytes, state_bytes_below_adamw
from fullshard.planner.predict.collectives import uneven_expert_rows_bytes
from fullshard.planner.predict.offload import device_update_buffer_bytes
from fullshard.planner.predict.unit_bytes import (
    UnitBytes,
    optimizer_state_bytes,
    parameter_average_bytes,
    unit_bytes,
    update_temporary_bytes,
)
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms


def peak_bytes(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> MemoryTerms:
    """Returns the predicted peak memory of `rank`. Rank 0 needs the most. See [Note: the replay].

    Raises PlanError if `spec` was traced with another microbatch, sequence, precision or recompute than the
    plan's, or if the size of the plan's optimizer state is not known.

    >>> fs.peak_bytes(spec, plan).total <= hardware.device_bytes_limit
    True
    """
    check_length_and_precision(spec, plan)
    replay = _StepMemoryReplay(spec, plan, rank=rank)
    # The first microbatch allocates gradients that later ones accumulate into; the last reduces. Those in
    # between are equal, so one represents them.
    for index in range(min(plan.accumulation, 3)):
        last = index == min(plan.accumulation, 3) - 1
        adds = index > 0 and not plan.sync_each_microbatch and bool(replay.trace.accumulating)
        replay.replay_microbatch(plan.accumulation if last else index + 1, last=last, accumulating=adds)
    return replay.replay_update_and_return_peak()


def check_length_and_precision(spec: ModelSpec, plan: Plan) -> None:
    """Raises PlanError if `spec` was described with another sequence length or precision than the plan's."""
    differing = [
        f"{name}: {described} described, {planned} planned"
        for name, described, planned in (
            ("sequence_length", spec.sequence_length, plan.run.data.sequence_length),
            ("precision", spec.precision, plan.precision),
        )
        if described != planned
    ]
    if differing:
        raise PlanError(
            f"the spec of {spec.name} was described under other settings than the plan's.",
            got="; ".join(differing),
            why="what a microbatch allocates follows from them",
            fix="describe(model, plan) with this plan",
        )


def bytes_by_unit_kind(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> dict[int, UnitBytes]:
    """Returns the sizes of one unit of each kind, by kind (the index of the first unit of that kind).

    They are cached on `spec` by all that `unit_bytes` depends on.
    """
    run, cache = plan.run, spec.derived_value_cache
    degrees = (plan.replicate_degree, plan.shard_degree, plan.tensor_parallel, plan.expert_parallel)
    dtypes = (plan.precision, run.precision)
    settings = (
        plan.has_expert_mesh,
        plan.strategy,
        plan.reshard_after_forward,
        run.offload,
        run.communication,
    )
    key = ("bytes by unit kind", rank, plan.device, *degrees, *dtypes, *settings)
    found = cast(dict[int, UnitBytes] | None, cache.get(key))
    if found is None:
        kinds = set(spec.first_identical_unit_indices)
        found = {kind: unit_bytes(spec.units[kind], plan, rank=rank) for kind in kinds}
        cache[key] = found
    return found


class _StepMemoryReplay:
    """Replays the memory of a step: its phases, and FSDP2's events between them."""

    def __init__(self, spec: ModelSpec, plan: Plan, *, rank: int) -> None:
        self.spec, self.plan, self.rank = spec, plan, rank
        self.trace = spec.trace_for_plan(plan)
        self.kinds = bytes_by_unit_kind(spec, plan, rank=rank)
        self.units = units = fsdp_memory.memory_trace(spec, plan).units
        sizes = [self.kinds[spec.first_identical_unit_indices[unit]] for unit in units]
        self.ledger = fsdp_memory.MemoryLedger()
        self.gathering = fsdp_memory.UnshardMemoryReplay(sizes, self.ledger)
        self.reducing = fsdp_memory.GradientMemoryReplay(sizes, self.ledger, plan=plan)
        self.passing = device_update_buffer_bytes(spec, plan, rank=rank)

    def replay_microbatch(self, number: int, *, last: bool, accumulating: bool) -> None:
        """Replays microbatch `number`, from 1. `accumulating`: earlier ones left unsharded gradients."""
        found = fsdp_memory.memory_trace(self.spec, self.plan, accumulating=accumulating)
        ledger, live, before = self.ledger, fsdp_memory.LiveBytes(), self.ledger.current_bytes_by_purpose()
        for phase in found.phases:
            if phase.starts_period:
                before = ledger.current_bytes_by_purpose()
            ledger.moment = (f"microbatch {number}, {phase.event.replace('_', ' ')}", phase.unit)
            self._replay_fsdp_event(phase, live, last=last)
            ledger.update_peaks(phase.peak)
            live = phase.end
            if phase.skipped_periods:
                ledger.repeat_change(before, phase.skipped_periods)

    def replay_update_and_return_peak(self) -> MemoryTerms:
        """Replays the optimizer step, and returns the peak of the whole step."""
        sizes, kinds, ledger = self.kinds, self.spec.first_identical_unit_indices, self.ledger
        ledger.moment = ("optimizer step", -1)
        temporaries = update_temporary_bytes((sizes[kind] for kind in kinds), self.plan)
        temporaries = max(temporaries, collective_temporary_bytes(self.spec, self.plan, rank=self.rank))
        ledger.update_peaks(fsdp_memory.LiveBytes(backward=temporaries))
        (moment, unit), held, live = ledger.best
        optimizer = {kind: optimizer_state_bytes(size, self.plan) for kind, size in sizes.items()}
        below_adamw = state_bytes_below_adamw(self.spec, self.plan, rank=self.rank)
        lasting = {
            "parameter_shards": sum(sizes[kind].shards - sizes[kind].frozen_shards for kind in kinds),
            "frozen_shards": sum(sizes[kind].frozen_shards for kind in kinds),
            "optimizer_state": sum(optimizer[kind] for kind in kinds) + self.passing - below_adamw,
            "parameter_averages": sum(parameter_average_bytes(sizes[kind], self.plan) for kind in kinds),
            "buffers": self.spec.buffer_bytes,
            "batch": round(self.trace.batch_bytes.value_at(self.plan.microbatch)),
        }
        uneven = uneven_expert_rows_bytes(self.spec, self.plan)
        compute_pool = ledger.compute_pool + sum(lasting.values()) + uneven
        return MemoryTerms(
            moment=f"{moment} of {self.spec.units[self.units[unit]].name}" if unit >= 0 else moment,
            **lasting,
            gradients=held.gradients,
            units_in_flight=held.in_flight + held.buffers + held.reduced,
            whole_gradients=held.whole + live.gradients,
            activations=live.activations,
            loss=live.loss,
            backward=live.backward,
            uneven_rows=uneven,
            stream_pools=(compute_pool, ledger.gather_pool, ledger.reduce_pool),
        )

    def _replay_fsdp_event(
        self, phase: fsdp_memory.PhaseBytes, live: fsdp_memory.LiveBytes, *, last: bool
    ) -> None:
        """Replays FSDP2's event that opens `phase`. `live`: the model's own bytes before the phase."""
        match phase.event:
            case "pre_forward":
                self.gathering.unshard_unit(phase.unit, live, forward=True)
            case "post_forward":
                self.gathering.replay_post_forward(phase.unit)
            case "end_forward":
                self.gathering.free_forward_gather_buffer()
            case "pre_backward":
                self.gathering.replay_pre_backward(phase.unit, live)
            case "post_backward":
                if last or self.plan.reshard_after_forward:
                    self.gathering.reshard_unit(phase.unit)
                self.reducing.replay_post_backward(phase.unit, live, last=last)
            case "end_backward":
                self.gathering.free_unused_prefetches()
                self.reducing.free_buffers_after_backward(live)
            case "start":
                pass


class LeastBytes(NamedTuple):
    """Bytes that a step certainly needs."""

    always: int  # at every moment
    once: int  # in addition, at one moment


def least_bytes_of_trace(spec: ModelSpec, plan: Plan) -> LeastBytes:
    """Returns the bytes of the batch, and the most of the model's own computation: the same on all meshes."""
    phases = fsdp_memory.memory_trace(spec, plan).phases
    batch = round(spec.trace_for_plan(plan).batch_bytes.value_at(plan.microbatch))
    return LeastBytes(always=batch, once=max(phase.peak.total for phase in phases))


def least_bytes_of_mesh(spec: ModelSpec, plan: Plan) -> LeastBytes:
    """Returns the bytes of shards, optimizer state and buffers, and of gradients: the same for all traces."""
    kinds = spec.first_identical_unit_indices
    sizes = bytes_by_unit_kind(spec, plan)
    own = {
        kind: s.shards + optimizer_state_bytes(s, plan) + parameter_average_bytes(s, plan)
        for kind, s in sizes.items()
    }
    always = sum(each * kinds.count(kind) for kind, each in own.items()) - state_bytes_below_adamw(spec, plan)
    # Few gradients are in memory at once if they are offloaded.
    gradients = 0 if plan.copies_gradients_to_host else sum(sizes[kind].gradient for kind in kinds)
    return LeastBytes(always=always + spec.buffer_bytes, once=gradients)


def peak_lower_bound(trace: LeastBytes, mesh: LeastBytes) -> int:
    """Returns a lower bound on the peak memory of a step, in bytes."""
    return trace.always + mesh.always + max(trace.once, mesh.once)
