"""Shards on the drive: read before each all-gather, written by each update; a few units are in memory."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.offload.drive import SYSTEM, DriveFile, DriveSystemCalls
from fullshard.offload.host_memory import allocate_host_memory, as_memoryview
from fullshard.offload.lazy_tensor import make_lazy_tensor
from fullshard.offload.unit_buffers import UnitBuffer, UnitBuffers
from fullshard.spec.groups import UNIT_BUFFERS, page_aligned_bytes
from fullshard.torch_private.fsdp import compute_dtype, padded_shard_shape, shard_shape


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

    While a unit is gathered, the unit that followed it last time is read ahead: see [Note: units in memory]
    in `offload.unit_buffers`.

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
        dtype_of: Callable[[Any], torch.dtype] = compute_dtype,
        system: DriveSystemCalls = SYSTEM,
    ) -> None:
        self._engine, self._unit_of, self._device = engine, units, device
        self._dtype_of = dtype_of
        self._units: dict[int, _UnitFileRegion] = {}
        for name, one in engine.items():
            unit = self._units.setdefault(units[name], _UnitFileRegion())
            begin = unit.size_bytes
            unit.size_bytes += page_aligned_bytes(padded_shard_shape(one).numel(), dtype_of(one).itemsize)
            unit.parts[name] = slice(begin, unit.size_bytes)
            unit.elements += shard_shape(one).numel()
        end = 0
        for unit in self._units.values():
            unit.offset, unit.size_bytes = end, page_aligned_bytes(max(unit.size_bytes, 1), 1)
            end += unit.size_bytes
        largest = max((unit.size_bytes for unit in self._units.values()), default=1)
        size = max(end, page_aligned_bytes(1, 1))
        if path.exists() and path.stat().st_size != size:
            path.unlink()
        self._file = DriveFile.open_or_create(path, size, system=system)
        count = min(UNIT_BUFFERS, len(self._units)) or 1
        self._buffers = UnitBuffers(count, largest, pinned=device.type == "cuda", wait=system.wait)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-shards-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-shards-write")
        self._following = NextUnitPredictor()

    @property
    def host_bytes(self) -> int:
        return self._buffers.host_bytes

    def announce_update(self) -> None:
        self._following.start_step()
        self._buffers.announce_update(number for number, unit in self._units.items() if unit.elements)

    def expedite_publishing(self, unit: int | None) -> AbstractContextManager[None]:
        return self._buffers.expedite_unit(unit)

    def publish_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
        number = self._unit_of[name]
        unit = self._units[number]
        buffer, begins = self._buffers.buffer_to_fill(number, elements=unit.elements)
        if begins:
            buffer.memory[: unit.size_bytes].zero_()  # padding of the shards
        target = self._shard_view_in_buffer(buffer, name).view(-1)[begin : begin + values.numel()]
        target.copy_(values)
        buffer.missing -= values.numel()
        if not buffer.missing:
            self._buffers.start_write_to_drive(buffer, self._start_unit_write)

    def read_padded_shard(self, name: str, dtype: torch.dtype) -> Tensor:
        number, following = self._unit_of[name], None
        if not self._buffers.is_last_gathered_unit(number):
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # its copies have ended, so the buffer is free
            following = self._following.record_gather_and_predict_next(number)
        buffer = self._buffers.find_buffer_or_start_read(number, self._start_unit_read)
        if following is not None:
            self._buffers.prefetch_unit(following, self._start_unit_read)
        if buffer.reading is not None:
            buffer.reading.result()
        shard = self._shard_view_in_buffer(buffer, name)
        return (shard.to(self._device, non_blocking=True) if self._device.type == "cuda" else shard).to(dtype)

    def flat_unpadded_shard(self, name: str) -> Tensor:
        one = self._engine[name]
        size = torch.Size([shard_shape(one).numel()])
        return make_lazy_tensor(size, self._dtype_of(one), read=partial(self._read_flat_shard, name))

    def wait_for_writes(self) -> None:
        self._buffers.wait_for_transfers()

    def make_close_function(self) -> Callable[[], None]:
        reader, writer, file = self._reader, self._writer, self._file

        def close_threads_and_file() -> None:
            reader.shutdown(cancel_futures=True)
            writer.shutdown()
            file.close()

        return close_threads_and_file

    def _shard_view_in_buffer(self, buffer: UnitBuffer, name: str) -> Tensor:
        one, part = self._engine[name], self._units[self._unit_of[name]].parts[name]
        dtype, shape = self._dtype_of(one), padded_shard_shape(one)
        return buffer.memory[part][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _start_unit_read(self, buffer: UnitBuffer, unit: int) -> Future[None]:
        return self._reader.submit(self._read_unit, buffer, self._units[unit])

    def _start_unit_write(self, buffer: UnitBuffer, unit: int) -> Future[None]:
        return self._writer.submit(self._write_unit, buffer, self._units[unit])

    def _read_unit(self, buffer: UnitBuffer, unit: _UnitFileRegion) -> None:
        self._file.read(as_memoryview(buffer.memory[: unit.size_bytes]), unit.offset)

    def _read_flat_shard(self, name: str) -> Tensor:
        one, unit = self._engine[name], self._units[self._unit_of[name]]
        part, dtype = unit.parts[name], self._dtype_of(one)
        memory = allocate_host_memory(part.stop - part.start, pinned=False)
        self._file.read(as_memoryview(memory)[: part.stop - part.start], unit.offset + part.start)
        return memory[: shard_shape(one).numel() * dtype.itemsize].view(dtype)

    def _write_unit(self, buffer: UnitBuffer, unit: _UnitFileRegion) -> None:
        self._file.write(as_memoryview(buffer.memory[: unit.size_bytes]), unit.offset)


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
