"""Context-parallel axis: seconds of the collectives of ranks that share sequences.

The trace of such a plan is that of one rank: its activations, its share of the matmuls and of the pairs that
attention computes, and its collectives, with the bytes that they move. Computing waits for each. An
all-to-all of a tensor moves as many bytes per rank as an all-gather whose result has its size; it is assumed
to take as long (not measured).
"""

from collections.abc import Sequence

from fullshard.planner.collectives import Collective, collective_seconds, replicate_group_layout
from fullshard.planner.collectives import shard_group_layout as consecutive_group_layout
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec, TracePhase
from fullshard.spec.plan import Plan

_RATES: dict[str, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_gather",
}


def context_seconds_by_phase(
    spec: ModelSpec, phases: Sequence[TracePhase], *, plan: Plan, hardware: Hardware
) -> list[float]:
    """Returns the seconds of the collectives of ranks that share sequences, in each phase."""
    ranks, per_node, apart = plan.context_parallel, hardware.ranks_per_node, plan.tensor_parallel
    if ranks == 1:
        return [0.0] * len(phases)
    group = (
        consecutive_group_layout(ranks, per_node=per_node, world_size=plan.world_size)
        if apart == 1
        else replicate_group_layout(ranks, apart, per_node=per_node)
    )
    return [
        sum(
            times
            * collective_seconds(
                _RATES[kernel.kind],
                kernel.bytes.value_at(plan.microbatch) / apart,  # ranks that share matmuls divide the heads
                group=group,
                hardware=hardware,
            )
            for kernel, times in ((spec.kernels[one.kernel], one.times) for one in phase.work)
            if kernel.kind in _RATES
        )
        for phase in phases
    ]
