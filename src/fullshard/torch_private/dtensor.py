"""Private names of DTensor."""

from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset

from fullshard.torch_private.names import PrivateName, require

_CLASS = "torch.distributed.tensor.DTensor"

NAMES = require(
    PrivateName(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "finds the box of a shard"
    ),
    PrivateName(f"{_CLASS}._local_tensor", "replaces the part that a rank has"),
    PrivateName(f"{_CLASS}._spec", "makes a DTensor whose part is on another device"),
)

compute_local_shape_and_global_offset = local_shape_and_offset
"""`compute_local_shape_and_global_offset(shape, mesh, placements)`: shape and offsets of this rank's part."""


def local_part(tensor: DTensor) -> Tensor:
    """Returns this rank's part itself. `to_local` makes a view of it, and takes longer."""
    return tensor._local_tensor  # pyright: ignore[reportPrivateUsage]


def set_local_part(tensor: DTensor, local: Tensor) -> None:
    """Replaces this rank's part."""
    tensor._local_tensor = local  # pyright: ignore[reportPrivateUsage]


def dtensor_with_placements_of(like: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor with the shape, mesh and placements of `like`, whose part here is `local`.

    Unlike `DTensor.from_local`, it accepts a part on another device than the mesh's.
    """
    spec: Any = like._spec  # pyright: ignore[reportPrivateUsage]
    meta = type(spec.tensor_meta)(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    changed = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return cast(Any, DTensor)(local, changed, requires_grad=False)
