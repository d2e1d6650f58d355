"""How tensors get from a device to its host and back: on a CUDA stream, in plain memory, or only told."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.spec.plan import DeviceType

Way = Literal["out", "back", "wait"]
Tell = Callable[[Way, int], None]  # what is done, and how many bytes of one storage (0 for a wait)


class HostCopy(Protocol):
    """Copies flat tensors. `beside`: while computing goes on, so that what it reads from (`leave`) and writes
    to (`fetch`) must be held until computing has waited for the ticket. A ticket of None needs no waiting.

    What stands for a tensor on the host is the lane's own affair.
    """

    beside: bool

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Copies to the host, after what was computed until now."""
        ...

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        """Copies back; the host's own may be dropped at once."""
        ...

    def wait(self, ticket: Any) -> None:
        """What is computed from now on comes after the copies of `ticket`."""
        ...


class CpuHostCopy:
    """On the CPU: out of the device's memory is into it. What comes back is the copy that was made."""

    beside = False

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        return [flat.clone() for flat in flats], None

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        return list(hosts), None

    def wait(self, ticket: Any) -> None:
        pass


class CudaHostCopy:
    """Through pinned memory, on one stream, so that what comes back comes after it has left."""

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
        # Allocated on the computing stream: its memory may have been another tensor's until just now, so the
        # copy waits for that stream too.
        flats = [torch.empty(host.shape, dtype=host.dtype, device=device) for host in hosts]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, flat in zip(hosts, flats, strict=True):
                flat.copy_(host, non_blocking=True)
            return flats, self._stream.record_event()

    def wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


class AbsentTensor(NamedTuple):
    """A tensor on a host that is not there."""

    numel: int
    dtype: torch.dtype


class FakeHostCopy:
    """For fake tensors, which stand for a GPU's and lie on none: copies nothing, and tells what would be."""

    beside = True

    def __init__(self, tell: Tell | None = None) -> None:
        self.tell = tell

    def to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        for flat in flats:
            self._say("out", flat.nbytes)
        return [AbsentTensor(flat.numel(), flat.dtype) for flat in flats], self

    def to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        flats = [torch.empty(host.numel, dtype=host.dtype, device=device) for host in hosts]
        for flat in flats:
            self._say("back", flat.nbytes)
        return flats, self

    def wait(self, ticket: Any) -> None:
        self._say("wait", 0)

    def _say(self, way: Way, size: int) -> None:
        if self.tell is not None:
            self.tell(way, size)


def lane_for(device: DeviceType, actual: torch.device) -> HostCopy:
    """The lane of a plan for `device` whose tensors lie on `actual`."""
    if device == "cpu":
        return CpuHostCopy()
    return CudaHostCopy(actual) if actual.type == "cuda" else FakeHostCopy()
