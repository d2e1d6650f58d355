"""Shards on the drive: read ahead of each all-gather, written once a step; a few units are in memory.

[Note: units in memory] Each of the SLOTS buffers holds one unit's own shards, as they are gathered: put there
by an update (then it is written behind it), or read. A unit that an update has just made is gathered from its
buffer. While a unit is gathered the one that came after it the last time is read. The engine has copied a
unit's shards when it asks for another's, so only the unit asked for last is in use.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullshard.offload.drive import SYSTEM, DriveFile, System
from fullshard.offload.engine import own_shape, padded_shape
from fullshard.offload.manifest import digest, other_bytes
from fullshard.offload.shards import computed_in
from fullshard.offload.slabs import bytes_of, slab
from fullshard.spec.groups import part_bytes

SLOTS = 3


@dataclass(eq=False)
class _Unit:
    """Its bytes in the file, what of them an update has still to publish, and the digest of its bytes."""

    offset: int
    size_bytes: int
    elements: int
    missing: int = 0
    digest: str | None = None


@dataclass(eq=False)
class _Buffer:
    memory: Tensor
    unit: int | None = None
    reading: Future[None] | None = None
    writing: Future[None] | None = None

    def wait(self) -> None:
        """Until nothing is read into it or written from it."""
        for doing in (self.reading, self.writing):
            if doing is not None:
                doing.result()

    @property
    def is_busy(self) -> bool:
        return any(one is not None and not one.done() for one in (self.reading, self.writing))


class DriveShards:
    """`Shards` in one file. `units`: of each parameter, which unit gathers it, counted from 0.

    `verify`: what is read is held against the digest of what was written.

    One thread publishes, unit after unit, while another gives; of a unit that is being published nothing is
    given. Nothing in the file outlives the process that wrote it: all is published anew at a start.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        units: Mapping[str, int],
        *,
        path: Path,
        device: torch.device,
        verify: bool = False,
        system: System = SYSTEM,
    ) -> None:
        self._engine, self._unit_of, self._device, self._verify = engine, units, device, verify
        self._begins: dict[str, int] = {}
        self._units: dict[int, _Unit] = {}
        end = 0
        for unit in dict.fromkeys(units.values()):
            size = elements = 0
            for name in (name for name, own in units.items() if own == unit):
                self._begins[name] = size
                size += part_bytes(padded_shape(engine[name]).numel(), computed_in(engine[name]).itemsize)
                elements += own_shape(engine[name]).numel()
            self._units[unit] = _Unit(end, part_bytes(max(size, 1), 1), elements)
            end += self._units[unit].size_bytes
        largest = max((unit.size_bytes for unit in self._units.values()), default=1)
        size = max(end, part_bytes(1, 1))
        if path.exists() and path.stat().st_size != size:
            path.unlink()
        self._file = DriveFile.create(path, size, system=system)
        pinned = device.type == "cuda"
        count = min(SLOTS, len(self._units)) or 1
        self._buffers = [_Buffer(slab(largest, pinned=pinned)) for _ in range(count)]  # the last used last
        self._lock = threading.Condition()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-shards-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-shards-write")
        self._in_use: int | None = None
        self._before: int | None = None
        self._after: dict[tuple[int | None, int | None], int] = {}

    @property
    def host_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def publish(self, name: str, begin: int, *, values: Tensor) -> None:
        number = self._unit_of[name]
        unit = self._units[number]
        with self._lock:
            buffer = self._buffer_of(number)
            if not unit.missing:
                if buffer is not None:
                    buffer.wait()
                buffer = buffer or self._free(number)
                unit.missing = unit.elements
                buffer.memory[: unit.size_bytes].zero_()  # what pads a shard
        assert buffer is not None, "a unit that is being published keeps its buffer"
        target = self._view(buffer, name).view(-1)[begin : begin + values.numel()]
        target.copy_(values)
        unit.missing -= values.numel()
        if not unit.missing:
            buffer.writing = self._writer.submit(self._write, buffer, unit)
            with self._lock:
                self._lock.notify_all()

    def give(self, name: str, dtype: torch.dtype) -> Tensor:
        number = self._unit_of[name]
        with self._lock:
            if number != self._in_use:
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # what it copied from may be used again
                self._after[self._before, self._in_use] = number
                self._before, self._in_use = self._in_use, number
                self._lock.notify_all()
            buffer = self._loaded(number)
        if buffer.reading is not None:
            buffer.reading.result()
        self._read_ahead()
        shard = self._view(buffer, name)
        return (shard.to(self._device, non_blocking=True) if self._device.type == "cuda" else shard).to(dtype)

    def settle(self) -> None:
        """Returns when all that was published is on the drive. Raises OffloadError."""
        for buffer in self._buffers:
            buffer.wait()

    def closing(self) -> Callable[[], None]:
        reader, writer, file = self._reader, self._writer, self._file

        def close() -> None:
            reader.shutdown(cancel_futures=True)
            writer.shutdown()
            file.close()

        return close

    def _view(self, buffer: _Buffer, name: str) -> Tensor:
        one = self._engine[name]
        dtype, shape = computed_in(one), padded_shape(one)
        begin = self._begins[name]
        return buffer.memory[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def _buffer_of(self, number: int) -> _Buffer | None:
        return next((one for one in self._buffers if one.unit == number), None)

    def _loaded(self, number: int) -> _Buffer:
        buffer = self._buffer_of(number)
        if buffer is None:
            buffer = self._free(number)
            buffer.reading = self._reader.submit(self._read, buffer, self._units[number])
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer

    def _read_ahead(self) -> None:
        """The unit that came next the last time, where a buffer is idle for it."""
        with self._lock:
            number = self._after.get((self._before, self._in_use))
            if number is None or self._buffer_of(number) is not None or self._units[number].missing:
                return
            idle = [one for one in self._buffers if self._is_idle(one)]
            if len(idle) > 1:  # one stays for an update
                idle[0].unit = number
                idle[0].reading = self._reader.submit(self._read, idle[0], self._units[number])

    def _free(self, number: int) -> _Buffer:
        """The buffer that is idle for the longest, now the unit's. Waits until there is one. Raises what was
        done with it last, if that failed: nobody else may come to ask."""
        while (buffer := next((one for one in self._buffers if self._is_idle(one)), None)) is None:
            busy = next((one for one in self._buffers if self._is_busy(one)), None)
            if busy is None:
                self._lock.wait()
            else:
                busy.wait()
        buffer.wait()
        buffer.unit = number
        return buffer

    def _is_idle(self, buffer: _Buffer) -> bool:
        return buffer.unit is None or (
            buffer.unit != self._in_use and not self._units[buffer.unit].missing and not buffer.is_busy
        )

    def _is_busy(self, buffer: _Buffer) -> bool:
        """It will be idle when what is done with it is through."""
        return buffer.unit != self._in_use and buffer.is_busy

    def _read(self, buffer: _Buffer, unit: _Unit) -> None:
        data = bytes_of(buffer.memory[: unit.size_bytes])
        self._file.read(data, unit.offset)
        if unit.digest is not None and digest(data) != unit.digest:
            raise other_bytes(self._file.path, f"bytes {unit.offset} to {unit.offset + unit.size_bytes}")

    def _write(self, buffer: _Buffer, unit: _Unit) -> None:
        data = bytes_of(buffer.memory[: unit.size_bytes])
        unit.digest = digest(data) if self._verify else None
        self._file.write(data, unit.offset)
