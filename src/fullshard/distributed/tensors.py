"""Local parts of DTensors, and the identity of a tensor's storage."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part_of(whole: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor with the shape and placements of `whole`, of which `local` is this rank's part."""
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of `tensor` among all live ones.

    Unlike a data address, it also exists for fake tensors.
    """
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
