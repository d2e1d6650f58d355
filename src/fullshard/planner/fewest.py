"""The fewest GPUs that train on a number of tokens within some days.

[Note: every number of nodes]
More nodes may be slower: their ranks divide the batch unevenly, or share sequences. So all numbers are tried,
from the fewest on, except those whose kernels alone would take too long: all FLOP at the highest rate of
their kind. Ranks that share sequences, matmuls or experts compute no fewer FLOP together.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from fullshard.errors import PlanError
from fullshard.planner.predict.phases import nearest_dtype_rate_curve
from fullshard.planner.result import PlanRequest, PlanResult, search_and_explain, search_degrees
from fullshard.planner.search.candidates import require_prediction
from fullshard.report.plan import format_duration
from fullshard.spec.machine.hardware import MOST_RANKS, Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.settings.run_checks import divisors

MOST_TIMES, FIRST_NODES = 4, 16
"""Numbers are tried up to MOST_TIMES as many GPUs as kernels alone need, or as FIRST_NODES have."""


def plan_fewest_gpus(
    build_request: Callable[[int, int], PlanRequest], *, tokens: int, days: float, ranks_per_node: int
) -> PlanResult:
    """Returns the plan of the fewest GPUs that process `tokens` in `days`, on parts of a node or whole ones.

    build_request: returns the question for (nodes, ranks per node), or raises PlanError if the batch of a
        step cannot be divided over them

    Raises PlanError if none of the numbers that are tried does, with the fastest of them.
    """
    deadline, least, fastest = days * 86400, 0.0, (float("inf"), 0)
    for nodes, each in _iterate_sizes(ranks_per_node):
        ranks = nodes * each
        if nodes > MOST_TIMES * max(least / ranks_per_node, FIRST_NODES):
            break
        try:
            question = build_request(nodes, each)
            least = tokens * least_rank_seconds_per_token(question.spec, question.hardware) / deadline
            best = None if ranks < least else search_degrees(question).found.best
        except PlanError:
            continue
        if best is None:
            continue
        seconds = tokens / require_prediction(best).tokens_per_second
        if seconds <= deadline:
            answer = f"{ranks:,} GPUs are the fewest for {days:g} days"
            return replace(search_and_explain(question), answer=answer)
        fastest = min(fastest, (seconds, ranks))
    found = "nothing fits" if not fastest[1] else f"{format_duration(fastest[0])} on {fastest[1]:,} GPUs"
    raise PlanError(
        f"no number of GPUs that was tried is done in {days:g} days.",
        got=f"the quickest: {found}",
        why=f"tried are {MOST_TIMES} times as many as would do if only kernels took time",
        fix="more days, or more tokens a step (--tokens-per-step), which more GPUs can share",
    )


def _iterate_sizes(ranks_per_node: int) -> Iterator[tuple[int, int]]:
    """Yields (nodes, ranks per node): parts of a node, then whole nodes."""
    yield from ((1, part) for part in divisors(ranks_per_node))
    yield from ((nodes, ranks_per_node) for nodes in range(2, MOST_RANKS // ranks_per_node + 1))


def least_rank_seconds_per_token(spec: ModelSpec, hardware: Hardware) -> float:
    """Returns a lower bound on the seconds of one rank for each token: its FLOP at the highest rates."""
    shared, rates = spec.tensor_parallel * spec.context_parallel, hardware.rates_at_world_size
    curves = (rates.attention_by_head_dim, rates.attention_backward_by_head_dim, rates.flash_by_head_dim)
    curves = (*curves, rates.flash_backward_by_head_dim)
    widest = max(1.0, *(point.rate for curve in curves for point in curve or ()))
    found: list[float] = []
    for trace in spec.traces:
        for microbatch in (1, 1024) if trace.microbatch is None else (trace.microbatch,):
            seconds = 0.0
            for phase in trace.phases:
                inside = (r.times for r in trace.repeats if r.first <= phase.unit < r.first + r.units)
                times = next(inside, 1)
                for launch in phase.work:
                    kernel = spec.kernels[launch.kernel]
                    if kernel.kind in ("matmul", "attention", "attention_backward"):
                        curve = nearest_dtype_rate_curve(getattr(rates, kernel.kind), kernel.dtype)
                        flops = times * launch.times * kernel.flops.value_at(microbatch)
                        seconds += flops / (widest * max(point.rate for point in curve))
            found.append(seconds * shared / (microbatch * spec.sequence_length))
    return min(found)
