"""The fake CUDA finds what it is there for, and nothing else."""

import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes.cuda import FakeCuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda(index=3) as fake:
        yield fake


def ones() -> Tensor:
    return torch.ones(3, device="cuda")


def test_a_tensor_is_on_the_device_that_it_was_made_on(cuda: FakeCuda) -> None:
    one = torch.nn.Parameter(ones())
    (one * torch.tensor([1.0, 2.0, 3.0], device="cuda")).sum().backward()
    for tensor in (one, one[1:], one.grad, one.to(torch.bfloat16), torch.empty_like(one), one.cpu().cuda()):
        assert tensor is not None
        assert (str(tensor.device), tensor.is_cuda, tensor.is_cpu) == ("cuda:3", True, False)
    for tensor in (
        torch.ones(3),
        one.cpu(),
        torch.zeros(3, pin_memory=True),
        torch.empty_like(one, device="cpu"),
    ):
        assert (str(tensor.device), tensor.is_cuda, tensor.is_cpu) == ("cpu", False, True)
    here = torch.empty(3).copy_(one.detach())
    assert here.is_cpu
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(3)


# Waits #
class NotesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, one: Tensor) -> Tensor:  # signature: torch's
        return one.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # signature: torch's
        gradient = gradient.clone()
        gradient[:2] = torch.tensor([1.0, 0.0])
        return gradient


def copy_into_slice(one: Tensor) -> None:
    one[:2] = torch.tensor([1.0, 2.0])


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda one: one.sum().item(),
    "bool": lambda one: bool(one.sum() > 0),
    "list": lambda one: one.tolist(),
    "format": lambda one: f"{one[0]:.3f}",
    "mask": lambda one: one[one > 0],
    "nonzero": lambda one: one.nonzero(),
    "equal": lambda one: torch.equal(one, one),
    "tensor of a list": lambda one: torch.tensor([1.0, 2.0], device=one.device),
    "to the device": lambda one: torch.ones(3).to(one.device),
    "from pageable memory": lambda one: torch.ones(3).to(one.device, non_blocking=True),
    "into a slice": copy_into_slice,
    "into a slice in backward": lambda one: NotesInBackward.apply(one.requires_grad_()).sum().backward(),
    "to the host": lambda one: torch.empty(3).copy_(one),
    "to pageable memory": lambda one: torch.empty(3).copy_(one, non_blocking=True),
    "for an event": lambda one: torch.cuda.current_stream().record_event().synchronize(),
    "for a stream": lambda one: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("act", WAITS.values(), ids=list(WAITS))
def test_each_wait_is_noted(act: Callable[[Tensor], object], cuda: FakeCuda) -> None:
    act(ones())
    assert len(cuda.waits) == 1, cuda.waits
    assert cuda.faults == []


def test_only_waits_are_noted(cuda: FakeCuda) -> None:
    x = ones()
    first, second = torch.empty(3, pin_memory=True), torch.empty(3, pin_memory=True)
    first.copy_(x * 2 + torch.tensor(1.0), non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    second.copy_(torch.where(x > 0, x, 0.0), non_blocking=True)
    copied.synchronize()  # the device has more to do meanwhile
    assert first.tolist() == [3.0] * 3
    x[0] = 1.0
    x.add_(torch.ones(3).pin_memory().to("cuda", non_blocking=True))
    torch.tensor([1, 2]).sum().item()
    assert (cuda.waits, cuda.faults) == ([], [])


# Order: each act is in order with `waits`, and not without #
Act = Callable[[bool], object]


def on_two_streams(waits: bool) -> None:
    x, side = ones(), torch.cuda.Stream()
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    torch.cuda.synchronize()


def back_from_a_stream(waits: bool) -> None:
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        event = side.record_event()
    if waits:
        event.wait()
    x.zero_()
    del y


def freed_too_early(waits: bool) -> None:
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    if waits:
        x.record_stream(side)
    del x
    ones()
    del y


def resized_too_early(waits: bool) -> None:
    x, side = ones(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    x.untyped_storage().resize_(0)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    ones()
    del y


def read_before_it_arrives(waits: bool) -> None:
    here = torch.empty(3, pin_memory=True).copy_(ones(), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    here.sum()


def moved_and_read(waits: bool) -> None:
    here = ones().to("cpu", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    here.numpy()


def source_overwritten(waits: bool) -> None:
    here = torch.ones(3, pin_memory=True)
    there = here.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.current_stream().record_event().synchronize()
    here.zero_()
    del there


def unregistered_in_use(waits: bool) -> None:
    mapping, runtime = mmap.mmap(-1, 4096), torch.cuda.cudart()
    here = torch.frombuffer(mapping, dtype=torch.float32)
    address = here.data_ptr()
    assert runtime.cudaHostRegister(address, 4096, 0) == 0
    assert runtime.cudaHostRegister(address, 4096, 0) == 712
    here[:3].copy_(ones(), non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    del here
    runtime.cudaHostUnregister(address)


def unmapped_while_registered(waits: bool) -> None:
    mapping, runtime = mmap.mmap(-1, 1 << 24), torch.cuda.cudart()
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    runtime.cudaHostRegister(address, 1 << 24, 0)
    if not waits:
        mapping.close()
    runtime.cudaHostUnregister(address)


ACTS: list[Act] = [
    *(on_two_streams, back_from_a_stream, freed_too_early, resized_too_early, read_before_it_arrives),
    *(moved_and_read, source_overwritten, unregistered_in_use, unmapped_while_registered),
]


@pytest.mark.parametrize("act", ACTS, ids=[act.__name__ for act in ACTS])
def test_uses_that_nothing_orders_are_faults(act: Act, cuda: FakeCuda) -> None:
    act(True)
    assert cuda.faults == []
    act(False)
    gc.collect()
    assert len(cuda.faults) == 1, cuda.faults
    assert cuda.registered == {}


def test_a_thread_begins_on_the_first_device(cuda: FakeCuda) -> None:
    """Leaving a stream's context sets the stream of the device that was current, which makes a context."""
    stream = torch.cuda.Stream()

    def work() -> None:
        with torch.cuda.stream(stream):
            assert torch.empty(3, device="cuda:3").is_cuda

    def work_on_own_device() -> None:
        torch.cuda.set_device(3)
        work()

    for act, contexts in ((work_on_own_device, {3}), (work, {0, 3})):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        assert cuda.contexts == contexts
