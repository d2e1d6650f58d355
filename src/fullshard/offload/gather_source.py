"""Sources from which FSDP2 gathers this rank's shards, instead of from its own parameters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.offload.fsdp_params import dtensor_like, master_dtype
from fullshard.offload.host_memory import allocate_host_memory
from fullshard.torch_private.fsdp import compute_dtype, padded_shard_shape, shard_shape


class GatherSource(Protocol):
    """The shards that FSDP2 gathers, by parameter name. One thread writes while another reads.

    host_bytes: host memory that the shards take; 0 if the device is the host
    """

    @property
    def host_bytes(self) -> int: ...

    def announce_update(self) -> None:
        """Prepares for an update, which writes all shards in the order of gathers."""
        ...

    def expedite_publishing(self, unit: int | None) -> AbstractContextManager[None]:
        """While the context is open, an update writes `unit` (None: all) without waiting for gathers."""
        ...

    def publish_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
        """Sets elements of the flat shard, from `begin` on, to `values`, which have the master's dtype."""
        ...

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns the padded shard, on the device, in `dtype`. Called once its unit is written."""
        ...

    def wait_for_writes(self) -> None:
        """Waits until all written shards are stored. Raises OffloadError if a transfer has failed."""
        ...

    def make_close_function(self) -> Callable[[], None]:
        """Returns a function that closes files and threads. It must not hold a reference to the source."""
        ...


class SeparateShardSource(GatherSource, Protocol):
    """Source of shards that are stored apart from the masters, in a dtype of their own."""

    def flat_unpadded_shard(self, name: str) -> Tensor:
        """Returns the flat shard without padding, not to be changed. From a drive it is read at each use."""
        ...


class _InMemorySource:
    """Base of sources in memory, which never wait and have nothing to close."""

    host_bytes = 0

    def announce_update(self) -> None: ...

    def expedite_publishing(self, unit: int | None) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_for_writes(self) -> None: ...

    def make_close_function(self) -> Callable[[], None]:
        return lambda: None


class MasterCastingSource(_InMemorySource):
    """Source whose masters are in device memory: each gather casts them, as FSDP2 does."""

    def __init__(self, masters: dict[str, Tensor], engine: dict[str, Any]) -> None:
        self._masters, self._engine = masters, engine

    def publish_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None: ...

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        one, master = self._engine[name], self._masters[name]
        if shard_shape(one) == padded_shard_shape(one):
            return master.view(padded_shard_shape(one)).to(dtype)
        whole = master.new_zeros(padded_shard_shape(one), dtype=dtype)
        whole.view(-1)[: master.numel()].copy_(master)
        return whole


class ShardCopies(_InMemorySource):
    """Copies of the shards on the device, or in (pinned) host memory, from where each gather copies them.

    On a GPU, an update writes copies on a stream of its own, and a gather waits for the event of each shard.
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
            name: _allocate_zeros(padded_shard_shape(one).numel(), dtype_of(one), device=home, pinned=pinned)
            for name, one in engine.items()
        }
        if home.type != device.type:
            self.host_bytes = sum(one.nbytes for one in self.tensors.values())
        self._engine, self._device = engine, device
        self._stream = torch.cuda.Stream(device) if home.type == "cuda" else None
        self._events: dict[str, Any] = {}
        self._staged = torch.empty(0)

    def publish_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
        target = self.tensors[name][begin : begin + values.numel()]
        if self._stream is None:
            target.copy_(values)
            return
        if self._staged.nbytes < target.nbytes:
            self._staged = allocate_host_memory(target.nbytes, pinned=True)
        staged = self._staged[: target.nbytes].view(target.dtype).copy_(values)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            self._events[name] = self._stream.record_event()
        self._stream.synchronize()  # the next copy reuses the staging buffer; only the updating thread waits

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        one = self.tensors[name]
        if (event := self._events.get(name)) is not None:
            torch.cuda.current_stream().wait_event(event)
        shard = one.to(self._device, non_blocking=True) if one.device != self._device else one
        return shard.view(padded_shard_shape(self._engine[name])).to(dtype)

    def flat_unpadded_shard(self, name: str) -> Tensor:
        return self.tensors[name][: shard_shape(self._engine[name]).numel()]


class OffloadedFrozenParameters:
    """Offloaded frozen parameters of one sharded model on one rank, in their own dtype.

    engine: FSDP2's object of each frozen parameter, by name, in the order of use
    """

    def __init__(
        self, engine: Mapping[str, Any], units: Mapping[str, int], *, shards: SeparateShardSource
    ) -> None:
        self.engine, self.shards = engine, shards
        self._units: dict[int, dict[str, Any]] = {}  # `engine` by unit
        for name, one in engine.items():
            self._units.setdefault(units[name], {})[name] = one

    def store_unit_shards(self, values: Mapping[str, Tensor]) -> None:
        """Stores the shards of frozen parameters in `values`, which are a unit's flat shards by name."""
        for name, value in values.items():
            if name in self.engine and value.numel():
                self.shards.publish_shard_elements(name, 0, values=value)

    def parameter_dtensor(self, name: str) -> DTensor:
        """Returns a parameter's values as a DTensor, not to be changed. From a drive, each use reads them."""
        return dtensor_like(self.engine[name], self.shards.flat_unpadded_shard(name))

    def iterate_tensors_to_fill(self) -> Iterator[dict[str, Tensor]]:
        """Yields tensors to fill with values, unit by unit, like `OffloadedState.iterate_tensors_to_fill`."""
        self.shards.announce_update()
        with self.shards.expedite_publishing(None):  # no all-gather runs meanwhile
            for own in self._units.values():
                new = {
                    name: torch.empty(shard_shape(one).numel(), dtype=master_dtype(one))
                    for name, one in own.items()
                }
                yield {name: dtensor_like(one, new[name]) for name, one in own.items()}
                self.store_unit_shards(new)
        self.shards.wait_for_writes()


def _allocate_zeros(  # signature: a tensor's
    numel: int, dtype: torch.dtype, *, device: torch.device, pinned: bool
) -> Tensor:
    if not pinned:
        return torch.zeros(numel, dtype=dtype, device=device)
    return allocate_host_memory(numel * dtype.itemsize, pinned=True)[: numel * dtype.itemsize].view(dtype)
