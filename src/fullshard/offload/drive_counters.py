"""Counters of the bytes that a rank moves to and from its drive, counted at the system calls."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median_low

from fullshard.offload.drive import System
from fullshard.spec.measurement import DriveBytes

_STEPS = 1000  # the last steps of a long run are kept
_Transfer = Callable[[int, Sequence[memoryview], int], int]


class DriveCounters:
    """Counts bytes read and written between updates, in files opened with `wrap(system)`, from any thread.

    steps: bytes of each step, from its update to the next; at most of the last thousand steps
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: Counter[str] | None = None  # None: before the first update
        self.steps: deque[DriveBytes] = deque(maxlen=_STEPS)

    def wrap(self, system: System) -> System:
        """Returns `system` with counting reads and writes."""

        def counting(transfer: _Transfer, kind: str) -> _Transfer:
            def counted(  # signature: the system's
                descriptor: int, buffers: Sequence[memoryview], offset: int
            ) -> int:
                count = transfer(descriptor, buffers, offset)
                with self._lock:
                    if self._moved is not None:
                        self._moved[kind] += count
                return count

            return counted

        return replace(
            system, preadv=counting(system.preadv, "read"), pwritev=counting(system.pwritev, "written")
        )

    def begin_update(self) -> None:
        """Marks the begin of an update. All reads and writes of the previous one must have finished."""
        with self._lock:
            if self._moved is not None:
                self.steps.append(DriveBytes(read=self._moved["read"], written=self._moved["written"]))
            self._moved = Counter()

    def median_step(self) -> DriveBytes | None:
        """Returns the median step, or None before two updates. Reads by a few saves do not change it."""
        if not self.steps:
            return None
        read, written = (median_low(getattr(one, kind) for one in self.steps) for kind in ("read", "written"))
        return DriveBytes(read=read, written=written)
