"""Capacity questions: the fewest ranks for a deadline, and the largest setting that still fits."""

from collections.abc import Callable, Sequence

from fullshard.errors import PlanError
from fullshard.planner.search.candidate_costs import require_prediction
from fullshard.planner.search.candidates import run_with_settings
from fullshard.planner.search.search import search
from fullshard.quantities import format_count
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.spec.settings.run_checks import divisors
from fullshard.spec.value import FrozenModel

_SECONDS_A_DAY = 86_400


class ClusterPlan(FrozenModel):
    """A number of nodes and ranks, with the best plan on them."""

    nodes: int
    ranks_per_node: int
    plan: Plan
    days: float  # days that the plan takes for the requested tokens


class LargestFittingSize(FrozenModel):
    """The largest value of a setting that fits in memory, with the best plan for it."""

    size: int  # a microbatch, or a sequence length
    plan: Plan


def fewest_ranks_for_deadline(
    spec: ModelSpec, hardware: Hardware, *, run: Run, tokens: int, days: float, most_nodes: int = 4096
) -> ClusterPlan:
    """Returns the fewest ranks of this hardware that process `tokens` in `days`.

    More ranks are not always faster, since a smaller batch per rank hides less communication. So each number
    of ranks over which `train.global_batch` can be divided is tried, the smallest first. Raises PlanError,
    which names the fastest, if none is fast enough.
    """
    nearest: ClusterPlan | None = None
    got = "not even at the chips' peak"
    for nodes, ranks in _list_node_and_rank_counts(hardware, run, most_nodes=most_nodes):
        fleet = hardware.with_rank_counts(nodes=nodes, ranks_per_node=ranks)
        if _least_days_at_peak_flops(spec, fleet, tokens=tokens) > days:
            continue
        best = search(spec, fleet, run).best
        if best is None:
            got = "nothing fits"
            continue
        needed = tokens / require_prediction(best).tokens_per_second / _SECONDS_A_DAY
        found = ClusterPlan(nodes=nodes, ranks_per_node=ranks, plan=best, days=needed)
        if needed <= days:
            return found
        if nearest is None or needed < nearest.days:
            nearest = found
    if nearest is not None:
        got = f"{nearest.days:.1f} days on {nearest.nodes} × {nearest.ranks_per_node}"
    raise PlanError(
        f"no number of ranks sees {format_count(tokens)} tokens in {days:g} days.",
        got=got,
        why=f"train.global_batch = {run.train.global_batch} can be shared out over no more ranks than that",
        fix="a larger train.global_batch, or more days",
    )


def largest_fitting_microbatch(spec: ModelSpec, hardware: Hardware, *, run: Run) -> LargestFittingSize:
    """Returns the largest microbatch with which any plan of `run` fits. Raises PlanError if none fits.

    Nothing is offloaded, unless `run` pins an offload target.
    """
    run = _run_without_chosen_offload(run)
    each_rank = run.train.global_batch // (hardware.world_size // run.sharding.ranks_per_sequence or 1)
    for microbatch in reversed(divisors(each_rank)):
        best = search(spec, hardware, run_with_settings(run, {"train": {"microbatch": microbatch}})).best
        if best is not None:
            return LargestFittingSize(size=microbatch, plan=best)
    raise _nothing_fits_error("microbatch", f"divisors of {each_rank} sequences per rank")


def largest_fitting_sequence_length(
    describe: Callable[[Run], ModelSpec], hardware: Hardware, *, run: Run, lengths: Sequence[int]
) -> LargestFittingSize:
    """Returns the largest of the sequence lengths `lengths` that fits. Raises PlanError if none fits.

    `describe` returns the spec of a run. The runs passed to it have another sequence length, and a
    `model.max_sequence` that is at least as large. Nothing is offloaded, unless `run` pins an offload target.
    """
    run = _run_without_chosen_offload(run)

    def best_plan_at_length(length: int) -> Plan | None:
        settings = {"data": {"sequence_length": length}}
        if isinstance(run.model, DecoderConfig):
            settings["model"] = {"max_sequence": max(length, run.model.max_sequence)}
        longer = run_with_settings(run, settings)
        return search(describe(longer), hardware, longer).best

    ordered = sorted(set(lengths))
    found: LargestFittingSize | None = None
    low, high = 0, len(ordered) - 1
    while low <= high:
        middle = (low + high) // 2
        best = best_plan_at_length(ordered[middle])
        if best is None:
            high = middle - 1
        else:
            found, low = LargestFittingSize(size=ordered[middle], plan=best), middle + 1
    if found is None:
        tried = f"{len(ordered)} lengths from {ordered[0]}" if ordered else "none"
        raise _nothing_fits_error("sequence length", tried)
    return found


def _run_without_chosen_offload(run: Run) -> Run:
    """Returns `run`, with no offload if it leaves the choice of a target to the planner."""
    return run_with_settings(run, {"offload": {"tier": "none"}}) if run.offload.tier == "auto" else run


def _list_node_and_rank_counts(hardware: Hardware, run: Run, *, most_nodes: int) -> list[tuple[int, int]]:
    per_node, batch = hardware.ranks_per_node, run.train.global_batch
    most = most_nodes if hardware.across is not None else 1
    sizes = [(1, ranks) for ranks in divisors(per_node)]
    sizes += [(nodes, per_node) for nodes in range(2, most + 1)]
    at_once, split = run.train.microbatch or 1, run.sharding.ranks_per_sequence
    whole = [(nodes, ranks) for nodes, ranks in sizes if nodes * ranks % split == 0]
    return [(nodes, ranks) for nodes, ranks in whole if batch % (nodes * ranks // split * at_once) == 0]


def _least_days_at_peak_flops(spec: ModelSpec, hardware: Hardware, *, tokens: int) -> float:
    """Returns the days for `tokens` at the chip's highest peak FLOP/s; 0 if no peak is known."""
    peak = max(hardware.chip.flops_per_second.values(), default=0.0)
    if not peak or spec.flops_per_token is None:
        return 0.0
    # The attention FLOP include all pairs of positions, of which a causal kernel computes half.
    needed = spec.flops_per_token / 2 * tokens
    return needed / (peak * hardware.world_size) / _SECONDS_A_DAY


def _nothing_fits_error(what: str, tried: str) -> PlanError:
    return PlanError(f"no {what} fits.", got=f"tried: {tried}", fix="more ranks, or a smaller model")
