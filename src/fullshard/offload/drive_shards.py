"""Shards on the drive: written by each update, read before each all-gather; a few units are in memory.

[Note: units in memory] Each of UNIT_BUFFERS buffers holds one unit's shards, in the form in which they are
gathered. The least recently used buffer is read into next: gathers alternate between forward and backward
order, so its next use is also the farthest. An update makes one unit after the other in a buffer of its own,
which is written to the drive before the next unit is made. What was in memory before the update is dropped.

FSDP2 has copied a unit's shards when it requests those of another, so only the last requested unit is in use.

Only the thread that gathers uses the buffers, and only the one that publishes uses the buffer of its own. One
thread reads and one writes. A read waits for the last write of its unit.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.offload.drive import SYSTEM, DriveFile, DriveSystemCalls
from fullshard.offload.store import allocate_host_memory, as_memoryview, make_lazy_tensor
from fullshard.spec.groups import UNIT_BUFFERS, page_aligned_bytes
from fullshard.torch_private.fsdp import compute_dtype, padded_shard_shape, shard_shape


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
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-shards-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-shards-write")
        self._following = NextUnitPredictor()

    @property
    def host_bytes(self) -> int:
        return sum(one.memory.nbytes for one in self._buffers) + self._made.nbytes

    def announce_update(self) -> None:
        self._following.start_step()
        self._due = {number for number, unit in self._units.items() if unit.elements}
        self._made_unit = self._in_use = None
        for buffer in self._buffers:
            buffer.unit = None

    def publish_shard_elements(self, name: str, begin: int, *, values: Tensor) -> None:
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
        size = torch.Size([shard_shape(one).numel()])
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
        dtype, shape = self._dtype_of(one), padded_shard_shape(one)
        return memory[part][: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _read_flat_shard(self, name: str) -> Tensor:
        one, unit = self._engine[name], self._units[self._unit_of[name]]
        part, dtype = unit.parts[name], self._dtype_of(one)
        memory = allocate_host_memory(part.stop - part.start, pinned=False)
        self._file.read(as_memoryview(memory)[: part.stop - part.start], unit.offset + part.start)
        return memory[: shard_shape(one).numel() * dtype.itemsize].view(dtype)


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
