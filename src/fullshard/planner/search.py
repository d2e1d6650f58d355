"""Search for the fastest plans that fit, or for the closest plan if none fits.

[Note: exact pruning]
The search covers all candidates, and its answer is the same as if each were predicted in full. Bounds let it
skip a candidate that

- cannot finish before another: its computing alone, or one of its streams alone, takes longer;
- cannot fit: the bytes of its mesh and of its microbatch, without most of FSDP2's own, are too many.

Candidates are taken in the order of their time bound, so that the fastest come early.

Compiling takes time before the first step, of which each step of the run bears its share, so that a short run
is faster without.

Two plans whose times differ by less than the rounding of the inputs, a thousandth, count as equally fast, and
the plainer one (see `planner.candidates`) ranks first. So that "equally fast" is transitive, times are sorted
into bins a thousandth wide and compared by bin.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fullshard.errors import PlanError
from fullshard.planner.candidates import (
    Candidate,
    WhatIfSettings,
    build_plan,
    iterate_candidates,
    run_with_settings,
)
from fullshard.planner.memory import (
    MeshDependentBytes,
    PeakLowerBoundSettings,
    TraceDependentPeakBytes,
    mesh_dependent_bytes,
    peak_bytes,
    peak_lower_bound,
    trace_dependent_peak_bytes,
)
from fullshard.planner.offload import TIERS
from fullshard.planner.step_time import DeviceHostTicks, LeastTicks, StepTimePredictor
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, OffloadTerms, Prediction, fits_in_host_memory
from fullshard.spec.run import Run, Tier
from fullshard.spec.value import FrozenModel, NonNegativeInt

RANKED = 20
# Seconds of compiling before the first step. Assumed, not measured: tens of seconds for the graphs of a
# block, which equal blocks share.
COMPILE_SECONDS = 30.0
_SAME = 1e-3
_SMALLEST_GROUP = 1_000_000  # parameters; smaller groups make reads and writes too short for any drive
Memory = Callable[[ModelSpec, Plan], MemoryTerms]
Order = tuple[int, int]


class SearchResult(FrozenModel):
    """Result of a search. Each of its plans has a prediction."""

    best: Plan | None  # the fastest plan that fits; None if none does
    ranked: tuple[Plan, ...]  # the fastest plans that fit, best first
    fastest: Plan  # the fastest plan regardless of memory
    closest: Plan | None  # if none fits, the plan that needs the fewest bytes; otherwise None
    # for each `Candidate.strategy_label`, the fastest plan that fits, or else that needs the fewest bytes
    by_strategy: Mapping[str, Plan]
    considered: NonNegativeInt  # number of distinct candidates
    predicted: NonNegativeInt  # candidates predicted in full; the others cannot be among these results


def search(  # signature: the library's, the same for all its questions
    spec: ModelSpec,
    hardware: Hardware,
    run: Run,
    *,
    capacity_bytes: int | None = None,
    memory: Memory = peak_bytes,
    what_if: WhatIfSettings | None = None,
) -> SearchResult:
    """Returns the fastest plans of `spec` on all ranks of `hardware`, over the open settings of `run`.

    capacity_bytes: device memory of one rank, including the context; None: that of `hardware`.
    memory: function that returns a plan's peak, which must not be below `peak_lower_bound`.
    what_if: offload targets and tensor-parallel degrees to try instead of the run's own. If the run leaves
        the offload target open, targets are tried only if nothing fits without one.

    Raises PlanError if the global batch cannot be divided over the ranks, the pinned settings are impossible
    on them, or `spec` was described under other settings.
    """
    if capacity_bytes is not None:
        chip = hardware.chip.model_copy(update={"memory_bytes": capacity_bytes})
        hardware = hardware.model_copy(update={"chip": chip, "usable_fraction": 1.0})
    found = _CandidateSearch(spec, hardware, run=run, memory=memory, what_if=what_if).search_candidates()
    tiers = list_offload_targets(hardware, run)
    if found.best is None and what_if is None and run.offload.tier == "auto" and tiers:
        outside = search(spec, hardware, run, memory=memory, what_if=WhatIfSettings(tiers))
        return found if outside.best is None else outside
    return found


def predict(spec: ModelSpec, plan: Plan, hardware: Hardware) -> Plan:  # signature: the library's
    """Returns `plan` with its prediction of bytes and seconds, term by term.

    Ranks are laid out on nodes as in `hardware`, for any number of ranks. Raises PlanError if `spec` lacks
    something that this plan needs (see `peak_bytes`), or `hardware` lacks the link between its nodes.
    """
    memory = add_workspace_bytes(peak_bytes(spec, plan), hardware)
    return _attach_prediction(plan, StepTimePredictor(spec, hardware), memory=memory)


def plan(spec: ModelSpec, hardware: Hardware, run: Run) -> Plan:  # signature: the library's
    """Returns the fastest plan of `run` that fits.

    Raises PlanError if none fits, with the closest plan and the changes that would make it fit.
    """
    found = search(spec, hardware, run)
    if found.best is not None:
        return found.best
    assert found.closest is not None, "a search that considered something has a best plan or a closest"
    raise no_plan_fits_error(found.closest, spec=spec, hardware=hardware, run=run)


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


def step_seconds_with_startup(plan: Plan) -> float:
    """Returns the predicted seconds of a step, with each step's share of compiling before the first."""
    prediction = require_prediction(plan)
    return prediction.time.total + prediction.compile_seconds / plan.run.train.steps


def plan_sort_key(seconds: float, index: int) -> Order:
    """Returns the sort key of candidate `index`, whose step takes `seconds`. See [Note: exact pruning]."""
    return math.floor(math.log(seconds) / _SAME), index


def no_plan_fits_error(closest: Plan, *, spec: ModelSpec, hardware: Hardware, run: Run) -> PlanError:
    """Returns the error that no plan of `run` fits, with the closest plan and changes that would fit."""
    prediction = require_prediction(closest)
    over = prediction.required_device_bytes - prediction.capacity_bytes
    outside = prediction.offload or prediction.activations
    if outside is not None and over <= 0:
        ways = _suggest_host_memory_changes(closest, spec, hardware=hardware)
        return PlanError(
            f"no plan fits {format_bytes(outside.host_capacity_bytes or 0)} of host memory per rank.",
            got=f"closest: {format_plan(closest)} -> {format_bytes(prediction.host_bytes_per_rank)}",
            fix="; or ".join(ways),
        )
    terms = sorted(prediction.memory.terms().items(), key=lambda term: -term[1])
    largest, count = terms[0]
    change = _suggest_run_change(spec, hardware, run=run)
    tier = _suggest_offload_target(spec, hardware, run=run)
    return PlanError(
        f"no plan fits {format_bytes(prediction.capacity_bytes)} per rank.",
        got=f"closest: {format_plan(closest)} -> {format_bytes(prediction.required_device_bytes)}"
        f" ({format_bytes(over)} over)",
        why=f"largest: {largest.replace('_', ' ')}, {format_bytes(count)}",
        fix=f"{change}; or {tier}" if tier else change,
    )


def format_plan(plan: Plan) -> str:
    """Returns the strategy, mesh, batch and other settings of a plan in one line."""
    mesh = f"dp_shard={plan.shard_degree}"
    if plan.replicate_degree > 1:
        mesh = f"dp_replicate={plan.replicate_degree}, {mesh}"
    reshard = plan.reshard_after_forward
    kept = f", reshard_after_forward={reshard}" if not isinstance(reshard, bool) else ""
    prefetch = plan.run.prefetch
    depth = f" {prefetch.forward}" if prefetch.mode == "explicit" else ""
    return (
        f"{plan.strategy}, {mesh}{kept}, microbatch={plan.microbatch} × {plan.accumulation}, "
        f"recompute={plan.run.recompute.mode}, prefetch={prefetch.mode}{depth}"
        + (", compiled" if plan.run.run.compile is True else "")
        + (f", tensor_parallel={plan.tensor_parallel}" if plan.tensor_parallel > 1 else "")
        + (f", offload={plan.run.offload.tier}" if plan.run.offload.offloads_optimizer else "")
    )


def _suggest_host_memory_changes(plan: Plan, spec: ModelSpec, *, hardware: Hardware) -> list[str]:
    """Returns changes, as text, with which `plan` fits host memory; it already fits its device."""
    prediction, section = require_prediction(plan), plan.run.offload
    ways: list[str] = []
    if section.host_bytes is not None:
        least = prediction.host_bytes_per_rank
        ways.append(f"offload.host_bytes = {least} ({format_bytes(least)}), the least that fits")
    if prediction.offload is not None:
        largest = _halve_offload_group_size(plan, prediction.offload, timer=StepTimePredictor(spec, hardware))
        ways += [f"offload.sub_group_parameters = {largest}"] if largest is not None else []
        ways.append('offload.tier = "none" or another, or more ranks')
    if prediction.activations is not None:
        ways.append('recompute.mode = "full", recompute.every = 2 or more, or a smaller train.microbatch')
    return ways


def _halve_offload_group_size(plan: Plan, terms: OffloadTerms, *, timer: StepTimePredictor) -> int | None:
    """Returns the first halving of the group size with which `plan` fits the host, or None."""
    section, capacity = plan.run.offload, terms.host_capacity_bytes
    beside = require_prediction(plan).host_bytes_per_rank - terms.host_bytes
    size = section.sub_group_parameters // 2
    while section.is_on_drive and capacity is not None and size >= _SMALLEST_GROUP:
        smaller = run_with_settings(plan.run, {"offload": {"sub_group_parameters": size}})
        found = timer.predict_offload(plan.model_copy(update={"run": smaller}))
        if found is not None and found.host_bytes + beside <= capacity:
            return size
        size //= 2
    return None


def list_offload_targets(hardware: Hardware, run: Run) -> tuple[Tier, ...]:
    """Returns the offload targets with known rates; none if the run's state cannot be offloaded."""
    drive = hardware.disk_bytes_per_second is not None
    host = hardware.host_bytes_per_second is not None or hardware.device == "cpu"
    fp8 = run.precision.mode == "fp8"  # weights are cast from masters on the device
    if run.optimizer.name.lower() != "adamw" or run.optimizer.in_backward or fp8 or not host:
        return ()
    return tuple(one for one in TIERS if one != "none" and (drive or one.endswith("cpu")))


def _suggest_offload_target(spec: ModelSpec, hardware: Hardware, *, run: Run) -> str | None:
    """Returns, as text, the fastest plan that fits with an offload target; None if no target can be tried."""
    tiers = list_offload_targets(hardware, run)
    if run.offload.tier != "none" or not tiers:
        return None
    best = search(spec, hardware, run, what_if=WhatIfSettings(tiers)).best
    terms = None if best is None else require_prediction(best).offload
    if best is None or terms is None:
        return None
    held = f"{format_bytes(terms.host_bytes)} of host memory"
    held += f" and {format_bytes(terms.disk_bytes)} of the drive" if terms.disk_bytes else ""
    return f'offload.tier = "{best.run.offload.tier}" with {held} per rank: {_format_plan_cost(best)}'


def _suggest_run_change(spec: ModelSpec, hardware: Hardware, *, run: Run) -> str:
    """Returns, as text, one pinned setting to release, or else the smallest multiple of ranks that fits."""
    for change, freed in _unpin_one_setting_at_a_time(run):
        best = search(spec, hardware, freed).best
        if best is not None:
            return f"{change}: {_format_plan_cost(best)}"
    nodes, per_node = hardware.nodes, hardware.ranks_per_node
    for factor in (2, 4, 8, 16, 32, 64):
        more = hardware.with_rank_counts(nodes=nodes * factor, ranks_per_node=per_node)
        if more.across is None:  # without a link between nodes, add ranks to the one node
            more = hardware.with_rank_counts(nodes=1, ranks_per_node=per_node * factor)
        ranks = more.world_size // run.sharding.tensor_parallel
        batch = -(-run.train.global_batch // ranks) * ranks
        wider = run_with_settings(run, {"train": {"global_batch": batch}})
        divides = batch % (ranks * (run.train.microbatch or 1)) == 0
        best = search(spec, more, wider).best if divides else None
        if best is not None:
            grown = f", train.global_batch = {batch}" if batch != run.train.global_batch else ""
            return f"{more.world_size} ranks{grown}: {_format_plan_cost(best)}"
    return "a shorter data.sequence_length, or a smaller model"


def _unpin_one_setting_at_a_time(run: Run) -> Iterator[tuple[str, Run]]:
    """Yields (change as text, run with this pinned setting released), the least change first."""
    if run.prefetch.mode != "auto":
        yield 'prefetch.mode = "auto"', run_with_settings(run, {"prefetch": {"mode": "auto"}})
    if run.train.microbatch is not None:
        yield "train.microbatch left out", run_with_settings(run, {"train": {"microbatch": None}})
    if run.recompute.mode != "auto":
        yield 'recompute.mode = "auto"', run_with_settings(run, {"recompute": {"mode": "auto"}})
    if run.sharding.strategy != "auto" or run.sharding.shard_degree is not None:
        free = {"strategy": "auto", "shard_degree": None, "reshard_after_forward": None}
        yield 'sharding.strategy = "auto"', run_with_settings(run, {"sharding": free})


def _format_plan_cost(plan: Plan) -> str:
    prediction = require_prediction(plan)
    seconds = f", {format_seconds(prediction.time.total)} a step" if prediction.has_complete_step_time else ""
    return f"{format_plan(plan)} -> {format_bytes(prediction.required_device_bytes)}{seconds}"


def _attach_prediction(plan: Plan, timer: StepTimePredictor, *, memory: MemoryTerms) -> Plan:
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
        context_bytes=hardware.context_bytes,
        capacity_bytes=hardware.device_bytes_limit,
        offload=_offload_terms(timer, plan, memory=memory),
        activations=timer.predict_activation_offload(plan),
        time=time,
        tokens_per_step=tokens,
        tokens_per_second=rate,
        flops_per_token=spec.flops_per_token or None,
        mfu=mfu,
        compile_seconds=COMPILE_SECONDS if plan.run.run.compile is True else 0.0,
    )
    return plan.model_copy(update={"prediction": prediction})


def _offload_terms(timer: StepTimePredictor, plan: Plan, *, memory: MemoryTerms) -> OffloadTerms | None:
    """Returns the plan's offload terms; on the CPU, the host has the memory that the device has left."""
    terms = timer.predict_offload(plan)
    if terms is None or plan.device != "cpu" or terms.host_capacity_bytes is not None:
        return terms
    left = timer.hardware.device_bytes_limit - timer.hardware.context_bytes - memory.total
    return terms.model_copy(update={"host_capacity_bytes": max(1, left)})


@dataclass
class _StrategyBestAndTooLarge:
    """Results for the candidates of one strategy."""

    best: tuple[Order, Plan] | None = None  # the best plan so far, with its order
    # candidates that do not fit, as (bound on bytes, index, candidate)
    too_large: list[tuple[int, int, Candidate]] = field(default_factory=list[tuple[int, int, Candidate]])


class _CandidateSearch:
    """State of one search, with caches of the terms that candidates share."""

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, *, run: Run, memory: Memory, what_if: WhatIfSettings | None
    ) -> None:
        if run.train.loss_chunk == "auto":  # a plan says what was traced
            run = run_with_settings(run, {"train": {"loss_chunk": spec.loss_chunk}})
        self.spec, self.hardware, self.run, self.memory = spec, hardware, run, memory
        self.what_if = what_if
        self.timer = StepTimePredictor(spec, hardware)
        self.kinds: dict[str, _StrategyBestAndTooLarge] = defaultdict(_StrategyBestAndTooLarge)
        self.ranked: list[tuple[Order, Plan]] = []
        self.fastest: tuple[Order, Plan] | None = None
        self.predicted = 0
        self._demand: dict[object, LeastTicks] = {}
        self._computing: dict[object, DeviceHostTicks] = {}
        self._meshes: dict[object, MeshDependentBytes] = {}
        self._bounds: dict[object, TraceDependentPeakBytes] = {}
        self._peaks: dict[object, MemoryTerms] = {}

    def search_candidates(self) -> SearchResult:
        """Tries all candidates and returns the result."""
        candidates = iterate_candidates(self.spec, self.hardware, run=self.run, what_if=self.what_if)
        bounded = [(self._lower_bound_seconds(one), index, one) for index, one in enumerate(candidates)]
        if not bounded:
            recompute, compiled = self.run.recompute, self.run.run.compile is True
            self.spec.choose_trace(recompute, self.run.train.microbatch or 1, compiled=compiled)  # raises
            raise PlanError(f"the spec of {self.spec.name} has no trace.", fix="describe(model, plan)")
        for least, index, candidate in sorted(bounded, key=lambda one: one[:2]):
            self._consider_candidate(candidate, index, least=plan_sort_key(least, index))
        for kind in self.kinds.values():
            kind.best = kind.best or self._smallest_too_large(kind)
        best = self.ranked[0][1] if self.ranked else None
        by_kind = {name: kind.best for name, kind in self.kinds.items() if kind.best is not None}
        closest = None if best else min(by_kind.values(), key=_memory_shortfall_sort_key)[1]
        assert self.fastest is not None, "something was considered"
        return SearchResult(
            best=best,
            ranked=tuple(plan for _, plan in self.ranked),
            fastest=self.fastest[1],
            closest=closest,
            by_strategy={name: plan for name, (_, plan) in by_kind.items()},
            considered=sum(not candidate.is_duplicate for *_, candidate in bounded),
            predicted=self.predicted,
        )

    def _consider_candidate(self, candidate: Candidate, index: int, *, least: Order) -> None:
        """Predicts a candidate and records it, unless its bounds show that it cannot be in the result."""
        kind = self.kinds[candidate.strategy_label]
        if self.fastest is None or least < self.fastest[0]:
            predicted = self._predict_candidate(candidate, index)
            if self.fastest is None or predicted[0] < self.fastest[0]:
                self.fastest = predicted
        may_rank = not candidate.is_duplicate and (len(self.ranked) < RANKED or least < self.ranked[-1][0])
        if not may_rank and kind.best is not None and least > kind.best[0]:
            return
        bound = self._peak_lower_bound(candidate)
        # The allocator's reserve is left out of the bound, so that it stays one.
        may_fit = bound + self.hardware.context_bytes <= self.hardware.device_bytes_limit
        if not (may_fit and self._fits_in_memory(candidate)):
            kind.too_large.append((bound, index, candidate))
            return
        order, plan = self._predict_candidate(candidate, index)
        if kind.best is None or order < kind.best[0]:
            kind.best = (order, plan)
        if not candidate.is_duplicate:
            self.ranked = sorted([*self.ranked, (order, plan)], key=lambda one: one[0])[:RANKED]

    def _smallest_too_large(self, kind: _StrategyBestAndTooLarge) -> tuple[Order, Plan] | None:
        """Predicts the too large candidate that needs the fewest bytes; of equals, the plainest."""
        best: tuple[int, int, Candidate] | None = None
        for bound, index, candidate in sorted(kind.too_large, key=lambda one: one[:2]):
            if best is not None and bound > best[0]:
                break
            needed = (self._needed_device_bytes(self._peak_memory(candidate)), index, candidate)
            best = needed if best is None or needed[:2] < best[:2] else best
        return None if best is None else self._predict_candidate(best[2], best[1])

    def _fits_in_memory(self, candidate: Candidate) -> bool:
        memory = self._peak_memory(candidate)
        if self._needed_device_bytes(memory) > self.hardware.device_bytes_limit:
            return False
        tier, moves = candidate.apart.tier != "none", candidate.recompute.mode == "offload"
        if not (tier or moves):
            return True
        plan = self._build_plan(candidate)
        return fits_in_host_memory(
            _offload_terms(self.timer, plan, memory=memory) if tier else None,
            self.timer.predict_activation_offload(plan) if moves else None,
        )

    def _needed_device_bytes(self, memory: MemoryTerms) -> int:
        return memory.total + allocator_reserve_bytes(self.hardware, memory) + self.hardware.context_bytes

    def _predict_candidate(self, candidate: Candidate, index: int) -> tuple[Order, Plan]:
        self.predicted += 1
        memory = self._peak_memory(candidate)
        plan = _attach_prediction(self._build_plan(candidate), self.timer, memory=memory)
        return plan_sort_key(step_seconds_with_startup(plan), index), plan

    def _build_plan(self, candidate: Candidate) -> Plan:
        return build_plan(candidate, self.run, hardware=self.hardware)

    def _peak_memory(self, candidate: Candidate) -> MemoryTerms:
        mesh, batch, recompute, compiled, prefetch, _, apart = candidate
        key = (mesh, batch, recompute, compiled, prefetch, apart)
        if key not in self._peaks:
            memory = self.memory(self.spec, self._build_plan(candidate))
            self._peaks[key] = add_workspace_bytes(memory, self.hardware)
        return self._peaks[key]

    def _lower_bound_seconds(self, candidate: Candidate) -> float:
        mesh, batch, recompute, compiled, prefetch, _, apart = candidate
        shared, own = (mesh, batch, apart), (batch, recompute, compiled, apart.tensor)
        if shared not in self._demand:
            self._demand[shared] = self.timer.stream_minima(self._build_plan(candidate))
        if own not in self._computing:
            self._computing[own] = self.timer.compute_ticks(self._build_plan(candidate))
        computing, demand = self._computing[own], self._demand[shared]
        least = self.timer.lower_bound_seconds(computing, demand, inline=prefetch.mode == "none")
        return least + (COMPILE_SECONDS / self.run.train.steps if compiled else 0.0)

    def _peak_lower_bound(self, candidate: Candidate) -> int:
        mesh, apart = (candidate.mesh, candidate.apart), candidate.apart
        own = (candidate.batch.microbatch, candidate.recompute, candidate.compiled, apart.tensor)
        if mesh not in self._meshes:
            self._meshes[mesh] = mesh_dependent_bytes(self.spec, self._build_plan(candidate))
        if own not in self._bounds:
            self._bounds[own] = trace_dependent_peak_bytes(self.spec, self._build_plan(candidate))
        traits = PeakLowerBoundSettings(
            accumulates=candidate.batch.accumulation > 1,
            syncs=candidate.batch.sync == "every_microbatch",
            keeps=not candidate.mesh.frees_parameters_after_forward,
            prefetches=candidate.prefetch.mode != "none",
        )
        return peak_lower_bound(self._bounds[own], self._meshes[mesh], traits=traits)


def _memory_shortfall_sort_key(one: tuple[Order, Plan]) -> tuple[int, int, int, Order]:
    """Sort key: bytes over the device's capacity, then host bytes if they do not fit, then bytes needed."""
    prediction = require_prediction(one[1])
    over = max(0, prediction.required_device_bytes - prediction.capacity_bytes)
    fits_host = fits_in_host_memory(prediction.offload, prediction.activations)
    host_bytes = 0 if fits_host else prediction.host_bytes_per_rank
    return over, host_bytes, prediction.required_device_bytes, one[0]
