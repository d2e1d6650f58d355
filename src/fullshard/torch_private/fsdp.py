"""Private names of FSDP2 (`torch.distributed.fsdp._fully_shard`).

FSDP2 keeps one state per unit, shared by the unit's modules; the state has one group of parameters, or none
for a unit without parameters; the group has an object for each parameter ("engine parameter" elsewhere).
"""

import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.torch_private.names import require_names, torch_names
from fullshard.torch_private.tensors import tree_map_only

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_PACKAGE}._fsdp_state.FSDPState"
_GROUP = f"{_PACKAGE}._fsdp_param_group.FSDPParamGroup"
_PARAMETER = f"{_PACKAGE}._fsdp_param.FSDPParam"

NAMES = require_names(
    torch_names("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "finds the parts of a unit"),
    torch_names(f"{_STATE}._fsdp_param_group _modules", "finds the parts of a unit"),
    # of units with several meshes
    torch_names(f"{_STATE}._fsdp_param_groups", "finds the parts of a unit", is_optional=True),
    torch_names(  # since torch 2.13, in recomputed forwards too
        f"{_STATE}._cast_forward_inputs", "casts inputs of recomputed forwards", is_optional=True
    ),
    torch_names(f"{_STATE}._pre_backward", "gathers a unit before the backward of each of its modules"),
    torch_names(f"{_GROUP}.fsdp_params", "finds the parts of a unit"),
    torch_names(f"{_GROUP}.is_unsharded", "gathers a unit before the backward of each of its modules"),
    torch_names(f"{_GROUP}.post_backward reduce_grads", "reduces experts that no token reached"),
    torch_names(f"{_GROUP}.all_reduce_grads mesh_info", "completes sums over replicas"),
    torch_names(f"{_GROUP}.unshard _all_gather_result", "compares the units that ranks run"),
    torch_names(f"{_GROUP}.post_forward_mesh_info", "keeps units gathered while a model generates"),
    torch_names(f"{_PARAMETER}.sharded_param", "finds the parts of a unit"),
    torch_names(
        f"{_PARAMETER}._sharded_param_data sharded_size padded_sharded_param_size mp_policy",
        "gathers offloaded and fp8 shards",
    ),
    torch_names(f"{_PARAMETER}._unsharded_param", "finds parameters without a gradient"),
    torch_names(f"{_GROUP}._init_mp_dtypes", "reduces parameters that are trained later in their dtype"),
    # read where there is no set_reduce_scatter_unused_params
    torch_names(
        f"{_PARAMETER}.unsharded_accumulated_grad", "reduces experts that no token reached", is_optional=True
    ),
    torch_names(  # until torch 2.14, whose reductions refuse two dtypes
        f"{_PARAMETER}.to_accumulated_grad_if_needed", "casts a first gradient", is_optional=True
    ),
    torch_names(f"{_PARAMETER}.is_dtensor", "computes with local parts of divided matmuls"),
    torch_names(f"{_PARAMETER}._unsharded_dtensor_spec", "is_dtensor since torch 2.13", is_optional=True),
    torch_names(f"{_PACKAGE}._fsdp_param._chunk_with_empty", "cuts chunks when read", is_optional=True),
)


class OwnChunks:
    """The `num_chunks` chunks of a tensor, the last ones perhaps empty, each of which is cut when read."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:  # signature: FSDP2's
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        begin, end = index * self._length, self._tensor.size(self._dim)
        if begin >= end > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._length, end - begin))


@contextmanager
def cut_own_chunks() -> Generator[None]:
    """Context in which `fully_shard` cuts the chunk of this rank from a parameter, not those of all ranks.

    A torch without the function that is replaced here cuts all, which takes minutes at 16,384 ranks.
    """
    engine: Any = importlib.import_module(f"{_PACKAGE}._fsdp_param")
    before = getattr(engine, "_chunk_with_empty", None)
    if before is not None:
        engine._chunk_with_empty = OwnChunks
    try:
        yield
    finally:
        if before is not None:
            engine._chunk_with_empty = before


def list_units(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules of `model` that are units, in the order of `model.modules()`."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def unit_state(module: FSDPModule) -> Any:
    """Returns FSDP2's state of a unit, which its modules share."""
    return module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Returns the parameter groups of a unit: one; several with several meshes; none without parameters."""
    state = unit_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    return [one for one in (groups if groups is not None else [state._fsdp_param_group]) if one is not None]


def engine_parameters(module: FSDPModule) -> list[Any]:
    """Returns FSDP2's objects of the parameters of a unit."""
    return [one for group in parameter_groups(module) for one in group.fsdp_params]


def pending_gather(group: Any) -> Any:
    """Returns what identifies the all-gather of a group that was issued and not waited for, or None."""
    return group._all_gather_result


def unsharded_parameter_or_none(engine_parameter: Any) -> nn.Parameter | None:
    """Returns the parameter that the modules compute with, or None before the first gather."""
    return getattr(engine_parameter, "_unsharded_param", None)


def gather_now_for_backward(module: FSDPModule, gradient: Tensor) -> None:
    """Gathers a unit for its backward, as its hooks do, unless it is gathered."""
    # FSDP2 has gathered a unit whose last module has a backward, and its own order of events stays.
    if any(not group.is_unsharded for group in parameter_groups(module)):
        unit_state(module)._pre_backward(gradient)


@contextmanager
def keep_gathered_after_forward(model: nn.Module) -> Generator[None]:
    """Context in which units stay gathered behind their forward. They are still gathered at its end."""
    groups = [group for unit in list_units(model) for group in parameter_groups(unit)]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = info


def gathered_bytes(model: nn.Module) -> int:
    """Returns the bytes that the parameters of all units take when they are gathered."""
    parameters = (one for unit in list_units(model) for one in engine_parameters(unit))
    return sum(one.sharded_param.numel() * compute_dtype(one).itemsize for one in parameters)


def cast_recomputed_inputs(modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Makes recomputed forwards of a unit cast their inputs to `dtype`, as the first forward does.

    Before 2.13, torch leaves them as they are where the backward of the unit itself begins the recompute.
    """
    if hasattr(unit_state(cast(FSDPModule, modules[0])), "_cast_forward_inputs"):
        return

    def cast_inputs(_module: nn.Module, args: Any, kwargs: Any) -> Any:  # signature: torch's hook
        cast_one = lambda value: value.to(dtype) if value.is_floating_point() else value  # noqa: E731
        return tree_map_only(Tensor, cast_one, (args, kwargs))

    for module in modules:
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)


def reduce_missing_gradients_as_zeros(module: FSDPModule) -> None:
    """Makes a unit reduce zeros for parameters without a gradient, so that all ranks take part.

    For torch before 2.13, which has no `set_reduce_scatter_unused_params`.
    """
    for group in parameter_groups(module):
        _patch_post_backward_with_zeros(group, group.post_backward)


def _patch_post_backward_with_zeros(group: Any, post_backward: Callable[..., None]) -> None:
    def post_backward_with_zeros(*unused: Any) -> None:
        for parameter in group.fsdp_params:
            value = unsharded_parameter_or_none(parameter)
            if value is None or not group.reduce_grads:
                continue
            if parameter.unsharded_accumulated_grad is None and value.requires_grad and value.grad is None:
                value.grad = torch.zeros_like(value)
        post_backward(*unused)

    group.post_backward = post_backward_with_zeros


def set_reduce_dtypes_of_trained(module: FSDPModule) -> None:
    """Makes a unit reduce in the dtype of the parameters that are trained now.

    FSDP2 looks which ones are trained in the first forward only.
    """
    for group in parameter_groups(module):
        group._init_mp_dtypes()


def cast_late_gradients_to_kept_dtype(group: Any) -> None:
    """Casts gradients of parameters that had none in earlier microbatches to the dtype of the kept ones."""
    first = [one for one in group.fsdp_params if one.unsharded_accumulated_grad is None]
    if len(first) == len(group.fsdp_params):
        return
    for one in first:
        if hasattr(one, "to_accumulated_grad_if_needed") and unsharded_parameter_or_none(one) is not None:
            one.to_accumulated_grad_if_needed()


def compute_with_plain_tensor(engine_parameter: Any) -> None:
    """Makes modules get the gathered parameter as a plain tensor, although it is stored as a DTensor."""
    engine_parameter.is_dtensor = False
    engine_parameter._unsharded_dtensor_spec = None  # read instead of `is_dtensor` since torch 2.13


def flat_padded_shard(engine_parameter: Any) -> Tensor:
    """Returns this rank's shard, flat and padded."""
    return engine_parameter._sharded_param_data


def shard_shape(engine_parameter: Any) -> torch.Size:
    """Returns the shape of this rank's shard, without padding."""
    return engine_parameter.sharded_size


def padded_shard_shape(engine_parameter: Any) -> torch.Size:
    """Returns the shape of this rank's shard with the padding that the all-gather sends."""
    return engine_parameter.padded_sharded_param_size


def compute_dtype(engine_parameter: Any) -> torch.dtype:
    """Returns the dtype in which the parameter is gathered. Integers are never cast."""
    kept = engine_parameter.sharded_param.dtype
    return (engine_parameter.mp_policy.param_dtype if kept.is_floating_point else None) or kept


def replace_shard(engine_parameter: Any, local: Tensor) -> None:
    """Makes `local`, of the shape of this rank's shard, the shard that FSDP2 gathers and reduces to."""
    engine_parameter._sharded_param_data = local.reshape(-1)
    parameter: DTensor = engine_parameter.sharded_param
    parameter._local_tensor = local  # pyright: ignore[reportPrivateUsage]
