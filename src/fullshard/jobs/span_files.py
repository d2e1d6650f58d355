"""Writes measured steps of this rank to `<run.dir>/spans/rank-<rank>.jsonl`."""

import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from fullshard.profiler.clock_offset import ClockOffset
from fullshard.profiler.recorded_step import RecordedStep, step_spans
from fullshard.spec.measured_step import StepSpans
from fullshard.spec.run_files import PREDICTED_STEP, SPANS
from fullshard.system.files import open_regular_file, write_file_atomically

MOST_BYTES = 64 << 20
"""Size of a rank's file, after which no further steps are written."""


class SpanFile:
    """Appends steps to this rank's file, each at most once per attempt.

    A failed write is reported once, and ends the writing: the run does not depend on its spans.

    say: prints a message
    offset: of this rank's clock; the caller may replace it
    """

    def __init__(
        self, directory: str | Path, *, rank: int, attempt: int, say: Callable[[str], object]
    ) -> None:
        self.path = Path(directory, SPANS, f"rank-{rank:05}.jsonl")
        self.offset = ClockOffset()
        self._rank, self._attempt, self._say, self._host = rank, attempt, say, socket.gethostname()
        self._written: set[int] = set()
        self._has_failed = False

    def write(self, steps: Iterable[RecordedStep], *, reason: str) -> None:
        """Appends those of `steps` that were not written before. See `StepSpans.reason`."""
        new = [step for step in steps if step.step not in self._written]
        if self._has_failed or not new:
            return
        self._written.update(step.step for step in new)
        lines = "".join(self._measured(step, reason).to_line() + "\n" for step in new).encode()
        try:
            self.path.parent.mkdir(exist_ok=True)
            file = open_regular_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                if os.fstat(file).st_size + len(lines) <= MOST_BYTES:
                    os.write(file, lines)
            finally:
                os.close(file)
        except OSError as error:
            self._has_failed = True
            self._say(f"{self.path} cannot be written: {error.strerror}; the run continues without spans")

    def write_predicted(self, line: str | None) -> None:
        """Writes the planned step beside the measured ones, or removes it. Only on rank 0."""
        if self._rank != 0:
            return
        path = self.path.with_name(PREDICTED_STEP)
        try:
            if line is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(exist_ok=True)
                write_file_atomically(path, f"{line}\n")
        except OSError as error:
            self._say(f"{path} cannot be written: {error.strerror}; the run continues without it")

    def forget_after(self, step: int) -> None:
        """Lets the steps after `step` be written again, because the run repeats them."""
        self._written = {one for one in self._written if one <= step}

    def _measured(self, step: RecordedStep, reason: str) -> StepSpans:
        return StepSpans(
            step=step.step,
            attempt=self._attempt,
            rank=self._rank,
            host=self._host,
            reason=reason,
            begin_ns=step.begin + self.offset.offset_ns,
            clock_error_ns=self.offset.error_ns,
            seconds=step.seconds,
            spans=tuple(step_spans(step)),
        )
