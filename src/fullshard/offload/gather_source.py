"""What is gathered while the master is elsewhere: this rank's shards in the dtype computed in."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.offload.fsdp_params import compute_dtype, local_shape, padded_shape
from fullshard.offload.host_memory import allocate_host


class GatherSource(Protocol):
    """Of each parameter, by name, what the engine sends. One thread publishes while another gives.
    `host_bytes`: what of the host's memory they take that is not the device's."""

    @property
    def host_bytes(self) -> int: ...

    def begin(self, *, backwards: bool) -> None:
        """An update begins, which publishes all, in the order of gathers or `backwards`."""
        ...

    def hurried(self, unit: int | None) -> AbstractContextManager[None]:
        """Meanwhile somebody waits until `unit` is published (None: all), which waits for no gather then."""
        ...

    def write(self, name: str, begin: int, *, values: Tensor) -> None:
        """The elements of the shard from `begin` on are `values` now, in the master's dtype."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The padded shard, on the device, in `dtype`. Called once all of its unit is published."""
        ...

    def settle(self) -> None:
        """Returns when all that was published is where it stays."""
        ...

    def closing(self) -> Callable[[], None]:
        """What lets go of files and threads, and holds nothing else."""
        ...


class SeparateShards(GatherSource, Protocol):
    """Shards whose parameters have no other copy. Their dtype is chosen when they are made."""

    def whole(self, name: str) -> Tensor:
        """The shard, flat, without padding; not to be changed. On a drive it is read when it is used."""
        ...


class _InMemory:
    """There is nothing to wait for."""

    host_bytes = 0

    def begin(self, *, backwards: bool) -> None: ...

    def hurried(self, unit: int | None) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self) -> None: ...

    def closing(self) -> Callable[[], None]:
        return lambda: None


class MasterShards(_InMemory):
    """Masters that lie on the device that computes: cast when they are gathered, as the engine does."""

    def __init__(self, masters: dict[str, Tensor], engine: dict[str, Any]) -> None:
        self._masters, self._engine = masters, engine

    def write(self, name: str, begin: int, *, values: Tensor) -> None: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        one, master = self._engine[name], self._masters[name]
        if local_shape(one) == padded_shape(one):
            return master.view(padded_shape(one)).to(dtype)
        whole = master.new_zeros(padded_shape(one), dtype=dtype)
        whole.view(-1)[: master.numel()].copy_(master)
        return whole


class ShardCopies(_InMemory):
    """Copies in the dtype computed in (or what `dtype_of` says): on the device, or in (pinned) host memory,
    from where each gather copies them in.

    On a GPU the copies of an update go on a stream of their own, and a gather waits for what it needs of it.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        *,
        home: torch.device,
        device: torch.device,
        pinned: bool,
        dtype_of: Callable[[Any], torch.dtype] = compute_dtype,
    ) -> None:
        self.tensors = {
            name: _zeros(padded_shape(one).numel(), dtype_of(one), device=home, pinned=pinned)
            for name, one in engine.items()
        }
        if home.type != device.type:
            self.host_bytes = sum(one.nbytes for one in self.tensors.values())
        self._engine, self._device = engine, device
        self._stream = torch.cuda.Stream(device) if home.type == "cuda" else None
        self._events: dict[str, Any] = {}
        self._staged = torch.empty(0)

    def write(self, name: str, begin: int, *, values: Tensor) -> None:
        target = self.tensors[name][begin : begin + values.numel()]
        if self._stream is None:
            target.copy_(values)
            return
        if self._staged.nbytes < target.nbytes:
            self._staged = allocate_host(target.nbytes, pinned=True)
        staged = self._staged[: target.nbytes].view(target.dtype).copy_(values)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._events[name] = self._stream.record_event()
        self._stream.synchronize()  # what is staged is the next one's; only the updating thread waits

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        one = self.tensors[name]
        if (event := self._events.get(name)) is not None:
            torch.cuda.current_stream().wait_event(event)
        shard = one.to(self._device, non_blocking=True) if one.device != self._device else one
        return shard.view(padded_shape(self._engine[name])).to(dtype)

    def whole(self, name: str) -> Tensor:
        return self.tensors[name][: local_shape(self._engine[name]).numel()]


def _zeros(  # signature: a tensor's
    numel: int, dtype: torch.dtype, *, device: torch.device, pinned: bool
) -> Tensor:
    if not pinned:
        return torch.zeros(numel, dtype=dtype, device=device)
    return allocate_host(numel * dtype.itemsize, pinned=True)[: numel * dtype.itemsize].view(dtype)
