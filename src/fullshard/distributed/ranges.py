"""Named ranges of a rank's work, for torch's profiler, and the rank's own seconds.

[Note: own seconds]
In synchronous training, all ranks take equally long. A rank's own seconds leave out what other ranks or the
machine cause: waiting in collectives, and time on the run queue of a shared core. Garbage collections are
counted apart. So ranks that do the same work have the same own seconds, whichever of them the others wait
for.
"""

import gc
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter_ns
from types import TracebackType
from typing import Any, ClassVar, Self

from torch.profiler import record_function

from fullshard.spec.records.step_spans import COLLECTIVES, RANGE_PREFIX

_WRITE = "write"


@dataclass(frozen=True)
class OwnWorkSeconds:
    """Seconds of a rank in a step, by what it did. See [Note: own seconds]."""

    by_phase: dict[str, float]
    garbage: float
    waiting: float


class OwnWorkClock:
    """A clock of the thread that trains, which stands still while the rank waits for others, or for a core.

    now: the time in ns
    queued: the time in ns for which the thread was runnable without a core
    """

    def __init__(self, now: Callable[[], int] = perf_counter_ns, queued: Callable[[], int] = int) -> None:
        self._now, self._queued, self._thread = now, queued, threading.get_ident()
        self._waiting = self._garbage = self._collecting_since = self._waiting_since = 0
        self._wait = ""  # kind of the collective that is open
        self._phase, self._phase_since = "", self._read()
        self._by_phase: dict[str, int] = {}

    def enter_phase(self, phase: str) -> None:
        """Counts the own time from now on for `phase`."""
        moment = self._read()
        own = moment - self._phase_since
        self._by_phase[self._phase] = self._by_phase.get(self._phase, 0) + own
        self._phase, self._phase_since = phase, moment

    def take_seconds(self) -> OwnWorkSeconds:
        self.enter_phase(self._phase)
        by_phase = {phase: ns * 1e-9 for phase, ns in self._by_phase.items()}
        taken = OwnWorkSeconds(by_phase, self._garbage * 1e-9, self._waiting * 1e-9)
        self._by_phase = {}
        # Moments of `_read` are less by both sums until here.
        self._phase_since += self._garbage + self._waiting
        self._garbage = self._waiting = 0
        return taken

    def current_wait_name(self) -> str:
        """Returns the name of the span in which the rank waits for others, or an empty text."""
        kind = self._wait  # another thread asks
        return COLLECTIVES[kind][1] if kind else ""

    def begin_range(self, kind: str) -> bool:
        """Stops the clock for a collective, or starts it for a write in one. Returns False for all others."""
        if threading.get_ident() != self._thread:
            return False  # of a save in the background
        if kind == _WRITE and self._wait:
            self._waiting += self._read() - self._waiting_since
        elif kind in COLLECTIVES and not self._wait:
            self._wait, self._waiting_since = kind, self._read()
        else:
            return False
        return True

    def end_range(self, kind: str) -> None:
        """Ends a range for which `begin_range` returned True."""
        if kind == _WRITE:
            self._waiting_since = self._read()
        else:
            self._waiting += self._read() - self._waiting_since
            self._wait = ""

    def count_garbage_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Notes a garbage collection; for `gc.callbacks`."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collecting_since = self._read()
        else:
            self._garbage += self._read() - self._collecting_since

    def _read(self) -> int:
        return self._now() - self._queued() - self._waiting - self._garbage


class TimedRange:
    """Context whose block is a range `fullshard::<kind>` of the profiler.

    kind: a key of `COLLECTIVES`, which stops the rank's own clock; `write` (own work within an agreement),
        which starts it again; or `norm`, `update`
    name: name of the profiler's range, if it contains more than the collective
    """

    clock: ClassVar[OwnWorkClock | None] = None
    """The clock of this process, set by `run_own_clock`."""

    __slots__ = ("_is_timed", "_kind", "_profiled")

    def __init__(self, kind: str, *, name: str | None = None) -> None:
        self._profiled = record_function(RANGE_PREFIX + (name or kind))
        self._kind, self._is_timed = kind, False

    def __enter__(self) -> Self:
        self._profiled.__enter__()
        self._is_timed = TimedRange.clock is not None and TimedRange.clock.begin_range(self._kind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_timed and TimedRange.clock is not None:
            TimedRange.clock.end_range(self._kind)
        self._profiled.__exit__(kind, error, trace)


@contextmanager
def run_own_clock(clock: OwnWorkClock | None = None) -> Generator[OwnWorkClock]:
    """Context in which the calling thread's own seconds are counted, by `clock` or a new one."""
    try:
        file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:  # the system does not report it
        file = None

    def run_queue_wait_ns() -> int:
        return 0 if file is None else int(os.pread(file, 64, 0).split()[1])

    clock = clock or OwnWorkClock(queued=run_queue_wait_ns)
    before, TimedRange.clock = TimedRange.clock, clock
    gc.callbacks.append(clock.count_garbage_collection)
    try:
        yield clock
    finally:
        TimedRange.clock = before
        with suppress(ValueError):
            gc.callbacks.remove(clock.count_garbage_collection)
        if file is not None:
            os.close(file)
            file = None  # a phase may still be entered
