"""Host memory that a GPU uses, and the threads that copy to it."""

import gc

import pytest
import torch

from fullshard.distributed.host import allocate_host_memory, make_device_thread
from fullshard.errors import OffloadError
from tests.fakes.cuda import FakeCuda


def use_registered_memory() -> None:
    """Copies into new memory, and drops it while the copy may still run."""
    memory = allocate_host_memory(1 << 20, pinned=True)
    assert memory.is_pinned()
    memory[:12].view(torch.float32).copy_(torch.ones(3, device="cuda"), non_blocking=True)


def test_registered_memory_is_unregistered_once_its_copies_ended_and_before_it_is_unmapped() -> None:
    """Otherwise memory mapped later at the same address could not be registered, or would count as pinned."""
    with FakeCuda(index=5) as cuda:
        for _ in range(4):
            use_registered_memory()
            make_device_thread("other").submit(use_registered_memory).result()
        gc.collect()
        assert (cuda.faults, cuda.registered, cuda.contexts) == ([], {}, {5})


def test_memory_that_cuda_does_not_register_is_an_error() -> None:
    with FakeCuda() as cuda:
        cuda.registered[0] = 1 << 62  # every address
        with pytest.raises(OffloadError, match=r"712[\s\S]*ulimit"):
            allocate_host_memory(1, pinned=True)
