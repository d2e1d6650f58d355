"""How much more than the mean the fullest rank has to do where ranks divide the experts of a mixture.

[Note: uneven routing]
Routers spread tokens unevenly over experts. Of the rows of one expert, in all that E ranks exchange for one
layer, c is the standard deviation, over their mean (`ModelSpec.routing_spread`). Each rank has m experts, so
its own rows have a deviation of c / sqrt(m). In each layer, all ranks wait for the fullest of them, which has

    F = 1 + c / sqrt(m) · z(E)      times the mean

rows on average, for z(n), the expected largest of n standard normal numbers, and z(1) = 0 (Blom, "Statistical
Estimates and Transformed Beta-Variables", 1958). So work on the rows that come to experts, and the exchanges
of these rows, take F times as long as with even routing. Few experts per rank, and many ranks, make F large.

A rank that is the fullest in one layer is not in the next, so rows that are kept of many layers are about as
many as the mean. Those of the layer that computes are the most, over L layers, that any of E ranks gets:

    c / sqrt(m) · z(E L)            times the mean, in addition

with their gradients. Experts are assumed to be chosen independently of each other, and ranks to be as full in
one microbatch as in the next.
"""

from math import sqrt
from statistics import NormalDist

from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import ITEMSIZE, Plan


def fullest_rank_excess(spread: float, *, ranks: int, experts_per_rank: float, layers: int = 1) -> float:
    """Returns by how much the rows of the fullest of `ranks` ranks exceed the mean, as a fraction of it.

    spread: standard deviation of one expert's rows, over their mean
    layers: number of layers of which it is the fullest
    """
    draws = ranks * layers if ranks > 1 else 1
    largest = NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))
    return spread * largest / sqrt(experts_per_rank)


def fullest_rank_factor(spec: ModelSpec, plan: Plan) -> float:
    """Returns the rows of the fullest rank over the mean, in one layer; 1 if ranks divide no experts."""
    return 1 + _excess(spec, plan)


def uneven_rows_bytes(spec: ModelSpec, plan: Plan) -> int:
    """Returns the bytes of rows, and of their gradients, that the fullest rank has beyond the mean.

    Each row of a layer is counted as input and as output of each matrix of its expert, and once more each for
    the gradients. See [Note: uneven routing].
    """
    experts = [unit for unit in spec.units if unit.has_experts]
    excess = _excess(spec, plan, layers=len(experts))
    if not excess:
        return 0
    rows = max(
        kernel.rows.value_at(plan.microbatch) * kernel.pieces.value_at(plan.microbatch)
        for kernel in spec.kernels
    )
    widths = max(sum(sum(p.shape[1:]) for p in unit.parameters if len(p.shape) == 3) for unit in experts)
    return round(excess * 2 * rows * widths * ITEMSIZE[plan.precision.param])


def _excess(spec: ModelSpec, plan: Plan, *, layers: int = 1) -> float:
    ranks = plan.expert_parallel
    if ranks == 1:
        return 0.0
    share = spec.experts / ranks
    return fullest_rank_excess(spec.routing_spread, ranks=ranks, experts_per_rank=share, layers=layers)
