"""Expert-parallel axis: E adjacent ranks have 1/E of the experts of each layer.

[Note: expert parallel]
b: sequences per microbatch, s: tokens of a sequence on a rank, k: experts per token, d: width of the model.

parameters    each rank has 1/E of the experts, sharded over the world / E ranks that have the same ones.
exchanges     k b s d values per layer, which a rank sends and receives twice in forward and twice in
              backward, and twice more if forward is recomputed; (E - 1) / E of them go to other ranks.
              Before them, one per forward of a few numbers. Computing waits for each.
computing     as without the axis: ranks are assumed to get as many rows as they send. Whoever gets more
              computes longer, and needs more memory, in proportion.

The trace of such a plan is that of one rank, with its experts and exchanges.
"""

from collections.abc import Sequence

from fullshard.planner.collectives import all_to_all_seconds, shard_group_layout
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec, TracePhase
from fullshard.spec.plan import Plan


def expert_seconds_by_phase(
    spec: ModelSpec, phases: Sequence[TracePhase], *, plan: Plan, hardware: Hardware
) -> list[float]:
    """Returns the seconds of the exchanges of ranks that divide experts, in each phase."""
    ranks, per_node = plan.expert_parallel, hardware.ranks_per_node
    if ranks == 1:
        return [0.0] * len(phases)
    group = shard_group_layout(ranks, per_node=per_node, world_size=plan.world_size)
    return [
        sum(
            times * all_to_all_seconds(kernel.bytes.value_at(plan.microbatch), group=group, hardware=hardware)
            for kernel, times in ((spec.kernels[one.kernel], one.times) for one in phase.work)
            if kernel.kind == "row_exchange"
        )
        for phase in phases
    ]
