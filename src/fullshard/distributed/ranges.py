"""Named ranges of a rank's work, which torch's profiler and the recorder of spans both see."""

from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from torch.profiler import record_function

PREFIX = "fullshard::"
"""Beginning of the names of these ranges in a trace of torch's profiler."""


class RangeRecorder(Protocol):
    """A recorder of the ranges of this process."""

    def begin_range(self, kind: str) -> Any:
        """Returns a mark of this moment; None if the range is not recorded."""

    def end_range(self, kind: str, begin: Any) -> None:
        """Records a range from the mark `begin` to this moment."""


class TimedRange:
    """Context whose block is a range `fullshard::<kind>` of the profiler and of the recorder, if any.

    kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `model_parallel`, `agreement`
        (collectives, in which a rank waits for others), `write` (own work within an agreement), `optimizer`
    operation: name by which the recorder knows a range of kind `model_parallel`
    """

    recorder: ClassVar[RangeRecorder | None] = None
    """The recorder of this process, set by `record_ranges`."""

    __slots__ = ("_begin", "_kind", "_profiled")

    def __init__(self, kind: str, *, operation: str | None = None) -> None:
        self._kind, self._profiled, self._begin = operation or kind, record_function(PREFIX + kind), None

    def __enter__(self) -> Self:
        self._profiled.__enter__()
        recorder = TimedRange.recorder
        self._begin = None if recorder is None else recorder.begin_range(self._kind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begin is not None and (recorder := TimedRange.recorder) is not None:
            recorder.end_range(self._kind, self._begin)
        self._profiled.__exit__(kind, error, trace)


@contextmanager
def record_ranges(recorder: RangeRecorder) -> Generator[None]:
    """Context in which `recorder` gets all ranges of this process."""
    before, TimedRange.recorder = TimedRange.recorder, recorder
    try:
        yield
    finally:
        TimedRange.recorder = before
