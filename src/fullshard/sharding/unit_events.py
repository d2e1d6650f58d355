"""Records which units FSDP2 gathers and reduces, and keeps sums over replicas complete."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.unit_order import UnitNames, UnitOrder
from fullshard.torch_private.fsdp import gathered_parameter, parameter_groups, pending_gather


def record_unit_events(modules: Sequence[nn.Module], *, unit: int, name: str, order: UnitOrder) -> UnitNames:
    """Makes FSDP2 note in `order` what it does for the unit of `modules`. Returns the names of the unit.

    unit, name: the unit's number and name
    """
    own = {id(p): key for module in modules for key, p in module.named_parameters()}
    groups = parameter_groups(cast(FSDPModule, modules[0]))
    for group in groups:
        _record_gathers(group, unit=unit, order=order)
        _record_reductions(group, unit=unit, order=order)
    parameters = [
        own.get(id(one.sharded_param), str(i)) for g in groups for i, one in enumerate(g.fsdp_params)
    ]
    return UnitNames(name, parameters)


def _record_gathers(group: Any, *, unit: int, order: UnitOrder) -> None:
    if getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
        return  # nothing is gathered
    unshard = group.unshard

    def recorded_unshard(*args: Any, **kwargs: Any) -> None:  # signature: FSDP2's
        before = pending_gather(group)
        unshard(*args, **kwargs)
        if pending_gather(group) is not before:
            order.note_gather(unit)

    group.unshard = recorded_unshard


def _record_reductions(group: Any, *, unit: int, order: UnitOrder) -> None:
    """Notes the unit's reductions, and completes its sums over replicas.

    FSDP2 keeps what it has reduced over shards, but not over replicas, in one tensor, and adds to it in the
    next microbatch. If a parameter or a whole unit has no gradient in one of the microbatches, it would add
    up different parameters, or leave the sum for the next step. So such a tensor always holds all trained
    parameters.
    """
    post_backward = group.post_backward
    has_replicas = hasattr(group.mesh_info, "replicate_process_group")
    sums_later = False  # whether a sum over shards waits to be summed over replicas

    def recorded_post_backward(*args: Any) -> None:  # signature: FSDP2's
        nonlocal sums_later
        if not group.reduce_grads:
            post_backward(*args)
            return
        has_some, without = _find_missing_gradients(group)
        sums_now = group.all_reduce_grads
        if sums_later and without and (has_some or sums_now):
            _set_zero_gradients(group, without)
            has_some, without = True, []
        if not has_some:
            post_backward(*args)
            return
        order.note_reduction(unit, without=without)
        group.all_reduce_grads = sums_now or bool(without)
        sums_later = has_replicas and not group.all_reduce_grads
        post_backward(*args)
        group.all_reduce_grads = sums_now

    group.post_backward = recorded_post_backward


def _find_missing_gradients(group: Any) -> tuple[bool, list[int]]:
    """Returns whether a unit has gradients to reduce, and which of its trained parameters have none."""
    has_some, without = False, list[int]()
    takes_zeros = getattr(group, "reduce_scatter_unused_params", False)
    for index, parameter in enumerate(group.fsdp_params):
        value = gathered_parameter(parameter)
        if value is None or not value.requires_grad:
            continue
        if takes_zeros or value.grad is not None or parameter.unsharded_accumulated_grad is not None:
            has_some = True
        else:
            without.append(index)
    return has_some, without


def _set_zero_gradients(group: Any, indices: Sequence[int]) -> None:
    for index in indices:
        value = gathered_parameter(group.fsdp_params[index])
        assert value is not None, "its gradient was missed"
        value.grad = torch.zeros_like(value)
