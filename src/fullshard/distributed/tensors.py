"""Local parts of DTensors and subclasses, unusable numbers, and the modules whose products are replaced."""

import math
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.torch_private.fake_tensors import is_traceable_wrapper_subclass_type
from fullshard.torch_private.tensors import compute_local_shape_and_global_offset, storage_id

_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # torch cannot compare fp8


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def detached_local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, or any other tensor, detached. The memory is shared."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def dtensor_from_local_part(whole: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor with `whole`'s shape, mesh and placements, whose part on this rank is `local`."""
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def shard_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Returns the position of the first element of this rank's shard in the whole tensor, per dim."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def is_tensor_wrapper_subclass(cls: type) -> bool:
    """Returns True for a tensor subclass, other than DTensor, whose data are in tensors that it holds."""
    return not issubclass(cls, DTensor) and is_traceable_wrapper_subclass_type(cls)


def tensors_with_data(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the data of `tensor`: its local part, or those that a subclass wraps."""
    local = local_tensor(tensor)
    if not is_tensor_wrapper_subclass(type(local)):
        return [local]
    return [getattr(local, name) for name in cast(Any, local).__tensor_flatten__()[0]]


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of `tensor`, real or fake, among all live storages."""
    return storage_id(tensor.untyped_storage())


def find_unusable_number(tensor: Tensor, *, infinite_ok: bool, negative_ok: bool = True) -> float | None:
    """Returns a number of a CPU tensor that no training can continue from, or None.

    That is NaN; unless `infinite_ok`, an infinity; unless `negative_ok`, a negative number. Reads the tensor
    once, at the pace of a sum.
    """
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.dtype not in _COMPARED or not tensor.numel():
        return None
    low, high = (one.item() for one in torch.aminmax(tensor.detach()))  # both are NaN if an element is
    if math.isnan(low) or (math.isinf(low) and not infinite_ok) or (low < 0 and not negative_ok):
        return low
    return high if math.isinf(high) and not infinite_ok else None


_ATTRIBUTE = "_fullshard_product"


class LinearFunction(Protocol):
    """A function that returns x @ weight.T + bias, for x (..., in features), weight (out, in), bias (out)."""

    def __call__(self, x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor: ...


def set_linear_function(linear: nn.Module, function: LinearFunction) -> None:
    setattr(linear, _ATTRIBUTE, function)


def find_linear_function(linear: nn.Module) -> LinearFunction | None:
    """Returns the function that `set_linear_function` gave `linear`; None if it was given none."""
    return cast(LinearFunction | None, vars(linear).get(_ATTRIBUTE))


def is_experts(module: nn.Module) -> bool:
    """Returns whether `module` is the experts of a layer. See [Note: the seam of experts] in `experts`.

    All of its parameters have the expert as dim 0: those of this rank, or of all ranks that divide them.
    Modules of transformers have `is_transposed` from the decorator that makes their forward exchangeable;
    other modules have `takes_any_experts`.
    """
    count = getattr(module, "num_experts", None)
    has_seam = hasattr(module, "is_transposed") or hasattr(module, "takes_any_experts")
    if not (has_seam and isinstance(count, int)):
        return False
    parameters = list(module.parameters())
    return bool(parameters) and all(p.ndim > 1 and p.shape[0] % count == 0 for p in parameters)
