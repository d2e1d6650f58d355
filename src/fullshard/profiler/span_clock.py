"""Clocks for spans: the host's, or a device's, whose marks are read later and never waited for.

[Note: marks of a device]
An event is recorded on the current stream, and has no time until the device has reached it. So a step's marks
are resolved when its last event has passed, mostly two steps later: `query` never blocks. The host's time at
which the step's first event was recorded stands for the event's own, so a step's spans may be shown earlier
than they were by as much as the host was ahead; the times between them are exact to the device's resolution.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

_SCHEDSTAT = "/proc/thread-self/schedstat"
_LEAST_READ_NS = 1_000_000


class SpanClock(Protocol):
    """A clock of marks. `resolve` returns their times in ns."""

    on_device: bool

    def mark(self) -> Any:
        """Returns a mark of this moment."""

    def is_past(self, mark: Any) -> bool:
        """Returns whether `mark` can be resolved without waiting."""
        ...

    def resolve(self, mark: Any, *, first: Any) -> int:
        """Returns the time of `mark` in ns of the host's clock. `first`: the step's first mark."""
        ...

    def release(self, mark: Any) -> None:
        """Ends the use of `mark`, which must not be resolved again."""


class HostClock:
    """The host's monotonic clock, in ns."""

    on_device = False

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.mark = now

    def is_past(self, mark: int) -> bool:
        return True

    def resolve(self, mark: int, *, first: int) -> int:
        return mark

    def release(self, mark: int) -> None:
        return


class DeviceEvent(Protocol):
    """An event with a time, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> object: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class DeviceClock:
    """Events on a device's current stream. See [Note: marks of a device].

    make_event: makes an event; it is reused after `release`
    """

    on_device = True

    def __init__(
        self, make_event: Callable[[], DeviceEvent], *, now: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._make_event, self._now = make_event, now
        self._free: list[DeviceEvent] = []

    def mark(self) -> tuple[DeviceEvent, int]:
        """Returns an event that was recorded now, and the host's time."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event, self._now()

    def is_past(self, mark: tuple[DeviceEvent, int]) -> bool:
        return mark[0].query()

    def resolve(self, mark: tuple[DeviceEvent, int], *, first: tuple[DeviceEvent, int]) -> int:
        start, host_ns = first
        return host_ns if mark is first else host_ns + round(start.elapsed_time(mark[0]) * 1e6)

    def release(self, mark: tuple[DeviceEvent, int]) -> None:
        self._free.append(mark[0])


class RunQueue:
    """The time that the calling thread was runnable without a core; 0 where the system does not report it.

    It is read at most once per millisecond: reading it takes some microseconds, and steps may be short.
    """

    def __init__(self) -> None:
        self._queued_ns, self._read_at = 0, 0
        try:
            self._file: int | None = os.open(_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._file = None

    def queued_ns(self, at: int) -> int:
        """Returns the time until the moment `at`, or until up to a millisecond before; both in ns."""
        if self._file is not None and at - self._read_at > _LEAST_READ_NS:
            self._queued_ns, self._read_at = int(os.pread(self._file, 64, 0).split()[1]), at
        return self._queued_ns

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
