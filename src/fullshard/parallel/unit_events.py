"""Records which units FSDP2 gathers and reduces, keeps sums over replicas complete, and sees lost changes.

[Note: changes in forward]
Modules compute with a gathered copy of their parameters, which is dropped or gathered again behind forward.
So a change that forward makes (a clamp, a codebook that follows its inputs) would be lost. Torch counts
the changes of a tensor in place, except those of its `data`; on CPU ranks, where the host waits for nothing,
the values are compared in the first forward.

[Note: gathered after a validation]
FSDP2 leaves units gathered behind a forward without gradients: the root, and all units with strategies other
than full_shard. `model.parameters()` then are gathered copies: values and `requires_grad` that the loop sets
would be lost, and an optimizer would get the copies. So such a forward reshards the model, except in the loss
of a step, and unless a backward is still to come, which may need the gathered units.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.tensors import storage_key
from fullshard.distributed.unit_order import (
    UnitAndParameterNames,
    UnitOrderRecorder,
    find_unit_order_recorder,
)
from fullshard.errors import ShardError, TrainError
from fullshard.quantities import join_names
from fullshard.torch_private.fsdp import (
    cast_late_gradients_to_kept_dtype,
    list_units,
    parameter_groups,
    pending_gather,
    unsharded_parameter_or_none,
)
from fullshard.torch_private.tensors import local_part, storage_id, tree_leaves, version


def check_parameters_not_replaced(model: nn.Module) -> None:
    """Raises ShardError for parameters (not scalars) added or replaced after `shard`, or whose `data` was."""
    known = {} if (order := find_unit_order_recorder(model)) is None else order.shards
    changed = list[str]()
    for name, one in model.named_parameters() if known else ():
        storage, local, _ = known.get(one, (None, lambda: None, False))
        # `data = …` replaces the storage and leaves the local part; `model.to(…)` replaces both.
        is_kept = storage is not None and (
            storage_id(storage) == storage_key(one) or local() is not local_part(cast(DTensor, one))
        )
        changed += [] if one.ndim == 0 or is_kept else [name]
    if changed:
        raise ShardError(
            "the model has parameters that are not those that were sharded.",
            got=join_names(changed),
            why="shards would keep their old values, and each rank would train new parameters for itself",
            fix="new modules before fullshard.shard; new values in place, without gradients: p.copy_(value)",
        )


def install_reshard_after_evaluation(model: nn.Module, order: UnitOrderRecorder) -> None:
    """Makes forwards without gradients reshard `model`. See [Note: gathered after a validation].

    Notes the shards for `check_parameters_not_replaced`, which these forwards call.
    """
    sharded = [one for one in model.parameters() if isinstance(one, DTensor)]
    order.shards = {
        one: (one.untyped_storage(), weakref.ref(local_part(one)), one.requires_grad) for one in sharded
    }

    def reshard(_model: nn.Module, _args: Any, output: Any) -> None:  # signature: torch's hook
        if torch.is_grad_enabled():
            leaves = tree_leaves(output)
            order.awaits_backward |= any(isinstance(one, Tensor) and one.requires_grad for one in leaves)
            return
        is_backward_to_come = order.awaits_backward and not order.is_trained
        if not (is_backward_to_come or order.is_in_loss or order.is_evaluated):
            reshard_unsharded_units(model)

    def check_before_evaluation(_model: nn.Module, _args: Any) -> None:  # signature: torch's hook
        groups = (group for unit in list_units(model) for group in parameter_groups(unit))
        if not (torch.is_grad_enabled() or any(group.is_unsharded for group in groups)):
            check_parameters_not_replaced(model)

    model.register_forward_hook(reshard)
    # Before FSDP2's hook, which drops new parameters.
    model.register_forward_pre_hook(check_before_evaluation, prepend=True)


def reshard_unsharded_units(model: nn.Module) -> None:
    """Reshards units that a forward without backward left unsharded."""
    for unit in list_units(model):
        unit.reshard()


def install_unit_recording_and_checks(
    modules: Sequence[nn.Module], *, unit: int, name: str, order: UnitOrderRecorder
) -> UnitAndParameterNames:
    """Makes FSDP2 note in `order` what it does for the unit of `modules`. Returns the names of the unit.

    The unit then raises ShardError in a forward that changes its parameters. See [Note: changes in forward].

    unit, name: the unit's number and name
    """
    own = {id(p): key for module in modules for key, p in module.named_parameters()}
    parameters: list[str] = []
    for group in parameter_groups(cast(FSDPModule, modules[0])):
        names = [own.get(id(one.sharded_param), str(i)) for i, one in enumerate(group.fsdp_params)]
        parameters += names
        _install_gather_recording(group, unit=unit, order=order)
        _install_reduction_completion(group, unit=unit, order=order)
        _install_check_of_changes_in_forward(group, names)
    return UnitAndParameterNames(name, parameters)


def _install_gather_recording(group: Any, *, unit: int, order: UnitOrderRecorder) -> None:
    if getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
        return  # nothing is gathered
    unshard = group.unshard

    def recorded_unshard(*args: Any, **kwargs: Any) -> None:  # signature: FSDP2's
        before = pending_gather(group)
        unshard(*args, **kwargs)
        if pending_gather(group) is not before:
            order.note_gather(unit)

    group.unshard = recorded_unshard


def _install_check_of_changes_in_forward(group: Any, names: Sequence[str]) -> None:
    """Makes forward raise ShardError if it changes a parameter in place. See [Note: changes in forward]."""
    pre_forward, post_forward = group.pre_forward, group.post_forward
    before, sums_before, is_first = list[int](), list[Tensor | None](), True

    def pre_forward_noting_versions(*args: Any, **kwargs: Any) -> Any:  # signature: FSDP2's
        nonlocal before, sums_before
        result = pre_forward(*args, **kwargs)
        values = [unsharded_parameter_or_none(one) for one in group.fsdp_params]
        before = [_version_or_zero(value) for value in values]
        sums_before = [_sum_of_bits(value) for value in values] if is_first else []
        return result

    def post_forward_raising_if_changed(*args: Any, **kwargs: Any) -> Any:  # signature: FSDP2's
        nonlocal before, sums_before, is_first
        values = [unsharded_parameter_or_none(one) for one in group.fsdp_params]
        counts, before = before, []
        changed = [i for i, count in enumerate(counts) if _version_or_zero(values[i]) != count]
        for i, earlier in enumerate(sums_before):
            now = _sum_of_bits(values[i])
            if earlier is not None and now is not None and not torch.equal(earlier, now):
                changed.append(i)
        sums_before, is_first = [], is_first and not sums_before
        if changed:
            raise ShardError(
                "forward changes a parameter in place.",
                got=", ".join(dict.fromkeys(names[i] for i in changed)),
                why="it computes with a gathered copy of the shards, which is dropped behind it",
                fix="a buffer in place of the parameter, or a change of the sharded parameter between steps",
            )
        return post_forward(*args, **kwargs)

    group.pre_forward, group.post_forward = pre_forward_noting_versions, post_forward_raising_if_changed


def _version_or_zero(value: Tensor | None) -> int:
    return 0 if value is None or value.is_inference() else version(value)


def _sum_of_bits(value: Tensor | None) -> Tensor | None:
    if value is None or type(value.data) is not torch.Tensor or not value.is_cpu:
        return None
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers.get(value.element_size())
    return None if kind is None else value.detach().view(kind).sum(dtype=torch.int64)


def _install_reduction_completion(group: Any, *, unit: int, order: UnitOrderRecorder) -> None:
    """Notes the unit's reductions, and completes its sums over replicas.

    FSDP2 keeps what it has reduced over shards, but not over replicas, in one tensor, and adds to it in the
    next microbatch. If a parameter or a whole unit has no gradient in one of the microbatches, it would add
    up different parameters, or leave the sum for the next step. So such a tensor always holds all trained
    parameters.
    """
    post_backward = group.post_backward
    has_replicas = hasattr(group.mesh_info, "replicate_process_group")
    sums_later = False  # whether a sum over shards waits to be summed over replicas

    def post_backward_completing_sums(*args: Any) -> None:  # signature: FSDP2's
        nonlocal sums_later
        if order.is_in_loss:
            raise TrainError(
                "the loss function ran a backward pass of its own.",
                why="its gradient is not divided by the number of microbatches and tokens, nor scaled for "
                "fp16, and the loss that is reported lacks it",
                fix="a loss function that returns the sum of all terms, whose backward the step runs",
            )
        if not group.reduce_grads:
            post_backward(*args)
            return
        cast_late_gradients_to_kept_dtype(group)
        has_some, without, frozen = _has_gradients_and_missing_and_frozen(group)
        sums_now = group.all_reduce_grads
        if sums_later and without and (has_some or sums_now):
            for index in without:
                value = unsharded_parameter_or_none(group.fsdp_params[index])
                assert value is not None, "its gradient was missed"
                value.grad = torch.zeros_like(value)
            has_some, without = True, []
        if not has_some:
            post_backward(*args)
            return
        order.note_reduction(unit, without=[*without, *frozen])
        group.all_reduce_grads = sums_now or bool(without)
        sums_later = has_replicas and not group.all_reduce_grads
        # On the host, FSDP2 waits for the sum over replicas without a range of its own.
        sums = (
            TimedRange("all_reduce", name="reduction") if has_replicas and not sums_later else nullcontext()
        )
        with sums:
            post_backward(*args)
        group.all_reduce_grads = sums_now

    group.post_backward = post_backward_completing_sums


def _has_gradients_and_missing_and_frozen(group: Any) -> tuple[bool, list[int], list[int]]:
    """Returns whether a unit has gradients to reduce, which trained parameters have none, and the frozen."""
    has_some, without, frozen = False, list[int](), list[int]()
    takes_zeros = getattr(group, "reduce_scatter_unused_params", False)
    for index, parameter in enumerate(group.fsdp_params):
        value = unsharded_parameter_or_none(parameter)
        if value is None or not value.requires_grad:
            frozen.append(index)
        elif takes_zeros or value.grad is not None or parameter.unsharded_accumulated_grad is not None:
            has_some = True
        else:
            without.append(index)
    return has_some, without, frozen
