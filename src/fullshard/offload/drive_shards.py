"""Shards on the drive: read before each all-gather, written by each update; a few units are in memory.

[Note: units in memory] Each buffer holds one unit's shards, in the form in which they are gathered. Shards
that an update has made stay until they are gathered. If they fill all buffers, the update waits, so that none
need to be read again. The wait ends when another thread waits for the update (for a gather in another order,
or to read the state), or after HELD_SECONDS without a change (in a process that is ending). Of the shards
that the update has made, those gathered last are then evicted.

Otherwise the least recently used unit is evicted. Gathers alternate between forward and backward order, so
its next use is also the farthest.

FSDP2 has copied a unit's shards when it requests those of another, so only the last requested unit is in use.
"""

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.offload.drive import SYSTEM, DriveFile, DriveSystemCalls
from fullshard.offload.lazy_tensor import make_lazy_tensor
from fullshard.offload.store import allocate_host_memory, as_memoryview
from fullshard.spec.groups import UNIT_BUFFERS, page_aligned_bytes
from fullshard.torch_private.fsdp import compute_dtype, padded_shard_shape, shard_shape

HELD_SECONDS = 2.0


@dataclass(eq=False)
class UnitBuffer:
    """A buffer for one unit's shards, of which an update has yet to write `missing` elements."""

    memory: Tensor
    unit: int | None = None
    missing: int = 0
    reading: Future[None] | None = None
    writing: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """True while the buffer is being read into or written to the drive."""
        return any(one is not None and not one.done() for one in (self.reading, self.writing))

    def raise_transfer_error(self) -> None:
        """Raises the error of the last read or write, if it has failed."""
        for done in (self.reading, self.writing):
            if done is not None:
                done.result()


Transfer = Callable[[UnitBuffer, int], Future[None]]  # takes the buffer and the unit's number
Wait = Callable[[threading.Condition, float], bool]  # at most this many seconds; True if it was notified


class UnitBuffers:
    """Buffers for one thread that makes shards and one thread that gathers. See [Note: units in memory]."""

    def __init__(self, count: int, size_bytes: int, *, pinned: bool, wait: Wait) -> None:
        self._wait = wait
        # The most recently used last.
        self._all = [UnitBuffer(allocate_host_memory(size_bytes, pinned=pinned)) for _ in range(count)]
        self._changed = threading.Condition()
        self._in_use: int | None = None
        self._made: list[int] = []  # not gathered since; in the order of gathers
        self._due: set[int] = set()
        self._holds = False
        self._waited_for: list[int | None] = []

    @property
    def host_bytes(self) -> int:
        return sum(one.memory.nbytes for one in self._all)

    def announce_update(self, units: Iterable[int]) -> None:
        """Prepares for an update that will make these units, and discards units that are partly made."""
        with self._changed:
            for one in (one for one in self._all if one.missing):
                one.unit, one.missing = None, 0
            self._due, self._holds = set(units), True
            self._made.clear()

    def wait_for_transfers(self) -> None:
        """Waits until no read or write runs. Raises OffloadError if one has failed."""
        with self._changed:
            self._holds = False
            while any(one.is_busy for one in self._all):
                self._changed.wait()
            for one in self._all:
                one.raise_transfer_error()

    @contextmanager
    def expedite_unit(self, unit: int | None) -> Generator[None]:
        """While the context is open, an update makes `unit` (None: all units) without waiting for gathers."""
        with self._changed:
            self._waited_for.append(unit)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waited_for.remove(unit)

    def buffer_to_fill(self, unit: int, *, elements: int) -> tuple[UnitBuffer, bool]:
        """Returns the buffer in which an update makes a unit of `elements`, and True if it is a new one."""
        with self._changed:
            while (
                buffer := self._find_buffer_of_unit(unit)
                or self._choose_buffer_to_reuse(made_too=not self._update_waits_for_gathers)
            ) is None or (buffer.is_busy):
                if not self._wait(self._changed, HELD_SECONDS):
                    self._holds = False
            if buffer.missing:
                return buffer, False
            self._assign_buffer_to_unit(unit, buffer)
            buffer.missing = elements
            return buffer, True

    def start_write_to_drive(self, buffer: UnitBuffer, write: Transfer) -> None:
        """Marks the buffer's unit as made, and starts its write to the drive."""
        with self._changed:
            assert buffer.unit is not None, "it is made"
            buffer.writing = _notify_when_done(self._changed, write(buffer, buffer.unit))
            self._due.discard(buffer.unit)
            self._made.append(buffer.unit)

    def is_last_gathered_unit(self, unit: int) -> bool:
        """Returns True if the unit is the last that `find_buffer_or_start_read` returned."""
        return unit == self._in_use

    def find_buffer_or_start_read(self, unit: int, read: Transfer) -> UnitBuffer:
        """Returns the buffer of a unit that is about to be gathered. A read into it may still be running."""
        with self._changed:
            if unit in self._made:
                self._made.remove(unit)
            self._in_use = unit
            self._changed.notify_all()
            while (
                buffer := self._find_buffer_of_unit(unit) or self._choose_buffer_to_reuse(made_too=True)
            ) is None or (buffer.unit != unit and buffer.is_busy):
                self._changed.wait()
            if buffer.unit != unit:
                self._assign_buffer_to_unit(unit, buffer)
                buffer.reading = _notify_when_done(self._changed, read(buffer, unit))
            self._all.remove(buffer)
            self._all.append(buffer)
            return buffer

    def prefetch_unit(self, unit: int, read: Transfer) -> None:
        """Starts to read a unit into an idle buffer, unless an update will make it, or needs the buffer."""
        with self._changed:
            idle = self._list_reusable_buffers()
            has_idle = len(idle) > 1 and not idle[0].is_busy
            if has_idle and unit not in self._due and self._find_buffer_of_unit(unit) is None:
                self._assign_buffer_to_unit(unit, idle[0])
                idle[0].reading = _notify_when_done(self._changed, read(idle[0], unit))

    @property
    def _update_waits_for_gathers(self) -> bool:
        return self._holds and not any(one is None or one in self._due for one in self._waited_for)

    def _find_buffer_of_unit(self, unit: int) -> UnitBuffer | None:
        return next((one for one in self._all if one.unit == unit), None)

    def _list_reusable_buffers(self) -> list[UnitBuffer]:
        """Returns the buffers that can be reused once they are not busy, the most recently used last."""
        stays = (self._in_use, *self._made)
        return [one for one in self._all if not one.missing and (one.unit is None or one.unit not in stays)]

    def _choose_buffer_to_reuse(self, *, made_too: bool) -> UnitBuffer | None:
        if idle := self._list_reusable_buffers():
            return idle[0]
        made = (self._find_buffer_of_unit(unit) for unit in reversed(self._made if made_too else ()))
        return next((one for one in made if one and one.unit != self._in_use and not one.is_busy), None)

    def _assign_buffer_to_unit(self, unit: int, buffer: UnitBuffer) -> None:
        buffer.raise_transfer_error()
        if buffer.unit in self._made:
            self._made.remove(buffer.unit)
        buffer.unit, buffer.reading, buffer.writing = unit, None, None


def _notify_when_done(changed: threading.Condition, transfer: "Future[None]") -> "Future[None]":
    """Makes the end of the transfer wake all threads that wait for `changed`. Returns the transfer."""

    def notify_waiting_threads(_: "Future[None]") -> None:
        with changed:
            changed.notify_all()

    transfer.add_done_callback(notify_waiting_threads)
    return transfer


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
