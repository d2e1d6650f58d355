"""Seconds of the collectives of ranks that share sequences or matmuls, or divide experts.

The trace of such a plan is that of one rank: its activations, its share of the matmuls and of the pairs that
attention computes, and its collectives, with the bytes of the tensor of all ranks. Computing waits for each.
An all-to-all of a tensor moves as many bytes per rank as an all-gather whose result has that size; if the
rate of all-to-alls was not measured, it is assumed to take as long as this all-gather.

Left out: one all-reduce per step of the gradients of parameters that are whole on ranks which share matmuls
(norms), a few kilobytes per block.

[Note: expert parallel]
E: ranks that divide the experts of a layer, b: sequences per microbatch, s: tokens of a sequence on a rank,
k: experts per token, d: width of the model.

parameters    each rank has 1/E of the experts, sharded over the world / E ranks that have the same ones.
exchanges     k b s d values per layer, which a rank sends and receives twice in forward and twice in
              backward, and twice more if forward is recomputed; (E - 1) / E of them go to other ranks.
              Before them, one per forward of a few numbers. Computing waits for each.
              E ranks wait for the fullest of them: see [Note: uneven routing].
computing     as with E = 1, but for rows that come to the fullest rank.

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

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist

from fullshard.planner.predict.collectives import (
    Collective,
    CollectiveLayout,
    all_to_all_seconds,
    collective_seconds,
    replicate_group_layout,
)
from fullshard.planner.predict.collectives import shard_group_layout as consecutive_group_layout
from fullshard.planner.predict.unit_costs import to_ticks
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import KernelKind, ModelSpec, SharedAxis, TracePhase
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


_RATES: dict[KernelKind, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}


def model_parallel_ticks(
    spec: ModelSpec, phases: Sequence[TracePhase], *, plan: Plan, hardware: Hardware
) -> tuple[int, ...]:
    """Returns the ticks of the collectives among ranks that share work, in each phase."""
    groups = _layouts_by_axis(plan, hardware)
    received = fullest_rank_factor(spec, plan)

    def seconds(index: int) -> float:
        kernel = spec.kernels[index]
        if kernel.axis is None:
            return 0.0
        size, group = kernel.bytes.value_at(plan.microbatch), groups[kernel.axis]
        if kernel.kind == "row_exchange":
            return all_to_all_seconds(received * size, group=group, hardware=hardware)
        return collective_seconds(_RATES[kernel.kind], size, group=group, hardware=hardware)

    return tuple(to_ticks(sum(times * seconds(index) for index, times in phase.work)) for phase in phases)


def _layouts_by_axis(plan: Plan, hardware: Hardware) -> dict[SharedAxis, CollectiveLayout]:
    """Returns the placement on nodes of the ranks of each axis. Those that share matmuls are adjacent."""
    per_node, tensor, context = hardware.ranks_per_node, plan.tensor_parallel, plan.context_parallel

    def adjacent(ranks: int) -> CollectiveLayout:
        return consecutive_group_layout(ranks, per_node=per_node, world_size=plan.world_size)

    apart = replicate_group_layout(context, tensor, per_node=per_node)
    return {
        "tensor": adjacent(tensor),
        "context": adjacent(context) if tensor == 1 else apart,
        "expert": adjacent(plan.expert_parallel),
    }
