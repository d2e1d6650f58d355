"""Plan: all settings of a run on a number of ranks. Every runtime package reads its settings from it."""

import math
from importlib import import_module
from pathlib import Path
from typing import Literal, Self

from fullshard.errors import LaunchError, PlanError
from fullshard.quantities import count_text
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import PrecisionMode, PrecisionSection, Run, Strategy, UnitOverride
from fullshard.spec.settings import run_checks
from fullshard.spec.settings.communication_section import CommunicationSection
from fullshard.spec.value import FrozenModel, PositiveInt

Dtype = Literal["fp32", "bf16", "fp16"]
DeviceType = Literal["cpu", "cuda"]
Fp8Scaling = Literal["tensorwise", "rowwise"]

ITEMSIZE: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


def too_few_gpus_error(ranks: int, *, gpus: int, got: str) -> LaunchError:
    """Returns the error for more ranks on a machine than it has GPUs."""
    return LaunchError(
        f"{ranks} ranks need a GPU each.",
        got=f"{got}, {count_text(gpus, 'GPU')}",
        why="NCCL refuses two ranks on one device",
        fix=f'{count_text(gpus, "rank")} (run.ranks, or --nproc-per-node of torchrun), or run.device = "cpu"',
    )


def other_rank_count_error(planned: int, ranks: int) -> PlanError:
    """Returns the error for a plan that is not for this number of ranks."""
    got, fix = count_text(ranks, "rank"), f"start {planned}, or make a plan for {ranks}"
    return PlanError(f"the plan is for {count_text(planned, 'rank')}.", got=got, fix=fix)


class Fp8Matmuls(FrozenModel):
    """Matmuls in fp8 (e4m3, and e5m2 for gradients that are scaled per tensor), with sums in fp32.

    scaling: `tensorwise`: one scale per tensor, and weights are gathered in fp8; `rowwise`: one scale per row
        or column, and weights are gathered in bf16
    min_features: matrices with fewer input or output features stay in bf16
    """

    scaling: Fp8Scaling
    min_features: PositiveInt


class Precision(FrozenModel):
    """The dtypes of one unit. `master` is the dtype of the shards, and thus of the optimizer's state.

    Bytes per parameter over N ranks: of its shard, its gradient and AdamW's two moments; while it is
    unsharded; in communication:

    fp32         (4 + 4 + 8) / N     4    4 gathered, 4 reduced
    bf16         (4 + 4 + 8) / N     2    2 gathered, 4 reduced     fp32 sums: the default on bf16 hardware
    bf16_reduce  (4 + 4 + 8) / N     2    2 gathered, 2 reduced     sums rounded to 8 bits of mantissa
    fp16         (4 + 4 + 8) / N     2    2 gathered, 4 reduced     with a dynamic loss scale
    bf16_pure    (2 + 2 + 4) / N     2    2 gathered, 4 reduced     updates rounded stochastically
    fp8          (4 + 4 + 8) / N     1    1 gathered, 4 reduced     matrices in fp8; others as in bf16
    fp8_rowwise  (4 + 4 + 8) / N     2    2 gathered, 4 reduced     as bf16, but some matmuls are in fp8

    fp8: how matrices of linear modules are multiplied in fp8; None if none are
    """

    param: Dtype
    reduce: Dtype
    master: Dtype
    cast_inputs: bool = True
    loss_scaling: bool = False
    stochastic_rounding: bool = False
    fp8: Fp8Matmuls | None = None

    @classmethod
    def from_mode(cls, mode: PrecisionMode, run: Run | None = None) -> Self:
        """Returns the dtypes of a mode, with `run`'s `cast_inputs` and `fp8_min_features`, or defaults."""
        param, reduce, master = _MODES[mode]
        section = PrecisionSection() if run is None else run.precision
        return cls(
            param=param,
            reduce=reduce,
            master=master,
            cast_inputs=section.cast_inputs,
            loss_scaling=mode == "fp16",
            stochastic_rounding=mode == "bf16_pure",
            fp8=Fp8Matmuls(scaling=_FP8[mode], min_features=section.fp8_min_features)
            if mode in _FP8
            else None,
        )


_MODES: dict[PrecisionMode, tuple[Dtype, Dtype, Dtype]] = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16": ("bf16", "fp32", "fp32"),
    "bf16_reduce": ("bf16", "bf16", "fp32"),
    "fp16": ("fp16", "fp32", "fp32"),
    "bf16_pure": ("bf16", "fp32", "bf16"),
    "fp8": ("bf16", "fp32", "fp32"),
    "fp8_rowwise": ("bf16", "fp32", "fp32"),
}
_FP8: dict[PrecisionMode, Fp8Scaling] = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}


class Plan(FrozenModel):
    """The settings of a run on `world_size` = `replicate_degree` × `shard_degree` × `tensor_parallel` ranks.

    run: the run with every `auto` resolved
    context_parallel: number of adjacent ranks that share each sequence. It divides `replicate_degree` ×
        `shard_degree`, since parameters are sharded and replicated over these ranks as over all others.
    expert_parallel: number of adjacent ranks that divide the experts of a mixture. It divides `world_size`:
        experts are sharded and replicated over the ranks that have the same ones.
    reshard_after_forward: True frees a unit's gathered parameters after its forward, False keeps them for its
        backward
    microbatch: sequences in one forward pass, of a rank or of the ranks that share them
    accumulation: microbatches per step
    sync_each_microbatch: see `TrainSection.gradient_sync`
    """

    run: Run
    device: DeviceType
    world_size: PositiveInt
    strategy: Strategy
    replicate_degree: PositiveInt
    shard_degree: PositiveInt
    tensor_parallel: PositiveInt = 1
    context_parallel: PositiveInt = 1
    expert_parallel: PositiveInt = 1
    reshard_after_forward: bool
    precision: Precision
    microbatch: PositiveInt
    accumulation: PositiveInt
    sync_each_microbatch: bool
    prediction: Prediction | None = None

    def __str__(self) -> str:
        """The plan's page. `report` makes it, which a value may not import: it is looked up by name."""
        return str(import_module("fullshard").plan_page(self))

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks, or of groups of ranks, with their own sequences."""
        return self.world_size // (self.tensor_parallel * self.context_parallel)

    def data_rank(self, rank: int) -> int:
        """Returns which of the `data_parallel_degree` parts of each batch a rank has."""
        return rank // (self.tensor_parallel * self.context_parallel)

    @property
    def for_data(self) -> "Plan":
        """The plan that is passed to sources of data: ranks that share sequences count as one rank.

        A source that counts `world_size` ranks then reads each row once, as one that counts
        `data_parallel_degree` does.
        """
        alone = {"tensor_parallel": 1, "context_parallel": 1, "world_size": self.data_parallel_degree}
        return self.model_copy(update=alone)

    @property
    def averaging_ranks(self) -> int:
        """Number of ranks over which FSDP2 averages gradients: all of those that have tokens of their own."""
        return self.replicate_degree * self.shard_degree

    @property
    def has_expert_mesh(self) -> bool:
        """True if experts are sharded over a mesh of their own.

        Ranks that share matmuls have different tokens between these, and so within the experts, too: experts
        are sharded over these ranks as over all others. A table of styles says nothing about that.
        """
        shares_matmuls = self.tensor_parallel > 1 and not self.run.sharding.tensor_parallel_styles
        return self.expert_parallel > 1 or shares_matmuls

    def expert_degrees(self, *, is_sharded: bool) -> tuple[int, int]:
        """Returns (replicate degree, shard degree) of experts with a mesh of their own.

        is_sharded: False for a unit that the plan does not shard
        """
        group = self.shard_degree * self.tensor_parallel
        is_sharded = is_sharded and self.strategy is not Strategy.NO_SHARD
        shards = max(group // self.expert_parallel, 1) if is_sharded else 1
        return self.world_size // (self.expert_parallel * shards), shards

    @property
    def copies_gradients_to_host(self) -> bool:
        """True if the plan copies each reduced gradient from a GPU to the host for an offload target."""
        return self.run.offload.offloads_optimizer and self.device == "cuda"

    def with_ranks_per_node(self, count: int) -> Self:
        """Returns the plan with `count` as `ranks_per_node`, if that is `auto` and `reduce_within` is set."""
        section = self.run.communication
        if section.reduce_within == "none" or section.ranks_per_node != "auto":
            return self
        run = self.run.with_settings({"communication": {"ranks_per_node": count}})
        return self.model_copy(update={"run": run})

    @classmethod
    def from_run(
        cls, run: Run, *, world_size: int, device: DeviceType = "cpu", bf16_hardware: bool | None = None
    ) -> Self:
        """Returns a plan with the settings of `run`, and defaults for its `auto` settings (no search).

        bf16_hardware: decides `precision.mode = "auto"`; unset, GPUs are assumed to support bf16

        Raises PlanError if degrees or batches do not divide, and for settings that do not work together.
        """
        run_checks.check_settings_work_together(run)
        run = _resolve_auto_settings(run)
        tensor = run.sharding.tensor_degree
        context = run.sharding.context_degree
        ranks = run_checks.count_groups(world_size, tensor, key="tensor_parallel", shared="the matmuls")
        groups = run_checks.count_groups(ranks, context, key="context_parallel", shared="a sequence")
        experts = run.sharding.expert_degree
        run_checks.count_groups(world_size, experts, key="expert_parallel", shared="experts")
        run_checks.check_sequence_is_divisible(run)
        replicate, shard = _replicate_and_shard_degrees(run, ranks)
        group = 1 if shard == 1 and replicate > 1 else shard * tensor
        run_checks.check_expert_degree(run, group=group)
        microbatch, accumulation = _microbatch_and_accumulation(run, groups)
        mode = run.precision.mode
        if mode == "auto":
            mode = "bf16" if (device == "cuda" if bf16_hardware is None else bf16_hardware) else "fp32"
        sync = run.train.gradient_sync
        if sync == "auto" and run.sharding.strategy not in (Strategy.NO_SHARD, Strategy.ZERO1):
            sync = "every_microbatch"
        return cls(
            run=run,
            device=device,
            world_size=world_size,
            strategy=Strategy(run.sharding.strategy),
            replicate_degree=replicate,
            shard_degree=shard,
            tensor_parallel=tensor,
            context_parallel=context,
            expert_parallel=experts,
            reshard_after_forward=run.sharding.strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD),
            precision=Precision.from_mode(mode, run),
            microbatch=microbatch,
            accumulation=accumulation,
            sync_each_microbatch=sync == "every_microbatch",
        )

    @classmethod
    def load(cls, path: str | Path, *, ignores_unknown: bool = True) -> Self:
        """Reads a plan that `save` wrote. Raises SpecError for any other file.

        ignores_unknown: also reads a plan of an earlier version, without settings that are gone
        """
        fix = "fullshard plan RUN.toml --save PLAN.json, with this version of fullshard"
        return cls.read_json(path, what="a saved plan", ignores_unknown=ignores_unknown, fix=fix)

    def save(self, path: str | Path) -> None:
        """Writes a file that `load` reads. Raises OSError."""
        self.write_json(path, indent=2)


_NO_OVERRIDE = UnitOverride(match="")


class MergedUnitSettings(FrozenModel):
    """The mesh degrees, dtypes and reshard policy of one unit.

    gathers_in_backward: whether parameters that were resharded are gathered again for backward
    shards_any_dim: whether `expert_shard_dim` chooses the dim of its shards; otherwise it is dim 0
    rank_distance: distance between ranks of its shard group; the ranks between them belong to other groups
    near_degree: number of its shard group's ranks on a node, which sum gradients first; 1 if all ranks of the
        group sum at once
    """

    replicate_degree: int
    shard_degree: int
    rank_distance: int
    near_degree: int
    reshard_after_forward: bool
    gathers_in_backward: bool
    precision: Precision
    shards_any_dim: bool

    @classmethod
    def for_unit(
        cls,
        plan: Plan,
        override: UnitOverride | None,
        *,
        kept: bool,
        is_embedding: bool = False,
        has_experts: bool = False,
    ) -> Self:
        """Returns the plan's settings for a unit, with the unit's override.

        kept: True keeps the unit gathered after forward, because its backward comes next
        is_embedding: True if its backward does not need its parameters
        has_experts: True if its parameters are experts: see `Plan.has_expert_mesh`

        Raises PlanError if `communication.reduce_within` is set and nodes have different numbers of a shard
        group's ranks.
        """
        own = override or _NO_OVERRIDE
        unsharded = own.strategy is not None
        reshard = False if kept else plan.reshard_after_forward
        if unsharded:
            reshard = plan.strategy is not Strategy.ZERO1
        if own.reshard_after_forward is not None:
            reshard = own.reshard_after_forward
        replicas = plan.replicate_degree * (plan.shard_degree if unsharded else 1)
        degree, distance = 1 if unsharded else plan.shard_degree, plan.tensor_parallel
        if has_experts and plan.has_expert_mesh:
            replicas, degree = plan.expert_degrees(is_sharded=not unsharded)
            distance = plan.expert_parallel
        precision = Precision.from_mode(own.precision, plan.run) if own.precision else plan.precision
        return cls(
            replicate_degree=replicas,
            shard_degree=degree,
            rank_distance=distance,
            near_degree=_near_degree(plan.run.communication, degree, distance=distance),
            reshard_after_forward=reshard,
            # Parameters outside the device are read ahead in the order of all gathers.
            gathers_in_backward=not is_embedding or not reshard or plan.run.offload.tier.startswith("params"),
            precision=precision,
            shards_any_dim=has_experts and degree > 1 and plan.run.offload.tier == "none",
        )


def _near_degree(section: CommunicationSection, degree: int, *, distance: int) -> int:
    """Returns how many of `degree` ranks, `distance` apart, a node has. Raises PlanError if nodes differ."""
    node = 1 if section.reduce_within == "none" else section.ranks_per_node
    if degree == 1 or node == "auto":
        return degree
    if any(max(size, node) % min(size, node) for size in (degree * distance, distance)):
        raise PlanError(
            "gradients cannot be reduced within nodes first.",
            got=f"{degree} ranks that shard, {distance} apart, on nodes of {node}",
            why="nodes have different numbers of these ranks",
            fix='a sharding.shard_degree that fills whole nodes, or communication.reduce_within = "none"',
        )
    return max(1, min(degree, node // distance))


def _resolve_auto_settings(run: Run) -> Run:
    """Returns `run` with a default for each `auto` of compile, sharding, recompute and offload."""
    hybrid = run.sharding.shard_degree is not None
    strategy = Strategy.HYBRID_SHARD if hybrid else Strategy.FULL_SHARD
    plain: dict[str, dict[str, object]] = {
        "run": {"compile": False},
        "sharding": {"strategy": strategy, "context_parallel": 1, "tensor_parallel": 1, "expert_parallel": 1},
        "recompute": {"mode": "none"},
        "offload": {"tier": "none", "update": "host"},
    }
    for name, defaults in plain.items():
        section: FrozenModel = getattr(run, name)
        if settled := {key: value for key, value in defaults.items() if getattr(section, key) == "auto"}:
            run = run.model_copy(update={name: section.model_copy(update=settled)})
    return run


def _replicate_and_shard_degrees(run: Run, averaging_ranks: int) -> tuple[int, int]:
    """Returns (replicate degree, shard degree), whose product is `averaging_ranks`. Raises PlanError."""
    strategy, degree = run.sharding.strategy, run.sharding.shard_degree
    if strategy is Strategy.NO_SHARD:
        return averaging_ranks, 1
    if strategy not in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2):
        return 1, averaging_ranks
    if degree is not None and averaging_ranks % degree == 0:
        return averaging_ranks // degree, degree
    fix = f"sharding.shard_degree = one of {run_checks.divisors(averaging_ranks)}"
    if degree is None:
        what = f"{strategy} needs to know over how many ranks it shards."
        raise PlanError(what, got="no sharding.shard_degree", fix=fix)
    raise PlanError(
        f"{strategy} cannot lay {averaging_ranks} ranks out in groups of {degree}.",
        got=f"sharding.shard_degree = {degree}, {averaging_ranks} ranks",
        why="every rank must be in one shard group, all groups alike",
        fix=fix,
    )


def _microbatch_and_accumulation(run: Run, data_parallel_degree: int) -> tuple[int, int]:
    """Returns (sequences per rank in a microbatch, microbatches per step). Raises PlanError."""
    batch, pinned = run.train.global_batch, run.train.microbatch
    once = data_parallel_degree * (pinned or 1)
    if batch % once:
        below, above = batch // once * once, (batch // once + 1) * once
        sizes = f"{below} or {above}" if below else f"{above}"
        degree = run.sharding.context_degree * data_parallel_degree // math.gcd(batch, data_parallel_degree)
        shared = "" if below or pinned else f", or sharding.context_parallel = {degree}"
        ranks = count_text(data_parallel_degree, "rank") + (" (run.ranks)" if run.run.ranks else "")
        ranks += f" × microbatch {pinned} = {once} at once" if pinned else ""
        raise PlanError(
            f"a global batch of {count_text(batch, 'sequence')} cannot be shared out evenly.",
            got=f"train.global_batch = {batch}, {ranks}",
            why="every rank must do the same number of full microbatches a step",
            fix=f"train.global_batch = {sizes}{shared}, or another number of ranks",
        )
    microbatch = pinned or batch // data_parallel_degree
    return microbatch, batch // (data_parallel_degree * microbatch)
