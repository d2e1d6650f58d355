"""FSDP2 without its copies, for units that no rank shards (shard degree 1).

To gather such a unit, FSDP2 casts its parameters into a temporary tensor and copies that into the unsharded
parameters. To reduce it, FSDP2 copies all gradients into one buffer, copies that buffer, and waits for its
all-reduce over the replicas. Here:

unshard   The parameters are used where they are, or cast into the unsharded parameters directly.
reduce    Consecutive units share a buffer in the reduce dtype (see `bucket_slices`), which stays
          allocated from step to step, as DDP's buckets do. The gradients of each microbatch are added to it,
          divided by the number of replicas. In the last microbatch, its all-reduce runs beside the rest of
          backward, which waits for it at its end. The buffer then is the gradients of the shards, which are
          cast if the reduce dtype is not the master dtype.
          Replicas on the CPU of one host have their buffers in memory that they share, from the second step
          on, and add them up at the end of backward: through sockets, an all-reduce costs more processor
          time, and no processor is idle beside backward.
          With an optimizer in backward, which frees gradients early, each unit has a buffer of its own for a
          moment, and waits for its all-reduce at once.
one rank  Over one replica nothing is copied: autograd's gradients become those of the shards, cast if the
          reduce dtype differs. Those of earlier microbatches wait in the reduce dtype.

All ranks start the same all-reduces in the same order, whatever order their backward takes. A parameter
without a gradient on a rank counts as zeros there, and has no gradient afterwards if no rank had one.

`MergedUnitSettings.skips_copies` says which units this applies to; their memory is predicted accordingly.

The profiler's ranges have the names of FSDP2's; `profiler.trace` finds the wait as `fullshard::all_reduce`.
Names with a leading underscore are private ones of FSDP2.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from fullshard.distributed.host_memory import HostBuffers, all_reduce_on_host
from fullshard.distributed.ranges import TimedRange
from fullshard.spec.groups import bucket_slices

_current_backward = torch._C._current_graph_task_id  # pyright: ignore[reportPrivateUsage]


class GradientBuckets:
    """The buffers in which a model's unsharded units are all-reduced over their replicas.

    is_immediate: whether each unit is reduced by itself, and its gradients are used and freed at once
    """

    def __init__(self, *, is_immediate: bool) -> None:
        self.is_immediate = is_immediate
        self.units: list[_UnshardedUnit] = []
        self._bucket_of: dict[_UnshardedUnit, _Bucket] = {}
        self._order: list[_Bucket] = []  # in which all ranks start them
        self._late: dict[_UnshardedUnit, _Bucket] = {}  # gradients that came after the unit's bucket started
        self._trained: list[list[Any]] = []  # of each unit, when the buckets were made
        self._is_filling = self._reduces = False
        self._started = 0  # number of buckets in `_order`
        self._shares_memory = False  # whether sharing memory was tried for the buckets in `_order`

    def skip_copies(self, unit: FSDPModule, *, position: int) -> None:
        """Makes FSDP2 use and reduce the parameters of `unit`, whose shard degree is 1, without its copies.

        position: of the unit's first module, in the order of registration
        """
        group: Any = unit._get_fsdp_state()._fsdp_param_group  # pyright: ignore[reportPrivateUsage]
        if group is not None:
            self.units.append(_UnshardedUnit(group, self, position=position))
            self.units.sort(key=lambda unit: unit.position)

    def finish_at_end_of_backward(self, model: nn.Module) -> None:
        """Makes the end of each backward of `model` wait for the all-reduces. Called after `skip_copies`.

        The model's `gradient_buffers()` then returns the buffers, for those who measure memory.
        """
        if not self.units:
            return
        cast(Any, model).gradient_buffers = self.buffers
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
                end = state._root_post_backward_final_callback
                state._root_post_backward_final_callback = partial(self._finish_after, end)

    def add_gradients(
        self, unit: "_UnshardedUnit", pairs: list[tuple[Any, Tensor]], *, reduces: bool
    ) -> None:
        """Adds the gradients of `pairs` to the unit's bucket, and empties the list.

        reduces: whether this is the step's last microbatch; then buckets that have all of their units start
        """
        if not self._is_filling:
            self._make_buckets()
        self._reduces |= reduces
        if not pairs:
            return
        bucket = self._bucket_of[unit]
        if bucket.is_started:
            bucket = self._late.setdefault(unit, _Bucket([unit]))
        bucket.add(unit, pairs)
        if reduces and self.is_immediate:
            bucket.start()
            bucket.finish(keeps_buffer=False)
        elif reduces:
            bucket.missing.discard(unit)
            while self._started < len(self._order) and not self._order[self._started].missing:
                self._start_next()

    def buffers(self) -> list[Tensor]:
        """Returns the buffers that are allocated."""
        return [bucket.buffer for bucket in self._order if bucket.buffer is not None]

    def _finish_after(self, end: Callable[[], None]) -> None:
        """Ends a backward: calls `end`, reduces what is left, and sets the gradients of the shards."""
        end()
        if not self._reduces:
            return
        while self._started < len(self._order):
            self._start_next()
        late = [self._late[unit] for unit in self.units if unit in self._late]
        for bucket in late:
            bucket.start()
        if in_memory := [bucket for bucket in self._order if bucket.shared is not None]:
            _sum_on_host(in_memory)
        for bucket in (*self._order, *late):
            bucket.finish()
        if not self._shares_memory and not self.is_immediate:
            for bucket in self._order:
                bucket.share_memory()
            self._shares_memory = True
        self._late.clear()
        self._is_filling, self._reduces, self._started = False, False, 0

    def _start_next(self) -> None:
        self._order[self._started].start()
        self._started += 1

    def _make_buckets(self) -> None:
        """Assigns the units to buckets, unless those of the step before still fit."""
        self._is_filling = True
        trained = [unit.trained for unit in self.units]
        if trained == self._trained:
            return
        self._trained, self._order, self._shares_memory = trained, [], False
        by_kind = defaultdict[Any, list[_UnshardedUnit]](list)
        for unit in reversed(self.units):  # about the order of backward
            if not unit.trained or unit.replicas is None:
                continue
            if self.is_immediate:
                self._bucket_of[unit] = _Bucket([unit])
            else:
                by_kind[unit.replicas, unit.reduce_dtype].append(unit)
        for units in by_kind.values():
            sizes = [unit.trained_numel * unit.reduce_dtype.itemsize for unit in units]
            for part in bucket_slices(sizes):
                self._order.append(_Bucket(units[part]))
                self._bucket_of.update(dict.fromkeys(units[part], self._order[-1]))


class _Bucket:
    """A buffer for the gradients of some units, in the reduce dtype, divided by the number of replicas.

    The buffer has a place for each trained parameter, and at its end one element for each: 1 if the rank has
    a gradient of it.
    """

    def __init__(self, units: Sequence["_UnshardedUnit"]) -> None:
        self.units = units
        self.trained = [parameter for unit in units for parameter in unit.trained]
        self.replicas, self.dtype = units[0].replicas, units[0].reduce_dtype
        self.missing = set(units)  # those without gradients in the step's last microbatch
        self.buffer: Tensor | None = None
        self.places: dict[Any, Tensor] = {}  # views of the buffer, by FSDP2's parameter
        self.filled: set[Any] = set()  # parameters that have a gradient
        self.is_started = False
        self.all_reduce: dist.Work | None = None
        self.shared: HostBuffers | None = None

    def add(self, unit: "_UnshardedUnit", pairs: list[tuple[Any, Tensor]]) -> None:
        """Adds the gradients of `unit` to the buffer, and empties the list of `pairs`."""
        if not self.filled:
            self._allocate_unless_free(pairs[0][1].device)
        divisor = unit.group.gradient_divide_factor or dist.get_world_size(self.replicas)
        while pairs:
            parameter, gradient = pairs.pop(0)
            place = self.places[parameter]
            # Divided before the sum over ranks, since fp16 could overflow.
            if parameter in self.filled:
                place.add_(gradient, alpha=1 / divisor)
            elif gradient.dtype == self.dtype:
                torch.mul(gradient, 1 / divisor, out=place)  # faster than a division
            else:
                place.copy_(gradient).mul_(1 / divisor)
            self.filled.add(parameter)

    def start(self) -> None:
        """Starts the all-reduce, or fills what is to be summed in shared memory.

        Gradients that this rank does not have count as zeros.
        """
        if self.buffer is None:  # no gradient has ever arrived
            self._allocate_unless_free(self.trained[0].sharded_param.device)
        assert self.buffer is not None, "it is allocated"
        has_gradient = [float(parameter in self.filled) for parameter in self.places]
        for parameter, place in self.places.items():
            if parameter not in self.filled:
                place.zero_()
        self.buffer[-len(self.places) :] = torch.tensor(has_gradient)
        self.is_started = True
        if self.shared is None:
            # Without a range, a profile would count the time until the next operation as waiting.
            with TimedRange("all_reduce"):
                self.all_reduce = dist.all_reduce(self.buffer, group=self.replicas, async_op=True)

    def finish(self, *, keeps_buffer: bool = True) -> None:
        """Waits for the all-reduce, and sets the gradients of the sharded parameters."""
        assert self.buffer is not None, "it was started"
        if self.all_reduce is not None:
            with TimedRange("all_reduce"):
                self.all_reduce.wait()
        self.is_started, self.all_reduce = False, None
        if len(self.filled) < len(self.places) and not isinstance(self.buffer, FakeTensor):
            counts = self.buffer[-len(self.places) :].tolist()
            self.filled = {parameter for parameter, count in zip(self.places, counts, strict=True) if count}
        # Detached: tensors of their own, which count as uses of the buffer.
        reduced = [(one, place.detach()) for one, place in self.places.items() if one in self.filled]
        self.filled.clear()
        self.missing.update(self.units)
        if not keeps_buffer:
            self.buffer, self.places = None, {}
        _set_gradients(reduced)

    def share_memory(self) -> None:
        """Makes later steps fill memory that the replicas share, if they can. Called by all of them."""
        assert self.buffer is not None, "it was reduced"
        assert self.replicas is not None, "only units with replicas have buckets"
        if self.buffer.device.type == "cpu" and dist.get_backend(self.replicas) == "gloo":
            self.shared = HostBuffers.allocate(self.buffer.numel(), dtype=self.dtype, group=self.replicas)
        if self.shared is not None:
            self._use_buffer(self.shared.own)

    @property
    def is_in_shared_memory(self) -> bool:
        return self.shared is not None and self.buffer is self.shared.own

    def _allocate_unless_free(self, device: torch.device) -> None:
        """Allocates the buffer, unless there is one that no gradient uses any more."""
        is_free = self.buffer is not None and _storage_uses(self.buffer) == 1 + len(self.places)
        if is_free and (self.shared is None or self.is_in_shared_memory):
            return
        if self.shared is not None and not self.is_in_shared_memory and _storage_uses(self.shared.own) == 1:
            self._use_buffer(self.shared.own)
            return
        numel = sum(parameter.sharded_size.numel() + 1 for parameter in self.trained)
        self.buffer, self.places = None, {}
        self._use_buffer(torch.empty(numel, dtype=self.dtype, device=device))

    def _use_buffer(self, buffer: Tensor) -> None:
        sizes = [parameter.sharded_size.numel() for parameter in self.trained]
        parts = buffer.split([*sizes, len(sizes)])
        self.buffer = buffer
        self.places = {
            parameter: part.view(parameter.sharded_size)
            for parameter, part in zip(self.trained, parts, strict=False)
        }


def _sum_on_host(buckets: Sequence[_Bucket]) -> None:
    """Sums the buckets over their replicas, in the memory that these share."""
    by_replicas = defaultdict[Any, list[_Bucket]](list)
    for bucket in buckets:
        by_replicas[bucket.replicas].append(bucket)
    with TimedRange("all_reduce"):
        for replicas, group in by_replicas.items():
            # Where a rank still uses the gradients of the step before, its buffer is another one.
            are_shared = torch.tensor([bucket.is_in_shared_memory for bucket in group], dtype=torch.int32)
            dist.all_reduce(are_shared, op=dist.ReduceOp.MIN, group=replicas)
            shared = list[HostBuffers]()
            for bucket, is_shared in zip(group, are_shared.tolist(), strict=True):
                if is_shared and bucket.shared is not None:
                    shared.append(bucket.shared)
                else:
                    dist.all_reduce(bucket.buffer, group=replicas)
            if shared:
                all_reduce_on_host(shared, group=replicas)


class _UnshardedUnit:
    """Methods that replace those of one of FSDP2's parameter groups."""

    def __init__(self, group: Any, buckets: GradientBuckets, *, position: int) -> None:
        self.group, self.buckets, self.position = group, buckets, position
        self.replicas = _replicas(group)
        group.unshard = _gather_nothing
        group.wait_for_unshard = self._use_own_shards
        group.pre_forward = self._use_in_forward
        group.post_forward = self._end_forward
        group.pre_backward = self._use_in_backward
        group.post_backward = self._reduce_gradients

    @property
    def trained(self) -> list[Any]:
        return [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]

    @property
    def trained_numel(self) -> int:
        return sum(parameter.sharded_size.numel() for parameter in self.trained)

    @property
    def reduce_dtype(self) -> torch.dtype:
        first = self.trained[0]
        return first.reduce_dtype or first.param_dtype or first.orig_dtype

    # The next three methods do what FSDP2's own do, without a range of the profiler where nothing is copied.

    def _use_in_forward(  # signature: FSDP2's
        self, _module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_first = self._enter("FORWARD")
        self._use_own_shards()
        return self.group._register_post_backward_hook(args, kwargs) if is_first else (args, kwargs)

    def _end_forward(self, _module: Any, _inputs: Any, output: Any) -> Any:  # signature: FSDP2's
        group = self.group
        if _current_backward() == -1:  # not recomputed within a backward
            group.reshard()
            group._record_post_forward()
        self._enter("IDLE")
        return output

    def _use_in_backward(self, default_prefetch: bool, *unused: Any) -> None:
        if not self._enter("PRE_BACKWARD"):
            return
        self._use_own_shards()
        if default_prefetch:
            self.group._backward_prefetch()

    def _enter(self, state: str) -> bool:
        """Sets FSDP2's state of the unit, and returns whether it is another one than before."""
        before: Any = self.group._training_state
        self.group._training_state = after = getattr(type(before), state)
        return before is not after

    def _use_own_shards(self) -> None:
        group = self.group
        if group.is_unsharded:
            return
        cast_ones = [parameter for parameter in group.fsdp_params if parameter.param_dtype is not None]
        for parameter in group.fsdp_params:
            if parameter.param_dtype is None:
                _use_in_place(parameter)
        if cast_ones:
            with record_function(group._with_fqn("FSDP::unshard")):
                for parameter in cast_ones:
                    _cast_into_unsharded_parameter(parameter)
        group._to_unsharded()

    def _reduce_gradients(self, *unused: Any) -> None:
        """Starts the reduction of the unit's gradients, or keeps them for a later microbatch."""
        group, replicas = self.group, self.replicas
        group._training_state = type(group._training_state).POST_BACKWARD
        if replicas is None:
            self._use_gradients()
            return
        with record_function("FSDP::post_backward_reduce"):
            pairs = _pop_gradients(group.fsdp_params)
            if group.reshard_after_backward:
                group.reshard()
            self.buckets.add_gradients(self, pairs, reduces=group.reduce_grads and group.all_reduce_grads)

    def _use_gradients(self) -> None:
        """Makes autograd's gradients those of the sharded parameters, or keeps them."""
        group = self.group
        with record_function("FSDP::post_backward_accumulate"):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
        with record_function("FSDP::post_backward_reshard"):
            pairs = _pop_gradients(group.fsdp_params) if group.reduce_grads else []
            if group.reshard_after_backward:
                group.reshard()
            for parameter in () if group.reduce_grads else group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):
                    parameter.to_accumulated_grad_if_needed()
        if not pairs:
            return
        with record_function("FSDP::post_backward_reduce"):
            dtype, reduced = group._reduce_dtype or pairs[0][1].dtype, list[tuple[Any, Tensor]]()
            while pairs:
                parameter, gradient = pairs.pop(0)
                own = _own_copy(gradient) if gradient.dtype == dtype else gradient.to(dtype)
                factor = group.gradient_divide_factor
                reduced.append((parameter, own if factor in (None, 1) else own.div_(factor)))
                del gradient, own
            _set_gradients(reduced)


def _replicas(group: Any) -> dist.ProcessGroup | None:
    """Returns the process group of the replicas of FSDP2's parameter group; None for a single replica."""
    if not hasattr(group.mesh_info, "replicate_process_group"):
        return None
    replicas = group._all_reduce_process_group
    return replicas if dist.get_world_size(replicas) > 1 else None


def _gather_nothing(_async_op: bool = False) -> None:
    """Replaces FSDP2's `unshard` of a unit whose parameters need no gather."""


def _set_gradients(reduced: list[tuple[Any, Tensor]]) -> None:
    """Sets or adds to the gradients of the sharded parameters, calls their hooks, and empties the list."""
    while reduced:
        parameter, value = reduced.pop(0)
        sharded = parameter.sharded_param
        gradient = value.to(parameter.orig_dtype)
        if sharded.grad is None:
            sharded.grad = parameter.to_sharded_dtensor(gradient)
        else:
            sharded.grad._local_tensor += gradient
        del value, gradient
        for hook in (sharded._post_accumulate_grad_hooks or {}).values():
            hook(sharded)


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


def _own_copy(gradient: Tensor) -> Tensor:
    """Returns `gradient`, or a copy if other tensors share its memory."""
    return gradient.clone() if _storage_uses(gradient) > 1 else gradient


def _storage_uses(tensor: Tensor) -> int:
    """Returns the number of tensors that share the memory of `tensor`, itself included."""
    storage = tensor.untyped_storage()
    count = torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportPrivateUsage]
    return count - 1  # without `storage` itself
