"""Sources from which FSDP2 gathers this rank's shards, instead of from its own parameters.

[Note: a shard that is elsewhere] In each all-gather, `fully_shard` looks up its extension points
`fsdp_pre_all_gather` and `fsdp_post_all_gather` on the local tensor of a shard. Here a plain tensor gets them
as attributes: the all-gather waits until the parameter is updated, and sends the offloaded shard in the
compute dtype.

The local tensor keeps the master's shape, dtype and device, so that reduced gradients arrive unchanged (for a
bf16 shard, FSDP2 would round them). It may be one element expanded to the shape: NaN, or the least integer,
so that it is never mistaken for the values.

[Note: units in memory] For shards on a drive, each of UNIT_BUFFERS buffers holds one unit's shards, in the
form in which they are gathered. The least recently used buffer is read into next: gathers alternate between
forward and backward order, so its next use is also the farthest. An update makes one unit after the other in
a buffer of its own, which is written to the drive before the next unit is made. What was in memory before the
update is dropped.

FSDP2 has copied a unit's shards when it requests those of another, so only the last requested unit is in use.
Only the thread that gathers uses the buffers, and only the one that publishes uses the buffer of its own. One
thread reads and one writes. A read waits for the last write of its unit.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.host import allocate_host_memory, as_memoryview, make_device_thread
from fullshard.offload.drive import SYSTEM, DriveFile, DriveSystemCalls
from fullshard.offload.store import make_lazy_tensor
from fullshard.spec.groups import UNIT_BUFFERS, page_aligned_bytes
from fullshard.torch_private import fsdp
from fullshard.torch_private.tensors import dtensor_with_placements_of

_STAGED_BYTES = 32 << 20  # of each pinned buffer through which an update writes shards on a GPU

Source = Callable[[torch.dtype], Tensor]


def iterate_sharded_parameters(model: nn.Module) -> Iterator[tuple[int, str, Any]]:
    """Yields (unit number, name, FSDP2's object) of each sharded parameter, in the order of use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit, module in enumerate(fsdp.list_units(model)):
        for one in fsdp.engine_parameters(module):
            yield unit, names[id(one.sharded_param)], one


def master_dtype(engine_parameter: Any) -> torch.dtype:
    return engine_parameter.sharded_param.dtype


def redirect_all_gather(engine_parameter: Any, source: Source, *, local: Tensor | None) -> None:
    """Makes FSDP2 gather the result of `source`, not its own shard: see [Note: a shard that is elsewhere].

    source: called with the compute dtype; returns this rank's padded shard in it, on the device
    local: the master, which becomes the parameter's local tensor; None if it is not on the device
    """
    parameter = cast(DTensor, engine_parameter.sharded_param)
    if local is None:
        one = _invalid_placeholder_value(parameter.dtype).to(parameter.device_mesh.device_type)
        local = one.expand(fsdp.shard_shape(engine_parameter))
    local = local.view(fsdp.shard_shape(engine_parameter))

    def pre_all_gather(
        mesh: object, size: torch.Size, stride: object, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:  # signature: FSDP2's
        return (source(fsdp.compute_dtype(engine_parameter)),), None

    def post_all_gather(  # signature: FSDP2's
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return (outputs[0], ()) if out is None else None

    fsdp.replace_shard(engine_parameter, local)
    local.fsdp_pre_all_gather = pre_all_gather  # pyright: ignore[reportAttributeAccessIssue]
    local.fsdp_post_all_gather = post_all_gather  # pyright: ignore[reportAttributeAccessIssue]


def dtensor_like(engine_parameter: Any, local: Tensor) -> DTensor:
    """Returns a DTensor with the parameter's placements and `local` as its part, on any device or a drive.

    Its deep copy or pickle is a DTensor with memory of its own. Torch's own deep copy would hold no data for
    a tensor on a drive, and fail for a view into a larger tensor.
    """
    local = local.view(fsdp.shard_shape(engine_parameter))
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

    def prepare_for_update(self) -> None:
        """Drops shards that were read ahead, because an update now writes all shards in gather order."""
        ...

    def write_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
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

    def prepare_for_update(self) -> None: ...

    def wait_for_writes(self) -> None: ...

    def make_close_function(self) -> Callable[[], None]:
        return lambda: None


class MasterCastingSource(_InMemorySource):
    """Source whose masters are in device memory: each gather casts them, as FSDP2 does."""

    def __init__(self, masters: dict[str, Tensor], engine: dict[str, Any]) -> None:
        self._masters, self._engine = masters, engine

    def write_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None: ...

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        one, master = self._engine[name], self._masters[name]
        if fsdp.shard_shape(one) == fsdp.padded_shard_shape(one):
            return master.view(fsdp.padded_shard_shape(one)).to(dtype)
        whole = master.new_zeros(fsdp.padded_shard_shape(one), dtype=dtype)
        whole.view(-1)[: master.numel()].copy_(master)
        return whole


class ShardCopies(_InMemorySource):
    """Copies of the shards on the device, or in (pinned) host memory, from where each gather copies them.

    On a GPU, an update writes copies on a stream of its own, and a gather waits for the event of each shard.
    Values are cast into one of two pinned buffers while the other is copied to the device.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        *,
        home: torch.device,
        device: torch.device,
        pinned: bool,
        dtype_of: Callable[[Any], torch.dtype] = fsdp.compute_dtype,
    ) -> None:
        self.tensors = {
            name: _allocate_zeros(
                fsdp.padded_shard_shape(one).numel(), dtype_of(one), device=home, pinned=pinned
            )
            for name, one in engine.items()
        }
        if home.type != device.type:
            self.host_bytes = sum(one.nbytes for one in self.tensors.values())
        self._engine, self._device = engine, device
        self._stream = torch.cuda.Stream(device) if home.type == "cuda" and engine else None
        self._events: dict[str, Any] = {}
        if self._stream is not None:
            size = min(max(one.nbytes for one in self.tensors.values()), _STAGED_BYTES)
            self._staged = [allocate_host_memory(size, pinned=True) for _ in range(2)]
            self._staged_events = [self._stream.record_event()] * 2  # of the copies from these

    def write_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
        target = self.tensors[name][begin : begin + values.numel()]
        if self._stream is None:
            target.copy_(values)
            return
        numel = self._staged[0].nbytes // target.itemsize
        for part, into in zip(values.split(numel), target.split(numel), strict=True):
            self._staged.reverse()
            self._staged_events.reverse()
            self._staged_events[0].synchronize()  # only the updating thread waits
            staged = self._staged[0][: into.nbytes].view(into.dtype).copy_(part)
            with torch.cuda.stream(self._stream):
                into.copy_(staged, non_blocking=True)
                self._events[name] = self._staged_events[0] = self._stream.record_event()

    def wait_for_writes(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        one = self.tensors[name]
        if (event := self._events.get(name)) is not None:
            torch.cuda.current_stream().wait_event(event)
        shard = one.to(self._device, non_blocking=True) if one.device != self._device else one
        return shard.view(fsdp.padded_shard_shape(self._engine[name])).to(dtype)

    def flat_unpadded_shard(self, name: str) -> Tensor:
        return self.tensors[name][: fsdp.shard_shape(self._engine[name]).numel()]


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
                self.shards.write_shard_elements(name, 0, values=value)

    def parameter_dtensor(self, name: str) -> DTensor:
        """Returns a parameter's values as a DTensor, not to be changed. From a drive, each use reads them."""
        return dtensor_like(self.engine[name], self.shards.flat_unpadded_shard(name))

    def iterate_tensors_to_fill(self) -> Iterator[dict[str, Tensor]]:
        """Yields tensors to fill with values, unit by unit, like `OffloadedState.iterate_tensors_to_fill`."""
        self.shards.prepare_for_update()
        for own in self._units.values():
            new = {
                name: torch.empty(fsdp.shard_shape(one).numel(), dtype=master_dtype(one))
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


@dataclass(eq=False)
class _UnitBuffer:
    """A buffer for the shards of `unit`, which `reading` reads from the drive; None for no unit."""

    memory: Tensor
    unit: int | None = None
    reading: Future[None] | None = None


@dataclass(eq=False)
class _UnitFileRegion:
    """A unit's region of the file.

    elements: elements that an update writes
    parts: slice of the region's bytes, by parameter
    """

    offset: int = 0
    size_bytes: int = 0
    elements: int = 0
    parts: dict[str, slice] = field(default_factory=dict[str, slice])


class DriveShards:
    """`GatherSource` in one file, whose content is not used after the process ends.

    While a unit is gathered, the unit that followed it last time is read ahead: see [Note: units in memory].

    engine: FSDP2's object of each parameter, by name
    units: number of the unit that gathers each parameter, by name, counted from 0
    dtype_of: returns the dtype of a parameter in the file
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        units: Mapping[str, int],
        *,
        path: Path,
        device: torch.device,
        dtype_of: Callable[[Any], torch.dtype] = fsdp.compute_dtype,
        system: DriveSystemCalls = SYSTEM,
    ) -> None:
        self._engine, self._unit_of, self._device = engine, units, device
        self._dtype_of = dtype_of
        self._units: dict[int, _UnitFileRegion] = {}
        for name, one in engine.items():
            unit = self._units.setdefault(units[name], _UnitFileRegion())
            begin = unit.size_bytes
            unit.size_bytes += page_aligned_bytes(
                fsdp.padded_shard_shape(one).numel(), dtype_of(one).itemsize
            )
            unit.parts[name] = slice(begin, unit.size_bytes)
            unit.elements += fsdp.shard_shape(one).numel()
        end = 0
        for unit in self._units.values():
            unit.offset, unit.size_bytes = end, page_aligned_bytes(max(unit.size_bytes, 1), 1)
            end += unit.size_bytes
        largest = max((unit.size_bytes for unit in self._units.values()), default=1)
        size = max(end, page_aligned_bytes(1, 1))
        if path.exists() and path.stat().st_size != size:
            path.unlink()
        self._file = DriveFile.open_or_create(path, size, system=system)
        pinned, count = device.type == "cuda", min(UNIT_BUFFERS, len(self._units))
        # The most recently used last.
        self._buffers = [_UnitBuffer(allocate_host_memory(largest, pinned=pinned)) for _ in range(count)]
        self._in_use: int | None = None
        self._made = allocate_host_memory(largest, pinned=False)
        self._made_unit: int | None = None
        self._missing = 0  # elements of `_made_unit` that are not published yet
        self._due: set[int] = set()  # units that an update has yet to make
        self._writes: dict[int, Future[None]] = {}
        self._last_write: Future[None] | None = None
        self._reader = make_device_thread("offload-shards-read")
        self._writer = make_device_thread("offload-shards-write")
        self._following = NextUnitPredictor()

    @property
    def host_bytes(self) -> int:
        return sum(one.memory.nbytes for one in self._buffers) + self._made.nbytes

    def prepare_for_update(self) -> None:
        self._following.start_step()
        self._due = {number for number, unit in self._units.items() if unit.elements}
        self._made_unit = self._in_use = None
        for buffer in self._buffers:
            buffer.unit = None

    def write_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
        number = self._unit_of[name]
        unit = self._units[number]
        if self._made_unit != number:
            if self._last_write is not None:
                self._last_write.result()
            self._made_unit, self._missing = number, unit.elements
            self._made[: unit.size_bytes].zero_()  # padding of the shards
        target = self._shard_view(self._made, name).view(-1)[begin : begin + values.numel()]
        target.copy_(values)
        self._missing -= values.numel()
        if not self._missing:
            self._last_write = self._writes[number] = self._writer.submit(
                self._file.write, as_memoryview(self._made[: unit.size_bytes]), unit.offset
            )
            self._made_unit = None
            self._due.discard(number)

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        number, is_gpu = self._unit_of[name], self._device.type == "cuda"
        if number != self._in_use:
            if is_gpu:
                torch.cuda.current_stream().synchronize()  # its copies have ended, so the buffer is free
            following = self._following.record_gather_and_predict_next(number)
            buffer = self._find_buffer_or_start_read(number)
            self._buffers.remove(buffer)
            self._buffers.append(buffer)
            self._in_use = number
            if following is not None and following not in self._due and len(self._buffers) > 2:
                self._find_buffer_or_start_read(following)
        buffer = self._buffers[-1]
        assert buffer.reading is not None, "the buffer of a unit is read into"
        buffer.reading.result()
        shard = self._shard_view(buffer.memory, name)
        return (shard.to(self._device, non_blocking=True) if is_gpu else shard).to(dtype)

    def flat_unpadded_shard(self, name: str) -> Tensor:
        one = self._engine[name]
        size = torch.Size([fsdp.shard_shape(one).numel()])
        return make_lazy_tensor(size, self._dtype_of(one), read=partial(self._read_flat_shard, name))

    def wait_for_writes(self) -> None:
        for writing in self._writes.values():
            writing.result()

    def make_close_function(self) -> Callable[[], None]:
        reader, writer, file = self._reader, self._writer, self._file

        def close_threads_and_file() -> None:
            reader.shutdown(cancel_futures=True)
            writer.shutdown()
            file.close()

        return close_threads_and_file

    def _find_buffer_or_start_read(self, number: int) -> _UnitBuffer:
        """Returns a unit's buffer. If none has the unit, it is read into the least recently used one."""
        for buffer in self._buffers:
            if buffer.unit == number:
                return buffer
        buffer = self._buffers[0]
        buffer.unit = number
        # The reader reads one unit after the other, so an earlier read into this buffer ends before.
        buffer.reading = self._reader.submit(self._read_unit, buffer.memory, number)
        return buffer

    def _read_unit(self, memory: Tensor, number: int) -> None:
        if (writing := self._writes.get(number)) is not None:
            writing.result()
        unit = self._units[number]
        self._file.read(as_memoryview(memory[: unit.size_bytes]), unit.offset)

    def _shard_view(self, memory: Tensor, name: str) -> Tensor:
        one, part = self._engine[name], self._units[self._unit_of[name]].parts[name]
        dtype, shape = self._dtype_of(one), fsdp.padded_shard_shape(one)
        return memory[part][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _read_flat_shard(self, name: str) -> Tensor:
        one, unit = self._engine[name], self._units[self._unit_of[name]]
        part, dtype = unit.parts[name], self._dtype_of(one)
        memory = allocate_host_memory(part.stop - part.start, pinned=False)
        self._file.read(as_memoryview(memory)[: part.stop - part.start], unit.offset + part.start)
        return memory[: fsdp.shard_shape(one).numel() * dtype.itemsize].view(dtype)


class NextUnitPredictor:
    """Predicts which unit is gathered next, from the order of gathers in earlier steps.

    If no update ever begins, all gathers count as one step.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int | None, int], int] = {}
        self._pair: tuple[int | None, int] | None = None
        self._count = self._length = 0  # gathers of this step so far, and of the previous step

    def start_step(self) -> None:
        """Starts a step: its first gather comes after an update, and does not follow the previous gather."""
        self._pair, self._length, self._count = None, self._count, 0

    def record_gather_and_predict_next(self, unit: int) -> int | None:
        """Records a gather of `unit`. Returns the predicted next unit; None if unknown, or the step ends."""
        before = None if self._pair is None else self._pair[1]
        if self._pair is not None:
            self._next[self._pair] = unit
        self._pair, self._count = (before, unit), self._count + 1
        return None if self._count == self._length else self._next.get(self._pair)
