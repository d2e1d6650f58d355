"""FSDP2 without its copies, for units that no rank shards (shard degree 1).

To gather such a unit, FSDP2 casts its parameters into a temporary tensor and copies that into the unsharded
parameters. To reduce it, FSDP2 copies all gradients into one buffer, copies that buffer, and waits for its
all-reduce over the replicas. Here:

unshard   The parameters are used where they are, or cast into the unsharded parameters directly.
reduce    The gradients are copied into one buffer in the reduce dtype, which is all-reduced and becomes the
          gradients of the shards. The all-reduce runs beside the rest of backward, which waits for it at its
          end; with an optimizer in backward, which frees gradients early, at once. Over one replica nothing
          is copied: autograd's gradients become those of the shards, cast if the reduce dtype differs.
no sync   Gradients of microbatches that are not the step's last stay as they are, in the reduce dtype.

`MergedUnitSettings.skips_copies` says which units this applies to; their memory is predicted accordingly.

The profiler's ranges have the names of FSDP2's; `profiler.trace` finds the wait as `fullshard::all_reduce`.
Names with a leading underscore are private ones of FSDP2.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function


def skip_copies(unit: FSDPModule) -> None:
    """Makes FSDP2 use and reduce the parameters of `unit`, whose shard degree is 1, without its copies."""
    group: Any = unit._get_fsdp_state()._fsdp_param_group  # pyright: ignore[reportPrivateUsage]
    if group is not None:
        _UnshardedUnit(group).replace_methods()


class _UnshardedUnit:
    """Methods that replace those of one of FSDP2's parameter groups."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.all_reduce: dist.Work | None = None  # the one that runs
        self.reduced: list[tuple[Any, Tensor]] = []  # FSDP2's parameter, its gradient in the reduce dtype
        self.finalize = group.finalize_backward

    def replace_methods(self) -> None:
        self.group.wait_for_unshard = self._use_own_shards
        self.group.post_backward = self._reduce_gradients
        self.group.finalize_backward = self._finish_reduction_and_finalize

    def _use_own_shards(self) -> None:
        group = self.group
        if group._all_gather_result is None:
            return  # unsharded already
        group._all_gather_result = None
        for parameter in group.fsdp_params:
            if parameter.param_dtype is None:
                _use_in_place(parameter)
            else:
                _cast_into_unsharded_parameter(parameter)
        group._to_unsharded()

    def _reduce_gradients(self, *unused: Any) -> None:
        """Starts the reduction of the unit's gradients, or keeps them for a later microbatch."""
        group, replicas = self.group, _replica_group(self.group)
        group._training_state = type(group._training_state).POST_BACKWARD
        self._finish_reduction()  # of a backward that was not the last of its step
        with record_function("FSDP::post_backward_accumulate"):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
        pairs = list[tuple[Any, Tensor]]()
        with record_function("FSDP::post_backward_reshard"):
            if syncs := group.reduce_grads and (group.all_reduce_grads or replicas is None):
                pairs = _pop_gradients(group.fsdp_params)
            if group.reshard_after_backward:
                group.reshard()
            for parameter in () if syncs else group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.to_accumulated_grad_if_needed()
        if not pairs:
            return
        with record_function("FSDP::post_backward_reduce"):
            self._start_reduction(pairs, replicas)
            if replicas is None or any(p.sharded_param._post_accumulate_grad_hooks for p, _ in self.reduced):
                self._finish_reduction()

    def _start_reduction(self, pairs: list[tuple[Any, Tensor]], replicas: dist.ProcessGroup | None) -> None:
        """Starts the all-reduce of the gradients of `pairs` over `replicas`, and empties the list."""
        group = self.group
        dtype = group._reduce_dtype or pairs[0][1].dtype
        if replicas is None:
            while pairs:
                parameter, gradient = pairs.pop(0)
                own = _own_copy(gradient) if gradient.dtype == dtype else gradient.to(dtype)
                self.reduced.append((parameter, _divide(own, group.gradient_divide_factor)))
            return
        gradients = [gradient for _, gradient in pairs]
        sizes = [g.numel() for g in gradients]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=gradients[0].device)
        parts = [part.view_as(g) for part, g in zip(buffer.split(sizes), gradients, strict=True)]
        torch._foreach_copy_(parts, gradients)  # pyright: ignore[reportPrivateUsage]
        self.reduced = [(parameter, part) for (parameter, _), part in zip(pairs, parts, strict=True)]
        pairs.clear()
        factor, op = group.gradient_divide_factor, dist.ReduceOp.AVG
        if factor is not None or dtype not in (torch.float32, torch.bfloat16):
            # Divided before the sum, since fp16 could overflow.
            op, buffer = dist.ReduceOp.SUM, _divide(buffer, factor or dist.get_world_size(replicas))
        self.all_reduce = dist.all_reduce(buffer, op=op, group=replicas, async_op=True)

    def _finish_reduction(self) -> None:
        """Waits for the all-reduce, and sets the gradients of the unit's sharded parameters."""
        if self.all_reduce is not None:
            with record_function("fullshard::all_reduce"):
                self.all_reduce.wait()
            self.all_reduce = None
        while self.reduced:
            parameter, value = self.reduced.pop(0)
            sharded = parameter.sharded_param
            gradient = value.to(parameter.orig_dtype)
            if sharded.grad is None:
                sharded.grad = parameter.to_sharded_dtensor(gradient)
            else:
                sharded.grad._local_tensor += gradient
            del value, gradient
            for hook in (sharded._post_accumulate_grad_hooks or {}).values():
                hook(sharded)

    def _finish_reduction_and_finalize(self) -> None:
        self._finish_reduction()
        self.finalize()


def _replica_group(group: Any) -> dist.ProcessGroup | None:
    """Returns the process group of the replicas; None for a single replica."""
    if not hasattr(group.mesh_info, "replicate_process_group"):
        return None
    replicas = group._all_reduce_process_group
    return replicas if dist.get_world_size(replicas) > 1 else None


def _use_in_place(parameter: Any) -> None:
    """Makes the unsharded parameter a view of the shard, which is the whole parameter."""
    shard, existing = parameter._sharded_param_data, getattr(parameter, "_unsharded_param", None)
    if existing is not None:
        existing = getattr(existing, "_local_tensor", existing)
        if existing.untyped_storage()._cdata == shard.untyped_storage()._cdata:
            return
        del parameter._unsharded_param  # the shard's tensor was replaced
    parameter.all_gather_outputs = [shard]
    parameter.init_unsharded_param()
    parameter.all_gather_outputs = []  # FSDP2 frees these


def _cast_into_unsharded_parameter(parameter: Any) -> None:
    shard = parameter._sharded_param_data
    parameter.init_all_gather_outputs([shard.numel()], [parameter.param_dtype], 1, shard.device)
    parameter.alloc_all_gather_outputs()
    (whole,) = parameter.all_gather_outputs
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):  # pyright: ignore[reportPrivateUsage]
        whole.copy_(shard)
    parameter.init_unsharded_param()


def _pop_gradients(parameters: Sequence[Any]) -> list[tuple[Any, Tensor]]:
    """Returns the parameters that have an unsharded gradient, each with it, and removes these gradients."""
    found = list[tuple[Any, Tensor]]()
    for parameter in parameters:
        if not hasattr(parameter, "_unsharded_param"):
            continue
        if parameter.unsharded_accumulated_grad is not None:
            found.append((parameter, parameter.unsharded_accumulated_grad_data))
            parameter.unsharded_accumulated_grad = None
        elif parameter.unsharded_param.grad is not None:
            found.append((parameter, parameter.unsharded_grad_data))
            parameter.unsharded_param.grad = None
    return found


def _divide(gradient: Tensor, factor: float | None) -> Tensor:
    return gradient if factor in (None, 1) else gradient.div_(factor)


def _own_copy(gradient: Tensor) -> Tensor:
    """Returns `gradient`, or a copy if other tensors share its memory."""
    storage = gradient.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportPrivateUsage]
    is_shared = count > 2  # `gradient`, and `storage` itself
    return gradient.clone() if is_shared else gradient
