"""The few units whose shards are in memory while all are on the drive, and which goes for another.

[Note: units in memory] Each buffer holds one unit's own shards, as they are gathered. What an update has made
stays until it is gathered: an update that is further ahead of forward waits, so that nothing of it need be
read again. It goes on where somebody waits for it (who gathers in another order, or looks at the state), and
when for HELD_SECONDS nothing has come (a process that ends): then of what it has made goes what is gathered
last. Else that goes which was used longest ago: gathers go to and fro over the units, so of these its own is
farthest, too.

The engine has copied a unit's shards when it asks for another's, so only the unit asked for last is in use.
"""

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from fullshard.offload.host_memory import allocate_host

HELD_SECONDS = 2.0


@dataclass(eq=False)
class Buffer:
    """`missing`: elements of its unit that an update has still to put there."""

    memory: Tensor
    unit: int | None = None
    missing: int = 0
    reading: Future[None] | None = None
    writing: Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Something is read into it or written from it."""
        return any(one is not None and not one.done() for one in (self.reading, self.writing))

    def raise_failed(self) -> None:
        """Raises what was done with it last, if that failed: maybe nobody else comes."""
        for done in (self.reading, self.writing):
            if done is not None:
                done.result()


Transfer = Callable[[Buffer, int], Future[None]]  # of this unit
Wait = Callable[[threading.Condition, float], bool]


class UnitBuffers:
    """`count` of them, of `size_bytes`: see [Note: units in memory]. One thread makes, another gathers.

    `wait`: waits for a condition for at most this many seconds, and returns whether it was notified.
    """

    def __init__(self, count: int, size_bytes: int, *, pinned: bool, wait: Wait) -> None:
        self._wait = wait
        self._all = [
            Buffer(allocate_host(size_bytes, pinned=pinned)) for _ in range(count)
        ]  # the last used last
        self._changed = threading.Condition()
        self._in_use: int | None = None
        self._made: list[int] = []  # and not gathered since; what is gathered last is last
        self._due: set[int] = set()
        self._backwards = self._holds = False
        self._waited_for: list[int | None] = []

    @property
    def host_bytes(self) -> int:
        return sum(one.memory.nbytes for one in self._all)

    def begin(self, units: Iterable[int], *, backwards: bool) -> None:
        """An update will make these; `backwards`: in the order opposite to that of gathers. What one before
        has begun to make, and was broken off, is made anew."""
        with self._changed:
            for one in (one for one in self._all if one.missing):
                one.unit, one.missing = None, 0
            self._due, self._backwards, self._holds = set(units), backwards, not backwards
            self._made.clear()

    def settle(self) -> None:
        """Returns when nothing is read or written. Raises OffloadError for what failed."""
        with self._changed:
            self._holds = False
            while any(one.is_busy for one in self._all):
                self._changed.wait()
            for one in self._all:
                one.raise_failed()

    @contextmanager
    def hurried(self, unit: int | None) -> Generator[None]:
        """Meanwhile somebody waits for an update to make `unit`; None: for all of it."""
        with self._changed:
            self._waited_for.append(unit)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waited_for.remove(unit)

    def to_make(self, unit: int, *, elements: int) -> tuple[Buffer, bool]:
        """Where an update puts the unit, of which so many `elements` are to come; and if they begin to."""
        with self._changed:
            while (buffer := self._of(unit) or self._spare(made_too=not self._is_held)) is None or (
                buffer.is_busy
            ):
                if not self._wait(self._changed, HELD_SECONDS):
                    self._holds = False
            if buffer.missing:
                return buffer, False
            self._give_to(unit, buffer)
            buffer.missing = elements
            return buffer, True

    def made(self, buffer: Buffer, write: Transfer) -> None:
        """All of the unit is there, and is written behind it."""
        with self._changed:
            assert buffer.unit is not None, "it is made"
            buffer.writing = _told(self._changed, write(buffer, buffer.unit))
            self._due.discard(buffer.unit)
            self._made.insert(0 if self._backwards else len(self._made), buffer.unit)

    def in_use(self, unit: int) -> bool:
        """Whether it was asked for last."""
        return unit == self._in_use

    def use(self, unit: int, read: Transfer) -> Buffer:
        """The unit is gathered: its buffer, into which it may still be read."""
        with self._changed:
            if unit in self._made:
                self._made.remove(unit)
            self._in_use = unit
            self._changed.notify_all()
            while (buffer := self._of(unit) or self._spare(made_too=True)) is None or (
                buffer.unit != unit and buffer.is_busy
            ):
                self._changed.wait()
            if buffer.unit != unit:
                self._give_to(unit, buffer)
                buffer.reading = _told(self._changed, read(buffer, unit))
            self._all.remove(buffer)
            self._all.append(buffer)
            return buffer

    def read_ahead(self, unit: int, read: Transfer) -> None:
        """Where a buffer is idle, and one more for an update, and no update will make the unit anew."""
        with self._changed:
            idle = self._idle()
            if self._of(unit) is None and unit not in self._due and len(idle) > 1 and not idle[0].is_busy:
                self._give_to(unit, idle[0])
                idle[0].reading = _told(self._changed, read(idle[0], unit))

    @property
    def _is_held(self) -> bool:
        return self._holds and not any(one is None or one in self._due for one in self._waited_for)

    def _of(self, unit: int) -> Buffer | None:
        return next((one for one in self._all if one.unit == unit), None)

    def _idle(self) -> list[Buffer]:
        """What may go when nothing more is read or written there: that which is used last is last."""
        stays = (self._in_use, *self._made)
        return [one for one in self._all if not one.missing and (one.unit is None or one.unit not in stays)]

    def _spare(self, *, made_too: bool) -> Buffer | None:
        if idle := self._idle():
            return idle[0]
        made = (self._of(unit) for unit in reversed(self._made if made_too else ()))
        return next((one for one in made if one and one.unit != self._in_use and not one.is_busy), None)

    def _give_to(self, unit: int, buffer: Buffer) -> None:
        buffer.raise_failed()
        if buffer.unit in self._made:
            self._made.remove(buffer.unit)
        buffer.unit, buffer.reading, buffer.writing = unit, None, None


def _told(changed: threading.Condition, transfer: "Future[None]") -> "Future[None]":
    """The same, whose end wakes who waits."""

    def tell(_: "Future[None]") -> None:
        with changed:
            changed.notify_all()

    transfer.add_done_callback(tell)
    return transfer
