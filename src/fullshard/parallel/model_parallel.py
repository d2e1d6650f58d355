"""Applies every division of a plan to a model: its sequences, its matmuls and its experts."""

from collections.abc import Callable

from torch import nn

from fullshard.parallel.context_parallel import use_context_parallel
from fullshard.parallel.expert_parallel import use_expert_parallel
from fullshard.parallel.tensor_parallel import use_tensor_parallel
from fullshard.spec.model import SharedAxis
from fullshard.spec.plan import Plan


def divide_model(
    model: nn.Module, plan: Plan, *, rank: int, group_name: Callable[[SharedAxis], str]
) -> dict[str, int | None]:
    """Makes `model` compute as global rank `rank` of `plan` does. Returns the divided dims of its parameters.

    The dims are keyed by parameter name; the parameters themselves are divided when the model is sharded. An
    empty result means that none are.

    group_name: returns the name of this rank's process group of an axis; all ranks call it for the same axes
        in the same order

    Raises ShardError and PlanError as `use_context_parallel`, `use_tensor_parallel` and `use_expert_parallel`
    do.
    """
    dims = dict[str, int | None]()
    if plan.context_parallel > 1:
        use_context_parallel(model, plan, rank=rank, group=group_name("context"))
    if plan.tensor_parallel > 1:
        dims |= use_tensor_parallel(model, plan, rank=rank, group=group_name("tensor"))
    if plan.has_expert_mesh:
        dims |= use_expert_parallel(
            model, plan, group=group_name("expert") if plan.expert_parallel > 1 else ""
        )
    return dims
