"""Buffers for the few units whose shards are in memory while all are on the drive, and their eviction.

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
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fullshard.offload.host_memory import allocate_host_memory

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
