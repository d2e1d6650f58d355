"""Local parts of DTensors and subclasses, unusable numbers, and the modules whose products are replaced."""

import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.distributed.shard_boxes import own_box
from fullshard.torch_private.fake_tensors import is_traceable_wrapper_subclass_type
from fullshard.torch_private.tensors import local_part, storage_id

_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # torch cannot compare fp8
TRAINED = "parameter"
# Keys of optimizer state that is a mean or sum of squares, and roles of what is squared.
_SQUARES = {
    "exp_avg_sq",
    "max_exp_avg_sq",
    "square_avg",
    "sum",
    "acc_delta",
    "row_var",
    "col_var",
    "variance",
}
_SQUARED = {TRAINED, "exp_avg", "momentum_buffer"}


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def detached_local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, or any other tensor, detached. The memory is shared."""
    return (local_part(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def dtensor_from_local_part(whole: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor with `whole`'s shape, mesh and placements, whose part on this rank is `local`."""
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def zeros_sharded_like(tensor: Tensor, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of zeros of `shape`, with as many dims as `tensor`, sharded in the same dims.

    Dims that are reduced to size 1 are replicated over the mesh axes that shard them in `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=tensor.device)
    placements = list(tensor.placements)
    for axis, one in enumerate(placements):
        dim = None if one.is_replicate() else cast(Any, one).dim
        if dim is not None and shape[dim] == 1 != tensor.shape[dim]:
            placements[axis] = Replicate()
    mesh, whole = tensor.device_mesh, torch.empty(tuple(shape), device="meta")
    local = torch.zeros(own_box(shape, mesh, placements=placements)[1], dtype=dtype, device=tensor.device)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def shard_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Returns the position of the first element of this rank's shard in the whole tensor, per dim."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return own_box(tensor.shape, tensor.device_mesh, placements=tensor.placements)[0]


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


def find_unusable_number(tensor: Tensor, *, role: str | None) -> float | None:
    """Returns a number of a CPU tensor that no training can continue from, or None. Reads the tensor once.

    role: TRAINED, the key of a parameter's optimizer state, or None for a tensor that may hold infinity, such
        as a mask

    That is NaN; if there is a role, an infinity; in a mean or sum of squares, a negative number; in a trained
    parameter or a momentum, a number whose square overflows fp32 (fp64 in fp64): above 1.8e19. Then its norm
    is infinite, as is the mean of squares of a gradient so large.
    """
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if tensor.dtype not in _COMPARED or not tensor.numel():
        return None
    largest = math.inf if role is None else sys.float_info.max
    if role in _SQUARED:
        largest = torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).max ** 0.5
    low, high = (one.item() for one in torch.aminmax(tensor.detach()))  # both are NaN if an element is
    if math.isnan(low) or low < (0.0 if role in _SQUARES else -largest):
        return low
    return high if high > largest else None


_ATTRIBUTE = "_fullshard_product"


class LinearFunction(Protocol):
    """A function that returns x @ weight.T + bias, for x (..., in features), weight (out, in), bias (out)."""

    def __call__(self, x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor: ...


def set_linear_function(linear: nn.Module, function: LinearFunction) -> None:
    setattr(linear, _ATTRIBUTE, function)


def find_linear_function(linear: nn.Module) -> LinearFunction | None:
    """Returns the function that `set_linear_function` gave `linear`; None if it was given none."""
    return cast(LinearFunction | None, vars(linear).get(_ATTRIBUTE))


def multiply_by_own_weight(  # signature: nn.Linear's, after the module
    linear: Any, input: Tensor, *, rows: list[slice] | None = None, adds_bias: bool = True
) -> Tensor:
    """Multiplies by the weight of `linear`, or these `rows` of it, with its `LinearFunction`."""
    weight, bias = linear.weight, linear.bias if adds_bias else None
    if rows is not None:
        weight, bias = _select_rows(weight, rows), None if bias is None else _select_rows(bias, rows)
    product = find_linear_function(linear)
    assert product is not None, "set with this forward"
    return product(input, weight, bias=bias)


def _select_rows(whole: Tensor, rows: list[slice]) -> Tensor:
    return whole[rows[0]] if len(rows) == 1 else torch.cat([whole[one] for one in rows])


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


def is_router(module: nn.Module, parent: nn.Module) -> bool:
    """Returns whether `module`, a part of `parent`, is a linear module that scores experts beside it."""
    counts = [getattr(one, "num_experts", 0) for one in parent.children() if is_experts(one)]
    counts += [len(one) for one in parent.children() if isinstance(one, nn.ModuleList)]
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.shape[0] in counts
