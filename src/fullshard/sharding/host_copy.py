"""Copies of tensors between a device and its host: on a CUDA stream, in plain memory, or only reported."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fullshard.spec.plan import DeviceType

Way = Literal["out", "back", "wait"]
Report = Callable[[Way, int], None]  # the act, and the bytes of one storage (0 for a wait)


class HostCopy(Protocol):
    """Copies flat tensors. A ticket marks the end of some copies; a ticket of None needs no waiting.

    The form in which tensors are kept on the host is up to the implementation.

    beside: whether copies run concurrently with computing; the tensors that `to_host` reads and `to_device`
        writes must then be kept until computing has waited for the ticket
    """

    beside: bool

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Copies to the host, after all computation enqueued so far. Returns the copies and their ticket."""
        ...

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        """Copies back to the device. The host's copies may be dropped at once."""
        ...

    def wait(self, ticket: Any) -> None:
        """Makes computation enqueued from now on wait for the copies of `ticket`."""
        ...


class CpuHostCopy:
    """Copies on the CPU, where device and host memory are the same. `to_device` returns the copies made."""

    beside = False

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        return [flat.clone() for flat in flats], None

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        return list(hosts), None

    def wait(self, ticket: Any) -> None:
        pass


class CudaHostCopy:
    """Copies through pinned memory, on one stream, so that a copy back runs after the copy out."""

    beside = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            hosts = [torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True) for flat in flats]
            for host, flat in zip(hosts, flats, strict=True):
                host.copy_(flat, non_blocking=True)
            return list(hosts), self._stream.record_event()

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        # Allocated on the computing stream, where another tensor may have used this memory until just now. So
        # the copy waits for that stream too.
        flats = [torch.empty(host.shape, dtype=host.dtype, device=device) for host in hosts]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, flat in zip(hosts, flats, strict=True):
                flat.copy_(host, non_blocking=True)
            return flats, self._stream.record_event()

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


class FakeHostCopy:
    """Copies nothing, for fake tensors that stand for a GPU's, and reports the copies to a callback."""

    beside = True

    def __init__(self, report: Report = lambda _way, _size: None) -> None:
        self.report = report

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        for flat in flats:
            self.report("out", flat.nbytes)
        return [(flat.numel(), flat.dtype) for flat in flats], self  # nothing is allocated

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        flats = [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in hosts]
        for flat in flats:
            self.report("back", flat.nbytes)
        return flats, self

    def wait(self, ticket: Any) -> None:
        self.report("wait", 0)


def host_copy_for(device: DeviceType, actual: torch.device) -> HostCopy:
    """Returns the copier of a plan for `device` whose tensors lie on `actual`."""
    if device == "cpu":
        return CpuHostCopy()
    return CudaHostCopy(actual) if actual.type == "cuda" else FakeHostCopy()
