"""Counters of the bytes that a rank reads from and writes to its drive, counted at the system calls."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low

from fullshard.offload.drive import DriveSystemCalls
from fullshard.spec.measurement import DriveTrafficBytes

_STEPS = 1000
_Transfer = Callable[[int, Sequence[memoryview], int], int]


class DriveCounters:
    """Counts the bytes read and written per step in files opened with `wrap_system_calls(system)`.

    steps: bytes of each of the last thousand steps, counted from the step's update to the next update
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: Counter[str] | None = None  # None: before the first update
        self.steps: deque[DriveTrafficBytes] = deque(maxlen=_STEPS)

    def wrap_system_calls(self, system: DriveSystemCalls) -> DriveSystemCalls:
        """Returns `system` with `preadv` and `pwritev` that count the bytes they transfer."""
        read = partial(self._transfer_and_count_bytes, system.preadv, "read")
        write = partial(self._transfer_and_count_bytes, system.pwritev, "written")
        return replace(system, preadv=read, pwritev=write)

    def mark_update_start(self) -> None:
        """Marks the start of an update. All reads and writes of the previous update must have finished."""
        with self._lock:
            if self._moved is not None:
                self.steps.append(DriveTrafficBytes(read=self._moved["read"], written=self._moved["written"]))
            self._moved = Counter()

    def median_step_bytes(self) -> DriveTrafficBytes | None:
        """Returns the medians of bytes read and written per step; None before the second update."""
        if not self.steps:
            return None
        read, written = (median_low(getattr(one, kind) for one in self.steps) for kind in ("read", "written"))
        return DriveTrafficBytes(read=read, written=written)

    def _transfer_and_count_bytes(  # signature: the system call's, after the bound arguments
        self, transfer: _Transfer, kind: str, descriptor: int, buffers: Sequence[memoryview], offset: int
    ) -> int:
        count = transfer(descriptor, buffers, offset)
        with self._lock:
            if self._moved is not None:
                self._moved[kind] += count
        return count
