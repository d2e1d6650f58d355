"""One step as a rank recorded it, and what follows from it: its spans, and the rank's own seconds.

[Note: own seconds]
A rank's own seconds in a phase leave out what other ranks or the machine cause: waiting in collectives, time
on the run queue of a shared core, garbage collections and pauses. The latter two are causes of their own. So
ranks that do the same work have the same own seconds, whichever of them the others wait for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from fullshard.spec.measured_step import COMPUTE, MODEL_PARALLEL_TRACKS, MODEL_PARALLEL_WAITS
from fullshard.spec.step_span import StepSpan

# Collectives: [name of the track, name of the wait]. In all of them, the rank waits for others.
COLLECTIVES = {
    "all_gather": ("all-gather", "wait for all-gather"),
    "reduce_scatter": ("reduce-scatter", "wait for reduce-scatter"),
    "all_reduce": ("all-reduce", "wait for all-reduce"),
    "all_to_all": ("all-to-all", "wait for all-to-all"),
    **{kind: (track, MODEL_PARALLEL_WAITS[kind]) for kind, track in MODEL_PARALLEL_TRACKS.items()},
    "agreement": ("agreement", "wait for other ranks"),
}
WRITE, OPTIMIZER = "write", "optimizer"
# FSDP2's methods for a unit: those that start and end its forward and backward, and others.
STARTS, ENDS = ("pre_forward", "pre_backward"), ("post_forward", "post_backward")
UNSHARD, COPY_OUT, FINISH = "unshard", "wait_for_unshard", "finalize_backward"
DEVICE_WAITS = (COPY_OUT, FINISH)
_LABELS = {WRITE: "write", COPY_OUT: "copy", **{kind: wait for kind, (_, wait) in COLLECTIVES.items()}}
# On a device, collectives have streams of their own, and these methods wait for them on the compute stream.
_DEVICE_LABELS = _LABELS | {COPY_OUT: "wait for all-gather", FINISH: "wait for reduce-scatter"}
_OWN_STREAM = ("all_gather", "reduce_scatter")
FORWARD, BACKWARD, UPDATE = "forward", "backward", "optimizer"
_NOT_COMPUTED = {"reduce": "host's work", UPDATE: "host's work"}

Interval: TypeAlias = tuple[int, int]


class PhaseMark(NamedTuple):
    """The start of a phase.

    at: moment, a mark of the recorder's clock
    queued_ns: time that the thread had been runnable without a core until then, outside collectives
    """

    phase: str
    at: Any
    queued_ns: int


class RangeMark(NamedTuple):
    """A range of work, or a method of FSDP2 for `unit`; between two marks of the recorder's clock."""

    kind: str
    unit: str | None
    begin: Any
    end: Any


@dataclass
class RecordedStep:
    """Marks of one step, from its first phase to the first phase of the next step.

    step: its number
    on_device: whether phases and ranges are by a device's clock
    finished: the mark at which the step was finished; work before the next step follows
    collections, pauses: (begin, end) of garbage collections, and of pauses of the process, in the host's ns
    """

    step: int
    on_device: bool = False
    phases: list[PhaseMark] = field(default_factory=list[PhaseMark])
    ranges: list[RangeMark] = field(default_factory=list[RangeMark])
    collections: list[Interval] = field(default_factory=list[Interval])
    pauses: list[Interval] = field(default_factory=list[Interval])
    finished: Any = None
    end: Any = None

    @property
    def begin(self) -> int:
        return self.phases[0].at

    @property
    def seconds(self) -> float:
        """Time from the start to the end of the step, without the work before the next step."""
        return ((self.end if self.finished is None else self.finished) - self.begin) * 1e-9


@dataclass(frozen=True)
class OwnSeconds:
    """Seconds of a rank in one step, by what it did. See [Note: own seconds].

    by_phase: own seconds by phase
    waiting: waiting for other ranks in collectives
    queued: runnable, without a core
    """

    by_phase: dict[str, float]
    garbage: float
    paused: float
    waiting: float
    queued: float


def own_seconds(step: RecordedStep) -> OwnSeconds:
    """Returns the rank's own seconds of a step whose marks are ns."""
    waits = _merge((one.begin, one.end) for one in step.ranges if _is_wait(one, on_device=step.on_device))
    waits = _subtract(waits, _merge((one.begin, one.end) for one in step.ranges if one.kind == WRITE))
    collections = _merge(step.collections)
    pauses = _subtract(_merge(step.pauses), collections)
    ends = [*(mark.at for mark in step.phases[1:]), step.end]
    windows = [(mark.at, end) for mark, end in zip(step.phases, ends, strict=True)]
    holes = [waits, collections, _subtract(pauses, waits)]
    taken = [sum(each) for each in zip(*(_overlaps(windows, one) for one in holes), strict=True)]
    queues = [mark.queued_ns for mark in step.phases]
    by_phase: dict[str, float] = {}
    queued = 0
    for index, (mark, (begin, end)) in enumerate(zip(step.phases, windows, strict=True)):
        late = queues[index + 1] - queues[index] if index + 1 < len(queues) else 0
        own = max(0, end - begin - taken[index] - late) * 1e-9
        by_phase[mark.phase] = by_phase.get(mark.phase, 0.0) + own
        queued += late
    garbage, paused, waiting = (sum(b - a for a, b in one) * 1e-9 for one in (collections, pauses, waits))
    return OwnSeconds(by_phase, garbage, paused, waiting, queued * 1e-9)


def step_spans(step: RecordedStep) -> list[StepSpan]:
    """Returns the spans of a step whose marks are ns, on its tracks. Their times are from the step's start.

    The spans of `compute` fill it: each moment has the innermost range, or else the unit that computes.
    """
    spans = [*_Timeline(step).compute_spans(), *_phase_spans(step)]
    for one in step.ranges:
        if one.kind in COLLECTIVES:
            track, wait = COLLECTIVES[one.kind]
            name = wait.removeprefix("wait for ") if one.kind in MODEL_PARALLEL_TRACKS else track
            spans.append(_span(step, track, at=(one.begin, one.end), name=name, unit=one.unit))
    spans += [_span(step, "garbage collection", at=one, name="collect") for one in _merge(step.collections)]
    spans += [_span(step, "pauses", at=one, name="paused") for one in _merge(step.pauses)]
    return sorted(spans, key=lambda span: (span.begin, -span.end))


class _Timeline:
    """The compute stream of a step: which unit computes, and what interrupts it.

    FSDP2's hooks of a unit enclose its computing. A unit whose inputs need no gradient ends its backward only
    at the end of the whole backward, so computing belongs to the unit that began last and has not ended.
    """

    def __init__(self, step: RecordedStep) -> None:
        self._step = step
        self._running: list[str | None] = []
        self._open: list[RangeMark] = []
        self._phase, self._microbatch = "", 0
        self._spans: list[StepSpan] = []

    def compute_spans(self) -> list[StepSpan]:
        """Returns disjoint spans without gaps."""
        step = self._step
        marks: list[tuple[int, int, Any]] = [(mark.at, 0, mark.phase) for mark in step.phases]
        for one in step.ranges:
            if not (step.on_device and one.kind in _OWN_STREAM):
                marks += [(one.begin, 1, one)]
        # Ranges of one thread nest, so the longest of those that begin together is the outermost.
        marks.sort(key=lambda mark: (mark[0], mark[1], -mark[2].end if mark[1] else 0))
        at = step.begin
        for moment, kind, what in marks:
            at = self._close_ranges(at, until=moment)
            at = self._emit(at, until=moment)
            if kind == 0:
                self._enter_phase(what)
            else:
                self._enter_range(what)
        self._emit(self._close_ranges(at, until=step.end), until=step.end)
        return self._spans

    def _enter_phase(self, phase: str) -> None:
        if phase != self._phase:
            self._running.clear()
        self._microbatch += phase == FORWARD
        self._phase = phase

    def _enter_range(self, one: RangeMark) -> None:
        if one.kind in ENDS and one.unit in self._running:
            self._running.remove(one.unit)
        self._open.append(one)

    def _close_ranges(self, at: int, *, until: int) -> int:
        while self._open and self._open[-1].end <= until:
            at = self._emit(at, until=self._open[-1].end)
            ended = self._open.pop()
            if ended.kind in STARTS:
                if ended.unit in self._running:
                    self._running.remove(ended.unit)
                self._running.append(ended.unit)
        return at

    def _emit(self, at: int, *, until: int) -> int:
        """Appends a span from `at` to `until`, joined to the one before if it is the same work."""
        if until <= at:
            return at
        name, unit = self._work()
        microbatch = self._microbatch if self._phase in (FORWARD, BACKWARD) else 0
        span = _span(self._step, COMPUTE, at=(at, until), name=name, unit=unit)
        span = span._replace(microbatch=microbatch or None)
        last = self._spans[-1] if self._spans else None
        if last is not None and last[1] == name and last[4:] == span[4:]:
            self._spans[-1] = last._replace(end=span.end)
        else:
            self._spans.append(span)
        return until

    def _work(self) -> tuple[str, str | None]:
        """Returns the name of the current work, and its unit."""
        if self._open:
            one = self._open[-1]
            labels = _DEVICE_LABELS if self._step.on_device else _LABELS
            if one.kind == OPTIMIZER:
                return ("norm" if self._phase == "reduce" else "update"), one.unit
            return labels.get(one.kind, "FSDP2"), one.unit
        if self._phase in (FORWARD, BACKWARD):
            return self._phase, self._running[-1] if self._running else None
        return _NOT_COMPUTED.get(self._phase, self._phase), None


def _phase_spans(step: RecordedStep) -> list[StepSpan]:
    ends = [*(mark.at for mark in step.phases[1:]), step.end]
    return [
        _span(step, "phases", at=(mark.at, end), name=mark.phase)
        for mark, end in zip(step.phases, ends, strict=True)
        if end > mark.at
    ]


def _span(step: RecordedStep, track: str, *, at: Interval, name: str, unit: str | None = None) -> StepSpan:
    begin, end = at
    return StepSpan(track, name, (begin - step.begin) * 1e-9, (end - step.begin) * 1e-9, unit=unit)


def _is_wait(one: RangeMark, *, on_device: bool) -> bool:
    if on_device:
        return one.kind in DEVICE_WAITS or (one.kind in COLLECTIVES and one.kind not in _OWN_STREAM)
    return one.kind in COLLECTIVES


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals in order that cover the same moments."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def _subtract(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Returns the moments of `intervals` outside `holes`. Both are disjoint and in order."""
    if not holes:
        return list(intervals)
    left: list[Interval] = []
    first = 0
    for begin, end in intervals:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        index = first
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > begin:
                left.append((begin, holes[index][0]))
            begin = max(begin, holes[index][1])
            index += 1
        if begin < end:
            left.append((begin, end))
    return left


def _overlaps(windows: Sequence[Interval], intervals: Sequence[Interval]) -> list[int]:
    """Returns for each window the length that `intervals` cover of it. Both are disjoint and in order."""
    covered: list[int] = []
    first = 0
    for begin, end in windows:
        while first < len(intervals) and intervals[first][1] <= begin:
            first += 1
        total, index = 0, first
        while index < len(intervals) and intervals[index][0] < end:
            total += min(end, intervals[index][1]) - max(begin, intervals[index][0])
            index += 1
        covered.append(total)
    return covered
