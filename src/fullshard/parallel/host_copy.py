"""Copies tensors between a device and its host: on a CUDA stream, within CPU memory, or as a fake."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fullshard.spec.plan import DeviceType

Way = Literal["out", "back", "wait"]
Report = Callable[[Way, int], None]  # the kind of act, and the bytes of one tensor (0 for a wait)


class HostCopier(Protocol):
    """Copies flat tensors to the host and back. A ticket stands for copies in progress; None: none are.

    Each implementation has its own form for the copies on the host.

    is_concurrent: whether copies run concurrently with computing; the device tensors of a copy must then stay
        allocated until computing has waited for its ticket
    """

    is_concurrent: bool

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Copies to the host, after the computation enqueued so far. Returns (host copies, ticket)."""
        ...

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        """Copies back to the device. Returns (tensors, ticket). `hosts` may be freed after the call."""
        ...

    def make_stream_wait(self, ticket: Any) -> None:
        """Makes the computation enqueued after this call wait for the copies of `ticket`."""
        ...


class CpuHostCopier:
    """Copier for the CPU, where device memory is host memory. `copy_to_host` clones the tensors."""

    is_concurrent = False

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        return [flat.clone() for flat in flats], None

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        return list(hosts), None

    def make_stream_wait(self, ticket: Any) -> None:
        pass


class CudaHostCopier:
    """Copier for CUDA: copies to and from pinned memory, in order, on one stream of its own."""

    is_concurrent = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            hosts = [torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True) for flat in flats]
            for host, flat in zip(hosts, flats, strict=True):
                host.copy_(flat, non_blocking=True)
            return list(hosts), self._stream.record_event()

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        # Allocated on the computing stream, which may still use this memory for an earlier tensor. So the
        # copy waits for that stream too.
        flats = [torch.empty(host.shape, dtype=host.dtype, device=device) for host in hosts]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, flat in zip(hosts, flats, strict=True):
                flat.copy_(host, non_blocking=True)
            return flats, self._stream.record_event()

    def make_stream_wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


class FakeReportingCopier:
    """Copier for fake tensors in place of a GPU's: copies nothing, calls `report` for each copy."""

    is_concurrent = True

    def __init__(self, report: Report = lambda _way, _size: None) -> None:
        self.report = report

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        for flat in flats:
            self.report("out", flat.nbytes)
        return [(flat.numel(), flat.dtype) for flat in flats], self  # nothing is allocated

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        flats = [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in hosts]
        for flat in flats:
            self.report("back", flat.nbytes)
        return flats, self

    def make_stream_wait(self, ticket: Any) -> None:
        self.report("wait", 0)


def choose_host_copier(device: DeviceType, actual: torch.device) -> HostCopier:
    """Returns the copier for a plan's `device`. `actual`: the tensors' device, the CPU for fake tensors."""
    if device == "cpu":
        return CpuHostCopier()
    return CudaHostCopier(actual) if actual.type == "cuda" else FakeReportingCopier()
