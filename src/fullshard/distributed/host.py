"""Memory and threads of the host that copies from and to a GPU use."""

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.errors import OffloadError
from fullshard.quantities import format_bytes
from fullshard.spec.groups import page_aligned_bytes

_FIX = 'a smaller offload.sub_group_parameters, an nvme tier, checkpoint.mode = "sync", or more machines'


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
        what = f"the host has no {format_bytes(size_bytes)} in one piece."
        raise OffloadError(what, got=str(error), fix=_FIX) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if pinned:
        _register_with_cuda(tensor, mapping)
    return tensor


def as_memoryview(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous uint8 tensor on the CPU, for reading or writing."""
    return memoryview(cast(bytearray, tensor.numpy()))


def make_device_thread(name: str) -> ThreadPoolExecutor:
    """Returns an executor of one thread whose CUDA device is that of the calling thread.

    A new thread's device is the first one. There, its first stream or pinned memory would make a context.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # -1 sets none
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (device,))


def _register_with_cuda(tensor: Tensor, mapping: mmap.mmap) -> None:
    address, device = tensor.data_ptr(), torch.cuda.current_device()
    code = cast(Any, torch.cuda.cudart()).cudaHostRegister(address, tensor.nbytes, 0)
    if int(code) != 0:
        raise OffloadError(
            f"CUDA does not register {format_bytes(tensor.nbytes)} of host memory.",
            got=f"cudaHostRegister: error {int(code)}",
            fix=f"ulimit -l unlimited, {_FIX}",
        )
    # Called when nothing uses the memory, and before it is unmapped, since the arguments hold the mapping.
    # At the end of the process, CUDA ends first.
    weakref.finalize(tensor.untyped_storage(), _unregister, address, device, mapping).atexit = False


def _unregister(address: int, device: int, _mapping: mmap.mmap) -> None:  # signature: bound above
    torch.cuda.synchronize(device)  # copies may still run
    cast(Any, torch.cuda.cudart()).cudaHostUnregister(address)
