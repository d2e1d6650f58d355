"""Sources from which FSDP2 gathers this rank's shards, instead of from its own parameters.

[Note: a shard that is elsewhere] In each all-gather, `fully_shard` looks up its extension points
`fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor of a shard. Here a plain tensor gets them
as attributes: the all-gather waits until the parameter is updated, and sends the offloaded shard in the
compute dtype.

The local tensor keeps the master's shape, dtype and device, so that reduced gradients arrive unchanged (for a
bf16 shard, FSDP2 would round them). It may be one element expanded to the shape: NaN, or the least integer,
so that it is never mistaken for the values.

Parameters that are sharded over fewer ranks after forward (`reshard_after_forward=<int>`) are gathered from
the shard kept after forward. FSDP2 has no extension point for this, so they get a subclass of FSDP2's class.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.offload.store import allocate_host_memory
from fullshard.torch_private.fsdp import (
    compute_dtype,
    engine_parameters,
    padded_shard_shape,
    replace_shard,
    shard_shape,
)
from fullshard.torch_private.tensors import dtensor_with_placements_of

Source = Callable[[torch.dtype], Tensor]


def iterate_sharded_parameters(model: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """Yields (unit number, name, FSDP2's object) of each sharded parameter, in the order of use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit, module in enumerate(m for m in model.modules() if isinstance(m, FSDPModule)):
        for one in engine_parameters(module):
            yield unit, names[id(one.sharded_param)], one


def master_dtype(engine_parameter: Any) -> torch.dtype:
    return engine_parameter.sharded_param.dtype


def redirect_all_gather(engine_parameter: Any, source: Source, *, local: Tensor | None) -> None:
    """Makes FSDP2 gather the result of `source`, not its own shard: see [Note: a shard that is elsewhere].

    source: called with the compute dtype; returns this rank's padded shard in it, on the device
    local: the fp32 master, which becomes the parameter's local tensor; None if it is not on the same device
    """
    parameter = cast(DTensor, engine_parameter.sharded_param)
    if local is None:
        one = _invalid_placeholder_value(parameter.dtype).to(parameter.device_mesh.device_type)
        local = one.expand(shard_shape(engine_parameter))
    local = local.view(shard_shape(engine_parameter))

    def pre_all_gather(
        mesh: object, size: torch.Size, stride: object, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:  # signature: FSDP2's
        return (source(compute_dtype(engine_parameter)),), None

    def post_all_gather(  # signature: FSDP2's
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0], ()) if out is None else None

    replace_shard(engine_parameter, local)
    local.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    local.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]


def dtensor_like(engine_parameter: Any, local: Tensor) -> DTensor:
    """Returns a DTensor placed like the parameter, whose local part is `local`, on any device or a drive.

    Its deep copy or pickle is a DTensor with memory of its own. Torch's own deep copy would hold no data for
    a tensor on a drive, and fail for a view into a larger tensor.
    """
    local = local.view(shard_shape(engine_parameter))
    like = engine_parameter.sharded_param

    def copy_to_cpu() -> DTensor:
        return dtensor_with_placements_of(like, local.to("cpu", copy=True))

    shard: Any = dtensor_with_placements_of(like, local)
    shard.__deepcopy__ = lambda _memo: copy_to_cpu()
    shard.__reduce_ex__ = lambda protocol: copy_to_cpu().__reduce_ex__(protocol)
    return shard


def _invalid_placeholder_value(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor(float("nan")).to(dtype)
    return torch.tensor(dtype is not torch.bool and torch.iinfo(dtype).min, dtype=dtype)


class GatherSource(Protocol):
    """The shards that FSDP2 gathers, by parameter name. One thread writes while another reads.

    host_bytes: host memory that the shards take; 0 if the device is the host
    """

    @property
    def host_bytes(self) -> int: ...

    def announce_update(self) -> None:
        """Prepares for an update, which writes all shards in the order of gathers."""
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
