"""Candidate plans of a run: every combination of the settings that the run leaves open.

The order matters: of two plans that take equally long, the earlier candidate is preferred. Plain settings
come before elaborate ones: replicas before shards, full_shard before the other strategies, FSDP2's own
prefetch before none and explicit, no recompute before some, uncompiled before compiled, larger microbatches
before smaller ones.

[Note: groups follow nodes]
A group of ranks that shares parameters is a whole number of nodes, or divides a node's ranks: any other would
send as much between nodes as a larger one. A run may pin any other.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple

from fullshard.errors import PlanError
from fullshard.planner.predict.offload import choose_update_device
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import MicrobatchTrace, ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import PrefetchSection, Run, Strategy, Tier
from fullshard.spec.settings.model_section import indivisible_experts_error
from fullshard.spec.settings.run_checks import divisors
from fullshard.spec.settings.train_section import RecomputeSection

GradientSync = Literal["every_microbatch", "last_microbatch"]
_DEEPEST_PREFETCH = 3
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


class ShardingChoice(NamedTuple):
    """A sharding strategy with its degrees."""

    strategy: Strategy
    shard_degree: int  # number of ranks that share the parameters
    reshard_after_forward: int | None = None  # ranks that parameters stay sharded over after forward

    @property
    def frees_parameters_after_forward(self) -> bool:
        """True if unsharded parameters are freed after forward, by the rule of `Plan.from_run`."""
        freeing = (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)
        return self.reshard_after_forward is not None or self.strategy in freeing


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
    prefetch: PrefetchSection
    is_duplicate: bool = False  # a candidate of another strategy is equivalent
    tier: Tier = "none"  # the offload target, `offload.tier`

    @property
    def strategy_label(self) -> str:
        """Label under which a search reports its best plan: strategy and offload target.

        With resharding to fewer ranks, the strategy is `hpz` (full_shard), or ends in `_hpz`.
        """
        name = str(self.mesh.strategy)
        if self.mesh.reshard_after_forward is not None:
            name = "hpz" if self.mesh.strategy is Strategy.FULL_SHARD else f"{name}_hpz"
        return name if self.tier == "none" else f"{name} {self.tier}"


def iterate_candidates(
    spec: ModelSpec, hardware: Hardware, *, run: Run, tiers: Sequence[Tier] = ()
) -> Iterator[Candidate]:
    """Yields all combinations of the settings that `run` leaves open, on all ranks of `hardware`.

    tiers: offload targets to try instead of the run's own

    Raises PlanError if the batch or a pinned setting is impossible on this many ranks.
    """
    own: Tier = "none" if run.offload.tier == "auto" else run.offload.tier
    for tier in tiers or (own,):
        yield from _iterate_for_target(spec, hardware, run=run, tier=tier)


def _iterate_for_target(spec: ModelSpec, hardware: Hardware, *, run: Run, tier: Tier) -> Iterator[Candidate]:
    per_node, split = hardware.ranks_per_node, run.sharding.tensor_degree
    run = run_with_settings(run, {"offload": {"tier": tier}, "sharding": {"tensor_parallel": split}})
    world = hardware.world_size // split
    node = per_node // split if per_node % split == 0 else 1
    meshes = list(_iterate_sharding_choices(run, world, node=node))
    if (experts := run.sharding.expert_degree) > 1:
        groups = {m: 1 if m.shard_degree == 1 else m.shard_degree * split for m in meshes}
        divided = [m for m in meshes if groups[m] % experts == 0 or experts % groups[m] == 0]
        meshes = divided or meshes[:1]
    # Building a plan with all pinned settings raises early if they are impossible.
    pinned = run_with_settings(run, {"sharding": _sharding_settings(meshes[0])})
    plan = Plan.from_run_for_prediction(pinned, world_size=hardware.world_size, device=hardware.device)
    if plan.expert_parallel > 1 and (not spec.experts or spec.experts % plan.expert_parallel):
        key = f"experts of {spec.name}"
        raise indivisible_experts_error(spec.experts, ranks=plan.expert_parallel, key=key)
    _check_chip_has_fp8(plan, hardware)
    sizes = {trace.microbatch for trace in spec.traces}  # None: any size
    for mesh in meshes:
        prefetches = _prefetch_choices(run, mesh, units=len(spec.units))
        batches = list(_iterate_microbatch_splits(run, mesh, groups=world // run.sharding.context_degree))
        traced = [one for one in batches if not sizes.isdisjoint((None, one.microbatch))]
        for batch in traced or batches:
            double = _is_duplicate(run, mesh, batch=batch, world=world)
            pairs = _recompute_and_compile_choices(spec, run, microbatch=batch.microbatch, hardware=hardware)
            for (recompute, compiled), prefetch in product(pairs, prefetches):
                yield Candidate(mesh, batch, recompute, compiled, prefetch, double, tier)


def _check_chip_has_fp8(plan: Plan, hardware: Hardware) -> None:
    known = hardware.chip.flops_per_second
    if plan.precision.fp8 is not None and hardware.device == "cuda" and known and "fp8" not in known:
        raise PlanError(
            f"{hardware.chip.name} has no fp8 matmuls.",
            got=f'precision.mode = "{plan.run.precision.mode}"',
            why=f"its dtypes are {', '.join(known)}",
            fix='precision.mode = "bf16"',
        )


def run_with_settings(run: Run, sections: Mapping[str, Mapping[str, object]]) -> Run:
    """Returns `run` with other values in some of its sections, such as `{"prefetch": {"mode": "none"}}`."""
    updated = {name: getattr(run, name).model_copy(update=values) for name, values in sections.items()}
    return run.model_copy(update=updated)


def build_plan(candidate: Candidate, run: Run, *, hardware: Hardware) -> Plan:
    """Returns the plan of `run` with all settings of `candidate`."""
    batch = candidate.batch
    settings = {
        "sharding": {"tensor_parallel": run.sharding.tensor_degree, **_sharding_settings(candidate.mesh)},
        "offload": {"tier": candidate.tier},
        "train": {"microbatch": batch.microbatch, "gradient_sync": batch.sync},
        "run": {"compile": candidate.compiled},
    }
    whole = {"recompute": candidate.recompute, "prefetch": candidate.prefetch}
    plan = Plan.from_run_for_prediction(
        run_with_settings(run, settings).model_copy(update=whole),
        world_size=hardware.world_size,
        device=hardware.device,
        bf16_hardware=hardware.device == "cuda" and "bf16" in hardware.chip.flops_per_second,
    )
    if run.offload.update != "auto":
        return plan
    update = {"update": choose_update_device(plan, hardware)}
    return plan.model_copy(update={"run": run_with_settings(plan.run, {"offload": update})})


def _sharding_settings(mesh: ShardingChoice) -> dict[str, object]:
    return {
        "strategy": mesh.strategy,
        "shard_degree": mesh.shard_degree if mesh.strategy in _HYBRID else None,
        "reshard_after_forward": mesh.reshard_after_forward,
    }


def _iterate_sharding_choices(run: Run, world: int, *, node: int) -> Iterator[ShardingChoice]:
    """Yields the strategies over `world` ranks, `node` of them on a node. See [Note: groups follow nodes]."""
    section = run.sharding
    if section.strategy != "auto":
        strategies: Sequence[Strategy] = (Strategy(section.strategy),)
    else:
        strategies = _ORDER if section.shard_degree is None else _HYBRID
    proper = _group_sizes(world, node=node)
    plain: list[ShardingChoice] = []
    for strategy in strategies:
        if strategy not in _HYBRID:
            plain.append(ShardingChoice(strategy, 1 if strategy is Strategy.NO_SHARD else world))
        elif section.shard_degree is not None:
            plain.append(ShardingChoice(strategy, section.shard_degree))
        else:
            degrees = proper if proper or section.strategy == "auto" else [world]
            plain += [ShardingChoice(strategy, degree) for degree in degrees]
    freeing = [m for m in plain if m.strategy in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)]
    if (k := section.reshard_after_forward) is not None:
        fitting = [m for m in freeing if m.shard_degree % k == 0 and k not in (1, m.shard_degree)]
        yield from (mesh._replace(reshard_after_forward=k) for mesh in fitting or freeing[:1])
        return
    yield from plain
    if section.strategy != "auto" or run.precision.mode == "fp8":
        return  # a named strategy is taken literally; FSDP2 gathers fp8 from all ranks
    for mesh in freeing:
        inner = _group_sizes(mesh.shard_degree, node=node)
        yield from (mesh._replace(reshard_after_forward=degree) for degree in inner)


def _group_sizes(ranks: int, *, node: int) -> list[int]:
    """Returns the sizes of equal groups of `ranks`, without 1 and all, that follow nodes of `node` ranks."""
    sizes = (size for size in reversed(divisors(ranks)) if size not in (1, ranks))
    return [size for size in sizes if size % node == 0 or node % size == 0]


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
        for recompute in _recompute_choices(trace)
    )
    if run.recompute.mode != "auto":
        traced = [one for one in spec.traces if one.is_valid_for(run.recompute, microbatch, compiled=True)]
        return [(run.recompute, compiled) for compiled in compiles if traced or not compiled]
    order = ("none", "full", "every", "selective", "offload", "auto")
    return sorted(
        (pair for pair in valid if offloads or pair[0].mode != "offload"),
        key=lambda pair: (order.index(pair[0].mode), pair[0].block_period, pair[0].blocks or 0, pair[1]),
    )


def _recompute_choices(trace: MicrobatchTrace) -> list[RecomputeSection]:
    """Returns the settings to try of which `trace` tells: about one, two and three quarters of the blocks."""
    counts = trace.recomputed_block_counts()
    if not counts:
        return [trace.recompute]
    wanted = [part * trace.blocks / _PARTS for part in range(1, _PARTS)]
    nearest = [min(counts, key=lambda count: abs(count - blocks)) for blocks in wanted]
    return [trace.recompute.model_copy(update={"blocks": blocks}) for blocks in nearest]


def _prefetch_choices(run: Run, mesh: ShardingChoice, *, units: int) -> list[PrefetchSection]:
    if run.prefetch.mode != "auto":
        return [run.prefetch]
    implicit = PrefetchSection(mode="implicit")
    if mesh.shard_degree == 1:
        return [implicit]  # nothing is gathered
    deepest = min(_DEEPEST_PREFETCH, units - 1)
    ahead = [PrefetchSection(mode="explicit", forward=d, backward=d) for d in range(1, deepest + 1)]
    return [implicit, PrefetchSection(mode="none"), *ahead]


def _is_duplicate(run: Run, mesh: ShardingChoice, *, batch: MicrobatchSplit, world: int) -> bool:
    if run.sharding.strategy != "auto" or run.sharding.shard_degree is not None:
        return False
    if mesh.strategy is Strategy.NO_SHARD:
        return world == 1  # the same as full_shard
    # The same as shard_grad_op, which has the pinned sync.
    return mesh.strategy is Strategy.ZERO1 and (batch.accumulation == 1 or run.train.gradient_sync != "auto")
