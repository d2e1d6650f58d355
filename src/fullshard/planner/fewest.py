"""The fewest GPUs that train on a number of tokens within some days.

[Note: every number of nodes]
More nodes may be slower: their ranks divide the batch unevenly, or share sequences. So all numbers are tried,
from the fewest on, except those whose kernels alone would take too long: all FLOP at the highest rate of
their kind. Ranks that share sequences, matmuls or experts compute no fewer FLOP together.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count

from fullshard.errors import PlanError, SpecError
from fullshard.planner.predict.phases import nearest_dtype_rate_curve
from fullshard.planner.result import PlanRequest, PlanResult, search_and_explain, search_degrees
from fullshard.planner.search.candidates import require_prediction
from fullshard.quantities import count_text
from fullshard.report.plan import TrainingBudget, format_duration
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.settings.run_checks import divisors

MOST_TIMES, FIRST_NODES = 4, 16
"""The search ends at MOST_TIMES × the larger of FIRST_NODES and the nodes that kernels alone need."""


def plan_fewest_gpus(
    build_request: Callable[..., PlanRequest], *, days: float, budget: TrainingBudget | None
) -> PlanResult:
    """Returns the plan of the fewest GPUs that process the budget's tokens in `days`.

    build_request: see `PlanOptions.build_request`; raises PlanError if the ranks cannot divide the batch

    Raises SpecError without tokens, and PlanError if none of the numbers that are tried is quick enough.
    """
    if budget is None or (tokens := budget.tokens) is None:
        raise SpecError("--fewest-gpus-in-days needs a number of tokens.", fix="add --budget 15T")
    hardware = build_request(quiet=True).hardware
    if hardware.device == "cpu":
        raise SpecError("--fewest-gpus-in-days counts GPUs.", got=hardware.name, fix="add --on 8xH100")
    ranks_per_node = hardware.ranks_per_node
    deadline, least, fastest, nodes = days * 86400, 0.0, (float("inf"), 0), 1
    parts = ((1, part) for part in divisors(ranks_per_node))
    for nodes, each in chain(parts, ((nodes, ranks_per_node) for nodes in count(2))):
        ranks = nodes * each
        is_beyond_link = nodes > 1 and hardware.across is None
        if is_beyond_link or nodes > MOST_TIMES * max(least / ranks_per_node, FIRST_NODES):
            break
        try:
            question = build_request(size=(nodes, each), quiet=True)
            least = tokens * least_rank_seconds_per_token(question.spec, question.hardware) / deadline
            best = None if ranks < least else search_degrees(question, only_best=True).found.best
        except PlanError:
            continue
        if best is None:
            continue
        seconds = tokens / require_prediction(best).tokens_per_second
        if seconds <= deadline:
            return replace(search_and_explain(build_request(size=(nodes, each))), fewest_for_days=days)
        fastest = min(fastest, (seconds, ranks))
    found = f"{format_duration(fastest[0])} on {count_text(fastest[1], 'GPU')}" if fastest[1] else "none"
    limit = f"{MOST_TIMES} times what kernels need, at least {MOST_TIMES * FIRST_NODES}"
    if hardware.across is None:
        limit = "the link between nodes is not known"
    raise PlanError(
        f"no number of GPUs that was tried is done in {count_text(days, 'day')}.",
        got=f"the quickest that fits: {found}",
        why=f"tried up to {count_text(nodes - 1, 'node')}: {limit}",
        fix="more days, a larger --tokens-per-step, which more GPUs can share, or GPUs with more memory",
    )


def least_rank_seconds_per_token(spec: ModelSpec, hardware: Hardware) -> float:
    """Returns a lower bound on the seconds of one rank for each token: its FLOP at the highest rates."""
    shared, rates = spec.tensor_parallel * spec.context_parallel, hardware.rates_at_world_size
    curves = (rates.attention_by_head_dim, rates.attention_backward_by_head_dim, rates.flash_by_head_dim)
    curves = (*curves, rates.flash_backward_by_head_dim)
    widest = max(1.0, *(point.rate for curve in curves for point in curve or ()))
    found: list[float] = []
    for trace in spec.traces:
        seconds, microbatch = 0.0, trace.microbatch or 1
        for phase in trace.phases:
            times = next((r.times for r in trace.repeats if r.first <= phase.unit < r.first + r.units), 1)
            for kernel, launches in ((spec.kernels[one.kernel], one.times) for one in phase.work):
                if kernel.kind in ("matmul", "attention", "attention_backward"):
                    curve = nearest_dtype_rate_curve(getattr(rates, kernel.kind), kernel.dtype)
                    flops = times * launches * kernel.flops.value_at(microbatch)
                    seconds += flops / (widest * max(point.rate for point in curve))
        found.append(seconds * shared / (microbatch * spec.sequence_length))
    return min(found)
