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
              E ranks wait for the fullest of them: see [Note: uneven routing] in `planner.uneven_routing`.
computing     as with E = 1, but for rows that come to the fullest rank.
"""

from collections.abc import Sequence

from fullshard.planner.predict.collectives import (
    Collective,
    CollectiveLayout,
    all_to_all_seconds,
    collective_seconds,
    replicate_group_layout,
)
from fullshard.planner.predict.collectives import shard_group_layout as consecutive_group_layout
from fullshard.planner.predict.uneven_routing import fullest_rank_factor
from fullshard.planner.predict.unit_costs import to_ticks
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import KernelKind, ModelSpec, SharedAxis, TracePhase
from fullshard.spec.plan import Plan

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
