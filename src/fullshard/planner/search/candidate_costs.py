"""Bytes and seconds of a search's candidates: bounds for all, and predictions for those that are needed.

[Note: exact pruning]
A search covers all candidates, and its answer is the same as if each were predicted in full. Bounds let it
skip a candidate that

- cannot finish before another: its computing alone, or one of its streams alone, takes longer;
- cannot fit: the bytes of its mesh and of its microbatch, without most of FSDP2's own, are too many.

Compiling takes time before the first step, of which each step of the run bears its share, so that a short run
is faster without.
"""

from collections.abc import Callable, Sequence

from fullshard.errors import PlanError
from fullshard.planner.predict.memory import (
    MeshDependentBytes,
    TraceDependentPeakBytes,
    mesh_dependent_bytes,
    peak_lower_bound,
    trace_dependent_peak_bytes,
)
from fullshard.planner.predict.step_time import DeviceHostTicks, LeastTicks, StepTimePredictor
from fullshard.planner.search.candidates import (
    Candidate,
    build_plan,
    iterate_candidates,
    run_with_settings,
)
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, OffloadTerms, Prediction, fits_in_host_memory
from fullshard.spec.run import Run, Tier

# Seconds of compiling before the first step. Assumed, not measured: tens of seconds for the graphs of a
# block, which equal blocks share.
COMPILE_SECONDS = 30.0
# Steps of a run that counts epochs of data that is not tokenized yet: a short run of pretraining.
LONG_RUN_STEPS = 10_000
Memory = Callable[[ModelSpec, Plan], MemoryTerms]


class CandidateCosts:
    """The candidates of one search, by index, with what has been computed of each."""

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, *, run: Run, memory: Memory, tiers: Sequence[Tier]
    ) -> None:
        """Lists the candidates of `run` with their bounds on time. Raises PlanError if there are none."""
        if run.train.loss_chunk == "auto":  # a plan says what was traced
            run = run_with_settings(run, {"train": {"loss_chunk": spec.loss_chunk}})
        axes = ("context_parallel", "tensor_parallel", "expert_parallel")
        traced = {axis: getattr(spec, axis) for axis in axes if getattr(run.sharding, axis) == "auto"}
        run = run_with_settings(run, {"sharding": traced})
        self.spec, self.hardware, self.run, self.memory = spec, hardware, run, memory
        self.timer = StepTimePredictor(spec, hardware)
        self.limit = int(hardware.device_bytes_limit * (1 - run.memory_margin))
        self._demand: dict[object, LeastTicks] = {}
        self._computing: dict[object, DeviceHostTicks] = {}
        self._meshes: dict[object, MeshDependentBytes] = {}
        self._bounds: dict[object, TraceDependentPeakBytes] = {}
        self._peaks: dict[object, MemoryTerms] = {}
        self._plans: dict[int, Plan] = {}
        self.candidates = tuple(iterate_candidates(spec, hardware, run=run, tiers=tiers))
        if not self.candidates:
            compiled = run.run.compile is True
            spec.choose_trace(run.recompute, run.train.microbatch or 1, compiled=compiled)  # raises
            raise PlanError(f"the spec of {spec.name} has no trace.", fix="describe(model, plan)")
        self.least_seconds = tuple(self._lower_bound_seconds(one) for one in self.candidates)

    @property
    def predicted(self) -> int:
        """Number of candidates that were predicted in full."""
        return len(self._plans)

    def least_bytes(self, index: int) -> int:
        """Returns a lower bound on the bytes that a candidate needs, without the allocator's reserve."""
        candidate = self.candidates[index]
        mesh = (candidate.mesh, candidate.tier)
        own = (candidate.batch.microbatch, candidate.recompute, candidate.compiled)
        if mesh not in self._meshes:
            self._meshes[mesh] = mesh_dependent_bytes(self.spec, self._build_plan(candidate))
        if own not in self._bounds:
            self._bounds[own] = trace_dependent_peak_bytes(self.spec, self._build_plan(candidate))
        bound = peak_lower_bound(
            self._bounds[own],
            self._meshes[mesh],
            accumulates=candidate.batch.accumulation > 1,
            syncs=candidate.batch.sync == "every_microbatch",
            keeps=not candidate.mesh.frees_parameters_after_forward,
            prefetches=candidate.prefetch.mode != "none",
        )
        return bound + self.hardware.context_bytes

    def needed_bytes(self, index: int) -> int:
        """Returns the bytes of device memory that a candidate needs."""
        memory = self._peak_memory(self.candidates[index])
        return memory.total + allocator_reserve_bytes(self.hardware, memory) + self.hardware.context_bytes

    def fits_host(self, index: int) -> bool:
        """Returns whether what a candidate keeps in host memory fits there."""
        candidate = self.candidates[index]
        tier, moves = candidate.tier != "none", candidate.recompute.mode == "offload"
        if not (tier or moves):
            return True
        plan = self._build_plan(candidate)
        return fits_in_host_memory(
            _offload_terms(self.timer, plan, used=self._peak_memory(candidate).total, limit=self.limit)
            if tier
            else None,
            self.timer.predict_activation_offload(plan) if moves else None,
        )

    def fits(self, index: int, limit: int) -> bool:
        """Returns whether a candidate needs at most `limit` bytes of the device, and fits the host."""
        if self.least_bytes(index) > limit:
            return False
        return self.needed_bytes(index) <= limit and self.fits_host(index)

    def plan(self, index: int) -> Plan:
        """Returns the plan of a candidate, with its prediction."""
        if index not in self._plans:
            candidate = self.candidates[index]
            memory = self._peak_memory(candidate)
            plan = self._build_plan(candidate)
            self._plans[index] = attach_prediction(plan, self.timer, memory=memory, limit=self.limit)
        return self._plans[index]

    def seconds(self, index: int) -> float:
        """Returns the seconds of a candidate's step, with its share of compiling."""
        return step_seconds_with_startup(self.plan(index))

    def _build_plan(self, candidate: Candidate) -> Plan:
        return build_plan(candidate, self.run, hardware=self.hardware)

    def _peak_memory(self, candidate: Candidate) -> MemoryTerms:
        key = candidate._replace(is_duplicate=False)
        if key not in self._peaks:
            memory = self.memory(self.spec, self._build_plan(candidate))
            self._peaks[key] = add_workspace_bytes(memory, self.hardware)
        return self._peaks[key]

    def _lower_bound_seconds(self, candidate: Candidate) -> float:
        mesh, batch, recompute, compiled, prefetch, _, tier = candidate
        shared, own = (mesh, batch, tier), (batch, recompute, compiled)
        if shared not in self._demand:
            self._demand[shared] = self.timer.stream_minima(self._build_plan(candidate))
        if own not in self._computing:
            self._computing[own] = self.timer.compute_ticks(self._build_plan(candidate))
        computing, demand = self._computing[own], self._demand[shared]
        least = self.timer.lower_bound_seconds(computing, demand, inline=prefetch.mode == "none")
        return least + (COMPILE_SECONDS / _steps_that_share_compiling(self.run) if compiled else 0.0)


def step_seconds_with_startup(plan: Plan) -> float:
    """Returns the predicted seconds of a step, with each step's share of compiling before the first."""
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
        context_bytes=hardware.context_bytes,
        capacity_bytes=hardware.device_bytes_limit,
        offload=_offload_terms(timer, plan, used=memory.total, limit=limit),
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


def _offload_terms(timer: StepTimePredictor, plan: Plan, *, used: int, limit: int) -> OffloadTerms | None:
    """Returns the plan's offload terms; on the CPU, the host has the memory that the device has left."""
    terms = timer.predict_offload(plan)
    if terms is None or plan.device != "cpu" or terms.host_capacity_bytes is not None:
        return terms
    left = limit - timer.hardware.context_bytes - used
    return terms.model_copy(update={"host_capacity_bytes": max(1, left)})
