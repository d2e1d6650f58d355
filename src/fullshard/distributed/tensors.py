"""The local part of a tensor, and the identity of its storage."""

from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, detached; it shares the tensor's memory."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shard_like(whole: DTensor, local: Tensor) -> DTensor:
    """Returns a DTensor like `whole` whose part on this rank is `local`."""
    mesh, placements = whole.device_mesh, whole.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of `tensor`, also of a fake one, among all live ones."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
