"""What a rank's drive moves, counted where the system is called."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low

from fullshard.offload.drive import System
from fullshard.spec.measurement import DriveBytes

_STEPS = 1000  # the last ones, of a long run


class DriveCounters:
    """Bytes read and written from each update to the next: of all files that are opened with `over(system)`,
    from whatever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = self._written = 0
        self._at: tuple[int, int] | None = None
        self._steps: deque[DriveBytes] = deque(maxlen=_STEPS)

    def wrap(self, system: System) -> System:
        """`system`, counted."""

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
        """All that the update before has read and written is through, and the next one begins."""
        with self._lock:
            if self._at is not None:
                read, written = self._at
                self._steps.append(DriveBytes(read=self._read - read, written=self._written - written))
            self._at = self._read, self._written

    def steps(self) -> tuple[DriveBytes, ...]:
        """Of each step, from its update to the next; at most the last thousand."""
        return tuple(self._steps)

    def median_step(self) -> DriveBytes | None:
        """The medians: what saves read is not in them where most steps have none. None before two updates."""
        if not self._steps:
            return None
        read, written = ([getattr(one, name) for one in self._steps] for name in ("read", "written"))
        return DriveBytes(read=median_low(read), written=median_low(written))
