"""Local parts of DTensors, and the identity of a storage."""

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor


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


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of `tensor`, real or fake, among all live storages."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
