"""Candidate plans: every combination of the settings that a run leaves open, with their bytes and seconds.

The order matters: of two plans that take equally long, the earlier candidate is preferred. Plain settings
come before elaborate ones: replicas before shards, full_shard before the other strategies, no recompute
before some, uncompiled before compiled, larger microbatches before smaller ones.

[Note: groups follow nodes]
A group of ranks that shares parameters is a whole number of nodes, or divides a node's ranks: any other would
send as much between nodes as a larger one. A run may pin any other.

[Note: exact pruning]
A search covers all candidates, and its answer is the same as if each were predicted in full. Bounds let it
skip a candidate that cannot finish before another (its computing alone, or one of its streams alone, takes
longer), or that cannot fit: the bytes of its shards and of its microbatch, without FSDP2's own, are too many.
Compiling takes time before the first step, of which each step of the run bears its share.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from fullshard.errors import PlanError
from fullshard.planner.predict.collectives import device_context_bytes
from fullshard.planner.predict.memory import least_bytes_of_mesh, least_bytes_of_trace, peak_lower_bound
from fullshard.planner.predict.offload import choose_update_device
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import MicrobatchTrace, ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, OffloadTerms, Prediction, fits_in_host_memory
from fullshard.spec.run import Run, Strategy, Tier
from fullshard.spec.settings.model_section import indivisible_experts_error
from fullshard.spec.settings.run_checks import divisors
from fullshard.spec.settings.train_section import RecomputeSection

T = TypeVar("T")
GradientSync = Literal["every_microbatch", "last_microbatch"]
_PARTS = 4  # all blocks, in parts of which some recompute
_HYBRID = (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)
_ORDER = (
    Strategy.NO_SHARD,
    Strategy.FULL_SHARD,
    Strategy.SHARD_GRAD_OP,
    Strategy.ZERO1,
    Strategy.HYBRID_SHARD,
    Strategy.HYBRID_SHARD_ZERO2,
)
# Seconds of compiling before the first step. Assumed, not measured: tens of seconds for the graphs of a
# block, which equal blocks share.
COMPILE_SECONDS = 30.0
# Steps of a run that counts epochs of data that is not tokenized yet: a short run of pretraining.
LONG_RUN_STEPS = 10_000
Memory = Callable[[ModelSpec, Plan], MemoryTerms]


class ShardingChoice(NamedTuple):
    """A sharding strategy with its degrees."""

    strategy: Strategy
    shard_degree: int  # number of ranks that share the parameters


class MicrobatchSplit(NamedTuple):
    """Division of a rank's sequences per step into microbatches."""

    microbatch: int  # sequences per microbatch
    accumulation: int  # microbatches per step
    sync: GradientSync  # reduce gradients after each microbatch, or after the last


class Candidate(NamedTuple):
    """One combination of the settings that a search chooses."""

    mesh: ShardingChoice
    batch: MicrobatchSplit
    recompute: RecomputeSection
    compiled: bool
    is_duplicate: bool = False  # a candidate of another strategy is equivalent
    tier: Tier = "none"  # the offload target, `offload.tier`

    @property
    def strategy_label(self) -> str:
        """Label under which a search reports its best plan: strategy and offload target."""
        strategy = str(self.mesh.strategy)
        return strategy if self.tier == "none" else f"{strategy} {self.tier}"


def iterate_candidates(
    spec: ModelSpec, hardware: Hardware, *, run: Run, tiers: Sequence[Tier] = ()
) -> Iterator[Candidate]:
    """Yields all combinations of the settings that `run` leaves open, on all ranks of `hardware`.

    tiers: offload targets to try instead of the run's own

    Raises PlanError if the batch or a pinned setting is impossible on this many ranks.
    """
    own: Tier = "none" if run.offload.tier == "auto" else run.offload.tier
    for tier in tiers or (own,):
        yield from _iterate_with_tier(spec, hardware, run=run, tier=tier)


def _iterate_with_tier(spec: ModelSpec, hardware: Hardware, *, run: Run, tier: Tier) -> Iterator[Candidate]:
    per_node, split = hardware.ranks_per_node, run.sharding.tensor_degree
    run = run.with_settings({"offload": {"tier": tier}, "sharding": {"tensor_parallel": split}})
    world = hardware.world_size // split
    node = per_node // split if per_node % split == 0 else 1
    meshes = list(_iterate_sharding_choices(run, world, node=node))
    if (experts := run.sharding.expert_degree) > 1:
        groups = {m: 1 if m.shard_degree == 1 else m.shard_degree * split for m in meshes}
        divided = [m for m in meshes if groups[m] % experts == 0 or experts % groups[m] == 0]
        meshes = divided or meshes[:1]
    # Building a plan with all pinned settings raises early if they are impossible.
    pinned = run.with_settings({"sharding": _sharding_settings(meshes[0])})
    plan = Plan.from_run(pinned, world_size=hardware.world_size, device=hardware.device)
    if plan.expert_parallel > 1 and (
        not spec.expert_count_gcd or spec.expert_count_gcd % plan.expert_parallel
    ):
        key = f"experts of {spec.name}"
        raise indivisible_experts_error(spec.expert_count_gcd, ranks=plan.expert_parallel, key=key)
    known = hardware.chip.flops_per_second
    if plan.precision.fp8 is not None and hardware.device == "cuda" and known and "fp8" not in known:
        raise PlanError(
            f"{hardware.chip.name} has no fp8 matmuls.",
            got=f'precision.mode = "{plan.run.precision.mode}"',
            why=f"its dtypes are {', '.join(known)}",
            fix='precision.mode = "bf16"',
        )
    sizes = {trace.microbatch for trace in spec.traces}  # None: any size
    for mesh in meshes:
        batches = list(_iterate_microbatch_splits(run, mesh, groups=world // run.sharding.context_degree))
        traced = [one for one in batches if not sizes.isdisjoint((None, one.microbatch))]
        for batch in traced or batches:
            double = _is_duplicate(run, mesh, batch=batch, world=world)
            pairs = _recompute_and_compile_choices(spec, run, microbatch=batch.microbatch, hardware=hardware)
            for recompute, compiled in pairs:
                yield Candidate(mesh, batch, recompute, compiled, double, tier)


def build_plan(candidate: Candidate, run: Run, *, hardware: Hardware) -> Plan:
    batch = candidate.batch
    settings = {
        "sharding": {"tensor_parallel": run.sharding.tensor_degree, **_sharding_settings(candidate.mesh)},
        "offload": {"tier": candidate.tier},
        "train": {"microbatch": batch.microbatch, "gradient_sync": batch.sync},
        "run": {"compile": candidate.compiled},
    }
    plan = Plan.from_run(
        run.with_settings(settings).model_copy(update={"recompute": candidate.recompute}),
        world_size=hardware.world_size,
        device=hardware.device,
        bf16_hardware=hardware.device == "cuda" and "bf16" in hardware.chip.flops_per_second,
    ).with_ranks_per_node(hardware.ranks_per_node)
    if run.offload.update != "auto":
        return plan
    update = {"update": choose_update_device(plan, hardware)}
    return plan.model_copy(update={"run": plan.run.with_settings({"offload": update})})


def _sharding_settings(mesh: ShardingChoice) -> dict[str, object]:
    shard_degree = mesh.shard_degree if mesh.strategy in _HYBRID else None
    return {"strategy": mesh.strategy, "shard_degree": shard_degree}


def _iterate_sharding_choices(run: Run, world: int, *, node: int) -> Iterator[ShardingChoice]:
    """Yields the strategies over `world` ranks, `node` of them on a node. See [Note: groups follow nodes]."""
    section = run.sharding
    if section.strategy != "auto":
        strategies: Sequence[Strategy] = (Strategy(section.strategy),)
    else:
        strategies = _ORDER if section.shard_degree is None else _HYBRID
        if run.communication.is_set:  # which is for ranks that shard
            strategies = [one for one in strategies if one is not Strategy.NO_SHARD]
    sizes = (size for size in reversed(divisors(world)) if size not in (1, world))
    proper = [size for size in sizes if size % node == 0 or node % size == 0]
    for strategy in strategies:
        if strategy not in _HYBRID:
            yield ShardingChoice(strategy, 1 if strategy is Strategy.NO_SHARD else world)
        elif section.shard_degree is not None:
            yield ShardingChoice(strategy, section.shard_degree)
        else:
            degrees = proper if proper or section.strategy == "auto" else [world]
            yield from (ShardingChoice(strategy, degree) for degree in degrees)


def _iterate_microbatch_splits(run: Run, mesh: ShardingChoice, *, groups: int) -> Iterator[MicrobatchSplit]:
    """Yields the divisions of the sequences of one of `groups` ranks, or groups of ranks that share them."""
    own = run.train.global_batch // groups
    sizes = divisors(own)[::-1] if run.train.microbatch is None else [run.train.microbatch]
    for microbatch in sizes:
        accumulation = own // microbatch
        for sync in _gradient_sync_choices(run, mesh, accumulation=accumulation):
            yield MicrobatchSplit(microbatch, accumulation, sync)


def _gradient_sync_choices(run: Run, mesh: ShardingChoice, *, accumulation: int) -> tuple[GradientSync, ...]:
    pinned = run.train.gradient_sync
    if pinned != "auto":
        return (pinned,)
    if mesh.strategy is Strategy.ZERO1:
        return ("last_microbatch",)
    # shard_grad_op with one reduction per step is zero1.
    if accumulation == 1 or mesh.strategy is Strategy.SHARD_GRAD_OP:
        return ("every_microbatch",)
    return ("every_microbatch", "last_microbatch")


def _recompute_and_compile_choices(
    spec: ModelSpec, run: Run, *, microbatch: int, hardware: Hardware
) -> list[tuple[RecomputeSection, bool]]:
    """Returns (recompute, compiled): the pinned settings, or all that `spec` was traced with.

    Activations are offloaded only if `hardware` can copy them to the host.
    """
    compiles = run.compile_choices(hardware.device)
    if run.recompute.mode != "auto" and len(compiles) == 1:
        return [(run.recompute, *compiles)]
    offloads = hardware.device != "cpu" and hardware.host_bytes_per_second is not None
    valid = dict.fromkeys(
        (recompute, trace.compiled)
        for trace in spec.traces
        if trace.microbatch in (None, microbatch) and trace.compiled in compiles
        for recompute in _recompute_settings_to_try(trace)
    )
    if run.recompute.mode != "auto":
        traced = [one for one in spec.traces if one.is_valid_for(run.recompute, microbatch, compiled=True)]
        return [(run.recompute, compiled) for compiled in compiles if traced or not compiled]
    order = ("none", "full", "selective", "offload", "auto")
    return sorted(
        (pair for pair in valid if offloads or pair[0].mode != "offload"),
        key=lambda pair: (order.index(pair[0].mode), pair[0].blocks or 0, pair[1]),
    )


def _recompute_settings_to_try(trace: MicrobatchTrace) -> list[RecomputeSection]:
    """Returns the settings to try with `trace`: its own, or about 1, 2 and 3 quarters of the blocks."""
    counts = trace.recomputed_block_counts()
    if not counts:
        return [trace.recompute]
    wanted = [part * trace.blocks / _PARTS for part in range(1, _PARTS)]
    nearest = [min(counts, key=lambda count: abs(count - blocks)) for blocks in wanted]
    return [trace.recompute.model_copy(update={"blocks": blocks}) for blocks in nearest]


def _is_duplicate(run: Run, mesh: ShardingChoice, *, batch: MicrobatchSplit, world: int) -> bool:
    if run.sharding.strategy != "auto" or run.sharding.shard_degree is not None:
        return False
    if mesh.strategy is Strategy.NO_SHARD:
        return world == 1  # the same as full_shard
    # The same as shard_grad_op, which has the pinned sync.
    return mesh.strategy is Strategy.ZERO1 and (batch.accumulation == 1 or run.train.gradient_sync != "auto")


class CandidateCosts:
    """The candidates of one search, by index, with what has been computed of each."""

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, *, run: Run, memory: Memory, tiers: Sequence[Tier]
    ) -> None:
        """Lists the candidates of `run` with their bounds on time. Raises PlanError if there are none."""
        if run.train.loss_chunk == "auto":  # a plan says what was traced
            run = run.with_settings({"train": {"loss_chunk": spec.loss_chunk}})
        axes = ("context_parallel", "tensor_parallel", "expert_parallel")
        traced = {axis: getattr(spec, axis) for axis in axes if getattr(run.sharding, axis) == "auto"}
        run = run.with_settings({"sharding": traced})
        self.spec, self.hardware, self.run, self.memory = spec, hardware, run, memory
        self.timer = StepTimePredictor(spec, hardware)
        self.limit = max(1, int(hardware.device_bytes_limit * (1 - run.memory_margin)))
        self._computed: dict[tuple[object, ...], Any] = {}
        self.plans: dict[int, Plan] = {}  # those that were predicted in full
        self.candidates = tuple(iterate_candidates(spec, hardware, run=run, tiers=tiers))
        if not self.candidates:
            compiled = run.run.compile is True
            spec.choose_trace(run.recompute, run.train.microbatch or 1, compiled=compiled)  # raises
            raise PlanError(f"the spec of {spec.name} has no trace.", fix="describe(model, plan)")
        self.least_seconds = tuple(self._lower_bound_seconds(one) for one in self.candidates)

    def _once(self, candidate: Candidate, compute: Callable[[Plan], T], *, key: tuple[object, ...]) -> T:
        """Returns `compute` of the candidate's plan, from the first candidate with this `key`."""
        if key not in self._computed:
            self._computed[key] = compute(self._build_plan(candidate))
        return self._computed[key]

    def least_bytes(self, index: int) -> int:
        """Returns a lower bound on the bytes that a candidate needs, without the allocator's reserve."""
        one = self.candidates[index]
        own = ("trace", one.batch.microbatch, one.recompute, one.compiled)
        of_trace = self._once(one, partial(least_bytes_of_trace, self.spec), key=own)
        of_mesh = self._once(one, partial(least_bytes_of_mesh, self.spec), key=("mesh", one.mesh, one.tier))
        return peak_lower_bound(of_trace, of_mesh) + self._context_bytes(one)

    def needed_bytes(self, index: int) -> int:
        memory = self._peak_memory(self.candidates[index])
        context = self._context_bytes(self.candidates[index])
        return memory.total + allocator_reserve_bytes(self.hardware, memory) + context

    def fits_host(self, index: int) -> bool:
        candidate = self.candidates[index]
        if candidate.tier == "none" and not candidate.recompute.offloads:
            return True
        plan, used = self._build_plan(candidate), self._peak_memory(candidate).total
        state = _offload_terms_with_host_capacity(self.timer, plan, used=used, limit=self.limit)
        return fits_in_host_memory(state, self.timer.predict_activation_offload(plan))

    def fits_device_and_host(self, index: int, limit: int) -> bool:
        """Returns whether a candidate needs at most `limit` bytes of the device, and fits the host."""
        if self.least_bytes(index) > limit:
            return False
        return self.needed_bytes(index) <= limit and self.fits_host(index)

    def plan(self, index: int) -> Plan:
        if index not in self.plans:
            candidate = self.candidates[index]
            memory = self._peak_memory(candidate)
            plan = self._build_plan(candidate)
            self.plans[index] = attach_prediction(plan, self.timer, memory=memory, limit=self.limit)
        return self.plans[index]

    def seconds_with_compiling(self, index: int) -> float:
        return step_seconds_with_compile_share(self.plan(index))

    def _build_plan(self, candidate: Candidate) -> Plan:
        return build_plan(candidate, self.run, hardware=self.hardware)

    def _context_bytes(self, candidate: Candidate) -> int:
        compute = partial(device_context_bytes, hardware=self.hardware)
        return self._once(candidate, compute, key=("context", candidate.mesh))

    def _peak_memory(self, candidate: Candidate) -> MemoryTerms:
        def compute(plan: Plan) -> MemoryTerms:
            return add_workspace_bytes(self.memory(self.spec, plan), self.hardware)

        return self._once(candidate, compute, key=("peak", candidate._replace(is_duplicate=False)))

    def _lower_bound_seconds(self, candidate: Candidate) -> float:
        mesh, batch, recompute, compiled, _, tier = candidate
        shared, own = ("demand", mesh, batch, tier), ("computing", batch, recompute, compiled)
        demand = self._once(candidate, self.timer.least_stream_ticks, key=shared)
        computing = self._once(candidate, self.timer.sum_phase_ticks, key=own)
        least = self.timer.lower_bound_seconds(computing, demand)
        return least + (COMPILE_SECONDS / _steps_that_share_compiling(self.run) if compiled else 0.0)


def step_seconds_with_compile_share(plan: Plan) -> float:
    """Returns the predicted seconds of a step, plus the seconds of compiling divided by the run's steps."""
    prediction = require_prediction(plan)
    return prediction.time.total + prediction.compile_seconds / _steps_that_share_compiling(plan.run)


def _steps_that_share_compiling(run: Run) -> int:
    return run.train.steps or LONG_RUN_STEPS


def require_prediction(plan: Plan) -> Prediction:
    """Returns `plan.prediction`, which every plan of a search has."""
    assert plan.prediction is not None, "plans of a search are predicted"
    return plan.prediction


def add_workspace_bytes(memory: MemoryTerms, hardware: Hardware) -> MemoryTerms:
    """Returns `memory` with the bytes of the matmul library's workspace."""
    return memory.model_copy(update={"workspace": hardware.workspace_bytes})


def allocator_reserve_bytes(hardware: Hardware, memory: MemoryTerms) -> int:
    """Returns the bytes that a caching allocator reserves beyond the peak; 0 on the CPU, which returns them.

    Each stream has its own pool, so this is the sum of the streams' peaks, plus fragmentation.
    """
    if hardware.device == "cpu":
        return 0
    pools = sum(memory.stream_pools) + memory.workspace
    return max(0, round((1 + hardware.fragmentation) * pools) - memory.total)


def attach_prediction(plan: Plan, timer: StepTimePredictor, *, memory: MemoryTerms, limit: int) -> Plan:
    """Returns `plan` with the prediction of its seconds by `timer`, beside the bytes `memory`.

    limit: bytes of a rank's memory that the plan may use
    """
    hardware, spec = timer.hardware, timer.spec
    time = timer.predict_time(plan)
    tokens = plan.run.tokens_per_step
    rate = tokens / time.total
    peak = hardware.chip.flops_per_second.get(plan.precision.param)
    mfu = spec.flops_per_token * rate / (peak * plan.world_size) if peak and spec.flops_per_token else None
    prediction = Prediction(
        hardware=hardware.name,
        memory=memory,
        allocator_reserve_bytes=allocator_reserve_bytes(hardware, memory),
        context_bytes=device_context_bytes(plan, hardware),
        capacity_bytes=hardware.device_bytes_limit,
        offload=_offload_terms_with_host_capacity(timer, plan, used=memory.total, limit=limit),
        activations=timer.predict_activation_offload(plan),
        time=time,
        tokens_per_step=tokens,
        tokens_per_second=rate,
        flops_per_token=spec.flops_per_token or None,
        mfu=mfu,
        compile_seconds=COMPILE_SECONDS if plan.run.run.compile is True else 0.0,
        calibration=hardware.calibration,
    )
    return plan.model_copy(update={"prediction": prediction})


def _offload_terms_with_host_capacity(
    timer: StepTimePredictor, plan: Plan, *, used: int, limit: int
) -> OffloadTerms | None:
    """Returns the plan's offload terms; on the CPU, the host has the memory that the device has left."""
    terms = timer.predict_offload(plan)
    if terms is None or plan.device != "cpu" or terms.host_capacity_bytes is not None:
        return terms
    left = limit - device_context_bytes(plan, timer.hardware) - used
    return terms.model_copy(update={"host_capacity_bytes": max(1, left)})
