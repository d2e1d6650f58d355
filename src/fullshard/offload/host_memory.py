"""Host memory that begins at a page, and may be registered with a GPU."""

import mmap
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.errors import OffloadError
from fullshard.quantities import format_bytes
from fullshard.spec.groups import page_aligned_bytes


def allocate_host_memory(size_bytes: int, *, pinned: bool) -> Tensor:
    """Returns at least `size_bytes` of zeros, in whole pages, as uint8; if `pinned`, registered with CUDA.

    The memory is a mapping of its own: torch's pinned allocator rounds up to a power of two, and malloc's
    memory is not aligned to pages and stays with the thread that freed it. Raises OffloadError if there is
    not enough memory.
    """
    size_bytes = page_aligned_bytes(max(1, size_bytes), 1)
    try:
        mapping = mmap.mmap(-1, size_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise OffloadError(
            f"the host has no {format_bytes(size_bytes)} in one piece.",
            got=str(error),
            fix="a smaller offload.sub_group_parameters, an nvme tier, or more ranks",
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if pinned:
        _register_with_cuda(tensor)
    return tensor


def as_memoryview(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous uint8 tensor on the CPU, for reading or writing."""
    return memoryview(cast(bytearray, tensor.numpy()))


def _register_with_cuda(tensor: Tensor) -> None:
    code = cast(Any, torch.cuda.cudart()).cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) != 0:
        raise OffloadError(
            f"CUDA does not register {format_bytes(tensor.nbytes)} of host memory.",
            got=f"cudaHostRegister: error {int(code)}",
            fix="ulimit -l unlimited, a smaller offload.sub_group_parameters, or an nvme tier",
        )
