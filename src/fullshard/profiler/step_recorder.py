"""Records the phases and ranges of each step of this rank in memory."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

from fullshard.profiler.interruptions import Interruptions
from fullshard.profiler.recorded_step import COLLECTIVES, WRITE, PhaseMark, RangeMark, RecordedStep
from fullshard.profiler.span_clock import RunQueue, SpanClock

KEPT_STEPS = 64
MOST_RANGES = 1 << 16
"""Ranges that are kept, in all steps together and in one, so that memory does not grow with the model."""
_OF_A_STEP = frozenset({"data", "forward", "backward", "reduce", "optimizer"})
_BETWEEN = "between steps"
_OF_SAVES = ("agreement", WRITE)  # which threads of background saves also do


class StepRecorder:
    """A ring of the last steps, each with its phases and ranges.

    A step begins with its first phase, and ends where the next one begins: its record includes a save that
    follows it. On a device, a step is closed when all of its marks have passed.

    closed: the last steps, oldest first, whose marks are ns
    queue: the time without a core, which is left out of a rank's own; None: that of the calling thread
    """

    def __init__(
        self,
        clock: SpanClock,
        *,
        interruptions: Interruptions | None = None,
        queue: RunQueue | None = None,
    ) -> None:
        self.clock, self._interruptions = clock, interruptions
        self.mark = clock.mark
        self.unit: str | None = None  # whose collectives and copies are made now
        self.closed: deque[RecordedStep] = deque()
        self._kept_ranges = 0  # of the steps in `closed`
        self._unresolved: deque[RecordedStep] = deque()
        self._open: RecordedStep | None = None
        self._ranges: list[RangeMark] = []  # of the open step
        self._queue, self._queued_in_waits, self._queued_before_wait = queue or RunQueue(), 0, 0
        self._wait: tuple[str, Any] | None = None  # kind and begin of the collective that is open
        self._trainer = threading.get_ident()

    def note_phase(self, phase: str, step: int) -> None:
        """Notes that this rank enters `phase` after `step` finished steps."""
        mark = self.mark()
        opened = self._open
        starts = phase in _OF_A_STEP and (opened is None or opened.finished is not None)
        if starts:
            self._close(mark)
            opened = self._open = RecordedStep(step + 1, on_device=self.clock.on_device)
            self._ranges = opened.ranges
        if opened is None:
            return
        if phase == _BETWEEN and opened.finished is None:
            opened.finished = mark
        queued = 0 if self.clock.on_device else self._queue.queued_ns(mark) - self._queued_in_waits
        opened.phases.append(PhaseMark(phase, mark, queued))

    def begin_range(self, kind: str) -> object:
        """See `fullshard.distributed.ranges.RangeRecorder`.

        Saves of other threads, and collectives of which another one consists, are not recorded.
        """
        if kind in _OF_SAVES and threading.get_ident() != self._trainer:
            return None
        if kind not in COLLECTIVES:
            return self.mark()
        if self._wait is not None:
            return None
        begin = self.mark()
        self._wait = kind, begin
        if not self.clock.on_device:
            self._queued_before_wait = self._queue.queued_ns(begin)
        return begin

    def end_range(self, kind: str, begin: object) -> None:
        """See `fullshard.distributed.ranges.RangeRecorder`."""
        end = self.mark()
        self.add(kind, self.unit, begin=begin, end=end)
        if kind in COLLECTIVES:
            self._wait = None
            if not self.clock.on_device:
                self._queued_in_waits += self._queue.queued_ns(end) - self._queued_before_wait

    def add(self, kind: str, unit: str | None, *, begin: object, end: object = None) -> None:
        """Records a range from the mark `begin` to the mark `end`, or to this moment."""
        opened = self._open
        if opened is None or len(self._ranges) >= MOST_RANGES:
            return
        if opened.finished is None or kind in _OF_SAVES:  # not those of validation, or of a sample
            self._ranges.append(RangeMark(kind, unit, begin, self.mark() if end is None else end))

    def last_range(self, kind: str, *, after: Any) -> RangeMark | None:
        """Returns the last range of `kind` that began after the host's mark `after`, or None."""
        for one in reversed(self._ranges):
            if one.begin < after:
                break
            if one.kind == kind:
                return one
        return None

    def closed_after(self, step: int) -> list[RecordedStep]:
        """Returns the closed steps after `step`, oldest first."""
        return [*takewhile(lambda one: one.step > step, reversed(self.closed))][::-1]

    def current_wait(self) -> str:
        """Returns the name of the span in which this rank waits for others, or an empty text."""
        wait = self._wait
        return "" if wait is None else COLLECTIVES[wait[0]][1]

    def copy_open_step(self) -> list[RecordedStep]:
        """Returns the step that is open, up to this moment, on the host's clock; empty between steps."""
        if self._open is None or self.clock.on_device or not self._open.phases:
            return []
        now, wait, ranges = self.mark(), self._wait, [*self._ranges]
        if wait is not None and wait[1] >= self._open.begin:
            ranges.append(RangeMark(wait[0], self.unit, wait[1], now))
        return [replace(self._open, ranges=ranges, phases=[*self._open.phases], end=now)]

    def drop_after(self, step: int) -> None:
        """Drops the steps after `step`, which the run repeats."""
        self._open, self._ranges = None, []
        self._unresolved = deque(one for one in self._unresolved if one.step <= step)
        self.closed = deque(one for one in self.closed if one.step <= step)
        self._kept_ranges = sum(len(one.ranges) for one in self.closed)

    def finish(self) -> None:
        """Closes the last step, for which no other begins."""
        if self._open is not None:
            self._close(self.mark())

    def close(self) -> None:
        """Closes the recorder's files."""
        self._queue.close()

    def _close(self, mark: object) -> None:
        ended, self._open, self._ranges = self._open, None, []
        if ended is not None:
            ended.end = mark
            if self._interruptions is not None:
                ended.collections, ended.pauses = self._interruptions.take()
            self._unresolved.append(ended)
        while self._unresolved and self.clock.is_past(self._unresolved[0].end):
            self._resolve(self._unresolved.popleft())
        while len(self._unresolved) > KEPT_STEPS:
            self._release(self._unresolved.popleft())

    def _resolve(self, step: RecordedStep) -> None:
        """Keeps `step`, with marks in ns. On a device, its first mark may also end the step before."""
        if self.clock.on_device:
            first = step.phases[0].at
            times = {id(one): self.clock.resolve(one, first=first) for one in _marks(step)}
            resolved = RecordedStep(step.step, on_device=True)
            resolved.phases = [one._replace(at=times[id(one.at)]) for one in step.phases]
            resolved.ranges = [
                one._replace(begin=times[id(one.begin)], end=times[id(one.end)]) for one in step.ranges
            ]
            resolved.collections, resolved.pauses = step.collections, step.pauses
            resolved.finished = None if step.finished is None else times[id(step.finished)]
            resolved.end = times[id(step.end)]
            self._release(step)
            step = resolved
        self.closed.append(step)
        self._kept_ranges += len(step.ranges)
        while len(self.closed) > KEPT_STEPS or (self._kept_ranges > MOST_RANGES and len(self.closed) > 1):
            self._kept_ranges -= len(self.closed.popleft().ranges)

    def _release(self, step: RecordedStep) -> None:
        """Releases the marks of `step`, except its last, with which the next step begins."""
        for mark in _marks(step):
            if mark is not step.end:
                self.clock.release(mark)


def _marks(step: RecordedStep) -> Iterator[object]:
    """Yields the marks of a step, each once."""
    every = [one.at for one in step.phases]
    every += [mark for one in step.ranges for mark in (one.begin, one.end)]
    return iter({id(mark): mark for mark in [*every, step.end]}.values())
