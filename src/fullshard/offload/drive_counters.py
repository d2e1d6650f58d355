"""Counters of the bytes that a rank moves to and from its drive, counted at the system calls."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from fullshard.offload.drive import System
from fullshard.spec.measurement import DriveBytes

_STEPS = 1000  # the last steps of a long run are kept


class DriveCounters:
    """Counts bytes read and written between updates, in files opened with `wrap(system)`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._written = 0
        self._at: tuple[int, int] | None = None
        self._steps: deque[DriveBytes] = deque(maxlen=_STEPS)

    def wrap(self, system: System) -> System:
        """Returns `system` with counting reads and writes."""

        def preadv(  # signature: the system's
            descriptor: int, buffers: Sequence[memoryview], offset: int
        ) -> int:
            count = system.preadv(descriptor, buffers, offset)
            with self._lock:
                self._read += count
            return count

        def pwritev(  # signature: the system's
            descriptor: int, buffers: Sequence[memoryview], offset: int
        ) -> int:
            count = system.pwritev(descriptor, buffers, offset)
            with self._lock:
                self._written += count
            return count

        return replace(system, preadv=preadv, pwritev=pwritev)

    def begin_update(self) -> None:
        """Marks the begin of an update. All reads and writes of the previous one must have finished."""
        with self._lock:
            if self._at is not None:
                read, written = self._at
                self._steps.append(DriveBytes(read=self._read - read, written=self._written - written))
            self._at = self._read, self._written

    def steps(self) -> tuple[DriveBytes, ...]:
        """Returns the bytes of each step, from its update to the next; at most the last thousand steps."""
        return tuple(self._steps)

    def median_step(self) -> DriveBytes | None:
        """Returns the median step, or None before two updates. Reads by a few saves do not change it."""
        if not self._steps:
            return None
        read, written = ([getattr(one, name) for one in self._steps] for name in ("read", "written"))
        return DriveBytes(read=median_low(read), written=median_low(written))
