"""Search for the best plan that fits, or for the closest plan if none fits.

[Note: the choice]
A plan may use the device's memory without a margin (`plan.memory_margin`), because a prediction may be too
low. Of the plans that fit so, those within SAME_SPEED of the fastest are ties, since no prediction is better
than that. Of these, the one with the least memory is chosen. If several are within SAME_MEMORY (a fraction of
the device) of it, the plainest of them is chosen (see `planner.search.candidates`). What leaves the device is
not saved: all this is among the plans of one offload target, the plainest with a plan that is at most
WORTH_MORE_OFFLOAD slower than the fastest.

The search is exact: see [Note: exact pruning] in `planner.search.candidates`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from fullshard.errors import PlanError
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.offload import TIERS
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.planner.search import candidates
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.machine.hardware import MOST_RANKS, Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import fits_in_host_memory
from fullshard.spec.run import Run, Tier
from fullshard.spec.value import FrozenModel, NonNegativeInt, PositiveInt

SAME_SPEED = 0.01
SAME_MEMORY = 0.02
WORTH_MORE_OFFLOAD = 0.05


class SearchResult(FrozenModel):
    """Result of a search. Each of its plans has a prediction."""

    best: Plan | None  # the best plan that fits, by [Note: the choice]; None if none does
    fastest: Plan  # the fastest plan regardless of memory
    best_in_twice: Plan | None  # the best plan that fits twice `limit_bytes`; None if none does
    closest: Plan | None  # if none fits, the plan that lacks the fewest bytes; otherwise None
    # for each `Candidate.strategy_label`, the best plan that fits, or else that needs the fewest bytes
    by_strategy: Mapping[str, Plan]
    limit_bytes: PositiveInt  # bytes that a plan may use: the device's memory without the margin
    considered: NonNegativeInt  # number of distinct candidates
    predicted: NonNegativeInt  # candidates predicted in full; the others cannot be among these results


def search(  # signature: the library's, the same for all its questions
    spec: ModelSpec,
    hardware: Hardware,
    run: Run,
    *,
    capacity_bytes: int | None = None,
    memory: candidates.Memory = peak_bytes,
    tiers: Sequence[Tier] = (),
    only_best: bool = False,
) -> SearchResult:
    """Returns the best plan of `spec` on all ranks of `hardware`, over the open settings of `run`.

    capacity_bytes: device memory of one rank, including the context; None: that of `hardware`.
    memory: function that returns a plan's peak, which must not be below `peak_lower_bound`.
    tiers: offload targets to try instead of the run's own. If the run leaves the offload target open,
        targets are tried only if nothing fits without one.
    only_best: leave out of the result all plans but `best` and `fastest`, which takes a fraction of the time

    Raises PlanError if the global batch cannot be divided over the ranks, the pinned settings are impossible
    on them, or `spec` was described under other settings.

    >>> result = fs.search(spec, hardware, run)
    >>> result.best.prediction.memory.total <= result.limit_bytes
    True
    """
    if capacity_bytes is not None:
        chip = hardware.chip.model_copy(update={"memory_bytes": capacity_bytes})
        hardware = hardware.model_copy(update={"chip": chip, "usable_fraction": 1.0})
    costs = candidates.CandidateCosts(spec, hardware, run=run, memory=memory, tiers=tiers)
    found = _search_candidates(costs, only_best=only_best)
    others = list_offload_targets(hardware, run)
    if found.best is None and not tiers and run.offload.tier == "auto" and others:
        with suppress(PlanError):  # there is more state than an offload target can have groups
            outside = search(spec, hardware, run, memory=memory, tiers=others, only_best=only_best)
            if outside.best is not None:
                in_twice = filter(None, (found.best_in_twice, outside.best_in_twice))
                fastest = max(in_twice, key=_tokens_per_second, default=None)
                found = outside.model_copy(update={"best_in_twice": fastest})
    return found


def predict(spec: ModelSpec, plan: Plan, hardware: Hardware) -> Plan:  # signature: the library's
    """Returns `plan` with its prediction of bytes and seconds, term by term.

    Ranks are laid out on nodes as in `hardware`, for any number of ranks. Raises PlanError if `spec` lacks
    something that this plan needs (see `peak_bytes`), or `hardware` lacks the link between its nodes.

    >>> fs.predict(spec, plan, hardware).prediction.memory.parameter_shards > 0
    True
    """
    plan = plan.with_ranks_per_node(hardware.ranks_per_node)
    memory = candidates.add_workspace_bytes(peak_bytes(spec, plan), hardware)
    timer = StepTimePredictor(spec, hardware)
    return candidates.attach_prediction(plan, timer, memory=memory, limit=hardware.device_bytes_limit)


def plan(spec: ModelSpec, hardware: Hardware, run: Run) -> Plan:  # signature: the library's
    """Returns the best plan of `run` that fits, by [Note: the choice].

    Raises PlanError if none fits, with the closest plan and the changes that would make it fit.

    >>> plan = fs.plan(spec, hardware, run)
    >>> print(plan.strategy, plan.microbatch, plan.prediction.tokens_per_second > 0)
    full_shard 2 True
    """
    return require_best(search(spec, hardware, run), spec=spec, hardware=hardware, run=run)


def require_best(found: SearchResult, *, spec: ModelSpec, hardware: Hardware, run: Run) -> Plan:
    """Returns the best plan. Raises PlanError if none fits, with the closest and changes that would fit.

    found: a search of `run`, which is repeated for the error if it has only the best plan
    """
    if found.best is None:
        found = found if found.closest is not None else search(spec, hardware, run)
        raise no_plan_fits_error(found, spec=spec, hardware=hardware, run=run)
    return found.best


def _tokens_per_second(plan: Plan) -> float:
    return candidates.require_prediction(plan).tokens_per_second


def _search_candidates(costs: candidates.CandidateCosts, *, only_best: bool) -> SearchResult:
    limit = costs.limit
    order = sorted(range(len(costs.candidates)), key=lambda index: (costs.least_seconds[index], index))
    own = [index for index in order if not costs.candidates[index].is_duplicate]
    kinds: dict[str, list[int]] = defaultdict(list)
    for index in () if only_best else order:
        kinds[costs.candidates[index].strategy_label].append(index)
    best = _find_best(costs, own, limit=limit)
    by_kind: dict[str, int] = {}
    for name, indices in kinds.items():
        chosen = _find_best(costs, indices, limit=limit)
        by_kind[name] = _find_smallest(costs, indices) if chosen is None else chosen
    fastest, closest = _find_fastest(costs, order, limit=None), None
    in_twice = None if only_best else _find_best(costs, own, limit=2 * limit)
    if best is None and not only_best:
        closest = min((costs.plan(index) for index in by_kind.values()), key=_memory_shortfall_sort_key)
    assert fastest is not None, "something was considered"
    return SearchResult(
        best=None if best is None else costs.plan(best),
        fastest=costs.plan(fastest),
        best_in_twice=None if in_twice is None else costs.plan(in_twice),
        closest=closest,
        by_strategy={name: costs.plan(index) for name, index in by_kind.items()},
        limit_bytes=limit,
        considered=len(own),
        predicted=len(costs.plans),
    )


def _find_best(costs: candidates.CandidateCosts, order: Sequence[int], *, limit: int) -> int | None:
    """Returns the best of these candidates, by [Note: the choice], or None if none fits `limit` bytes."""
    fastest = _find_fastest(costs, order, limit=limit)
    if fastest is None:
        return None
    if len({costs.candidates[index].tier for index in order}) > 1:
        slowest = costs.seconds_with_compiling(fastest) * (1 + WORTH_MORE_OFFLOAD)
        near = (index for index in sorted(order) if costs.least_seconds[index] <= slowest)
        plainest = next(
            i
            for i in near
            if costs.fits_device_and_host(i, limit) and costs.seconds_with_compiling(i) <= slowest
        )
        tier = costs.candidates[plainest].tier
        order = [index for index in order if costs.candidates[index].tier == tier]
        fastest = _find_fastest(costs, order, limit=limit)
        assert fastest is not None, "the plainest fits"
    slowest = costs.seconds_with_compiling(fastest) * (1 + SAME_SPEED)
    near = [
        index
        for index in order
        if costs.least_seconds[index] <= slowest and costs.fits_device_and_host(index, limit)
    ]
    near.sort(key=lambda index: (costs.needed_bytes(index), index))
    least = next(
        costs.needed_bytes(index) for index in near if costs.seconds_with_compiling(index) <= slowest
    )
    most = least + SAME_MEMORY * costs.hardware.device_bytes_limit
    small = sorted(index for index in near if costs.needed_bytes(index) <= most)
    return next(index for index in small if costs.seconds_with_compiling(index) <= slowest)


def _find_fastest(costs: candidates.CandidateCosts, order: Sequence[int], *, limit: int | None) -> int | None:
    """Returns the fastest candidate that fits `limit` bytes (None: any). `order`: by bounds on time."""
    best = None
    for index in order:
        if best is not None and costs.least_seconds[index] > costs.seconds_with_compiling(best):
            break
        fits = limit is None or costs.fits_device_and_host(index, limit)
        if fits and (
            best is None or costs.seconds_with_compiling(index) < costs.seconds_with_compiling(best)
        ):
            best = index
    return best


def _find_smallest(costs: candidates.CandidateCosts, indices: Iterable[int]) -> int:
    """Returns the candidate that needs the fewest bytes of the device; of equals, the plainest."""
    best: tuple[int, int] | None = None
    for bound, index in sorted((costs.least_bytes(index), index) for index in indices):
        if best is not None and bound > best[0]:
            break
        needed = (costs.needed_bytes(index), index)
        best = needed if best is None or needed < best else best
    assert best is not None, "every strategy has candidates"
    return best[1]


def no_plan_fits_error(found: SearchResult, *, spec: ModelSpec, hardware: Hardware, run: Run) -> PlanError:
    """Returns the error that no plan of `run` fits, with the closest plan and changes that would fit."""
    closest = found.closest
    assert closest is not None, "a search that considered something has a best plan or a closest"
    prediction = candidates.require_prediction(closest)
    over = prediction.required_device_bytes - found.limit_bytes
    outside = prediction.offload or prediction.activations
    if outside is not None and over <= 0:
        return PlanError(
            f"no plan fits {format_bytes(outside.host_capacity_bytes or 0)} of host memory per rank.",
            got=f"closest: {format_plan(closest)} -> {format_bytes(prediction.host_bytes_per_rank)}",
            fix="; or ".join(_iterate_changes_to_fit_host_memory(closest)),
        )
    largest, count = max(prediction.memory.terms().items(), key=lambda term: term[1])
    changes = chain(iterate_runs_with_setting_unpinned(run, hardware), _iterate_more_ranks(run, hardware))
    shares = hardware.device == "cpu" and hardware.ranks_per_node > 1
    fewer = ", or fewer ranks, which share the machine's memory" if shares else ""
    smaller = f"a shorter data.sequence_length, or a smaller model{fewer}"
    no_margin = run.with_settings({"plan": {"memory_margin": 0.0}})
    without_margin = [("plan.memory_margin = 0", no_margin, hardware)] if run.memory_margin else []
    ways = [
        _first_fitting_change_text(spec, without_margin),
        _first_fitting_change_text(spec, changes) or smaller,
        _suggest_offload_target(spec, hardware, run=run),
    ]
    free = f" with {100 * run.memory_margin:g} % of it left free" if run.memory_margin else ""
    return PlanError(
        f"no plan fits {format_bytes(prediction.capacity_bytes)} per rank{free}.",
        got=f"closest: {format_plan(closest)} -> {format_bytes(prediction.required_device_bytes)}"
        f" ({format_bytes(over)} over)",
        why=f"largest: {largest.replace('_', ' ')}, {format_bytes(count)}",
        fix="; or ".join(way for way in ways if way is not None),
    )


def _first_fitting_change_text(spec: ModelSpec, changes: Iterable[tuple[str, Run, Hardware]]) -> str | None:
    """Returns the first of the (change, run, hardware) on which a plan fits, as text; None if none does."""
    for change, run, hardware in changes:
        if (best := search(spec, hardware, run, only_best=True).best) is not None:
            return f"{change}: {_format_plan_with_cost(best)}"
    return None


def format_plan(plan: Plan) -> str:
    """Returns the strategy, mesh, batch and other settings of a plan in one line."""
    mesh = f"dp_shard={plan.shard_degree}"
    if plan.replicate_degree > 1:
        mesh = f"dp_replicate={plan.replicate_degree}, {mesh}"
    return (
        f"{plan.strategy}, {mesh}, microbatch={plan.microbatch} × {plan.accumulation}, "
        f"recompute={plan.run.recompute.mode_text}"
        + (", compiled" if plan.run.run.compile is True else "")
        + (f", tensor_parallel={plan.tensor_parallel}" if plan.tensor_parallel > 1 else "")
        + (f", context_parallel={plan.context_parallel}" if plan.context_parallel > 1 else "")
        + (f", expert_parallel={plan.expert_parallel}" if plan.expert_parallel > 1 else "")
        + (f", offload={plan.run.offload.tier}" if plan.run.offload.offloads_optimizer else "")
    )


def _iterate_changes_to_fit_host_memory(plan: Plan) -> Iterator[str]:
    """Yields changes, as text, with which `plan`, which fits its device, may fit host memory."""
    prediction, section = candidates.require_prediction(plan), plan.run.offload
    if section.host_bytes is not None:
        least = prediction.host_bytes_per_rank
        yield f"offload.host_bytes = {least} ({format_bytes(least)}), the least that fits"
    if prediction.offload is not None:
        if section.is_on_drive:
            yield f"offload.sub_group_parameters below {section.sub_group_parameters}"
        yield 'offload.tier = "none" or another, or more machines'
    if prediction.activations is not None:
        yield 'recompute.mode = "full", or a smaller train.microbatch'


def list_offload_targets(hardware: Hardware, run: Run) -> tuple[Tier, ...]:
    """Returns the offload targets with known rates; none if the run's state cannot be offloaded."""
    drive = hardware.disk_bytes_per_second is not None
    host = hardware.host_bytes_per_second is not None or hardware.device == "cpu"
    fp8 = run.precision.mode == "fp8"  # weights are cast from masters on the device
    if run.optimizer.name.lower() != "adamw" or fp8 or not host:
        return ()
    drive = drive and not run.ema.decay
    return tuple(one for one in TIERS if one != "none" and (drive or one.endswith("cpu")))


def _suggest_offload_target(spec: ModelSpec, hardware: Hardware, *, run: Run) -> str | None:
    """Returns, as text, the best plan with an offload target for a run without; None if none fits."""
    tiers = list_offload_targets(hardware, run)
    if run.offload.tier != "none" or not tiers:
        return None
    best = search(spec, hardware, run, tiers=tiers, only_best=True).best
    terms = None if best is None else candidates.require_prediction(best).offload
    if best is None or terms is None:
        return None
    held = f"{format_bytes(terms.host_bytes)} of host memory"
    held += f" and {format_bytes(terms.disk_bytes)} of the drive" if terms.disk_bytes else ""
    return f'offload.tier = "{best.run.offload.tier}" with {held} per rank: {_format_plan_with_cost(best)}'


def _iterate_more_ranks(run: Run, hardware: Hardware) -> Iterator[tuple[str, Run, Hardware]]:
    """Yields (change as text, run, hardware) for multiples of the ranks, the fewest first."""
    nodes, per_node = hardware.nodes, hardware.ranks_per_node
    for factor in (2, 4, 8, 16, 32, 64):
        if hardware.world_size * factor > MOST_RANKS:
            return
        more = hardware.with_rank_counts(nodes=nodes * factor, ranks_per_node=per_node)
        if more.across is None:  # without a link between nodes, add ranks to the one node
            if hardware.device == "cpu":  # more CPU ranks would share the same memory
                return
            more = hardware.with_rank_counts(nodes=1, ranks_per_node=per_node * factor)
        ranks = more.world_size // run.sharding.ranks_per_sequence
        batch = -(-run.train.global_batch // ranks) * ranks
        if batch % (ranks * (run.train.microbatch or 1)) == 0:
            grown = f", train.global_batch = {batch}" if batch != run.train.global_batch else ""
            wider = run.with_settings({"train": {"global_batch": batch}})
            yield f"{more.world_size} ranks{grown}", wider, more


def iterate_runs_with_setting_unpinned(run: Run, hardware: Hardware) -> Iterator[tuple[str, Run, Hardware]]:
    """Yields (change as text, run, hardware) with a pinned microbatch, recompute or sharding left open."""
    free = {"strategy": "auto", "shard_degree": None}
    is_sharding_pinned = run.sharding.strategy != "auto" or run.sharding.shard_degree is not None
    for is_pinned, change, settings in (
        (run.train.microbatch is not None, "train.microbatch left out", {"train": {"microbatch": None}}),
        (run.recompute.mode != "auto", 'recompute.mode = "auto"', {"recompute": {"mode": "auto"}}),
        (is_sharding_pinned, 'sharding.strategy = "auto"', {"sharding": free}),
    ):
        if is_pinned:
            yield change, run.with_settings(settings), hardware


def _format_plan_with_cost(plan: Plan) -> str:
    prediction = candidates.require_prediction(plan)
    seconds = f", {format_seconds(prediction.time.total)} a step" if prediction.has_complete_step_time else ""
    return f"{format_plan(plan)} -> {format_bytes(prediction.required_device_bytes)}{seconds}"


def _memory_shortfall_sort_key(plan: Plan) -> tuple[int, int, int]:
    """Sort key: bytes over the device's capacity, then host bytes if they do not fit, then bytes needed."""
    prediction = candidates.require_prediction(plan)
    over = max(0, prediction.required_device_bytes - prediction.capacity_bytes)
    fits_host = fits_in_host_memory(prediction.offload, prediction.activations)
    return over, 0 if fits_host else prediction.host_bytes_per_rank, prediction.required_device_bytes
