"""The local part of a tensor, and the identity of its storage."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_key(tensor: Tensor) -> int:
    """Returns a number that identifies the storage of `tensor` among all live ones.

    Unlike a data address, it also exists for fake tensors.
    """
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
