"""The log of a run on rank 0: progress on the terminal, `metrics.jsonl`, `events.jsonl`, and trackers.

Both files are flushed to the disk before each save. A crash of the machine may lose the lines since then.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TextIO

import torch

from fullshard.errors import TrainError
from fullshard.observe.progress import ProgressPrinter, RunProgress
from fullshard.observe.step_metrics import StepMetrics
from fullshard.observe.trackers import TrackerThread, check_trackers_installed, close_trackers, open_trackers
from fullshard.parallel.mesh import RankInfo
from fullshard.report.run_record import LONGEST_LINE_BYTES
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.measurement import none_if_not_finite
from fullshard.spec.records.run_files import EVENTS, METRICS
from fullshard.spec.run import Run
from fullshard.spec.settings.evaluate_section import results_text
from fullshard.system.files import (
    atomic_replace_context,
    fsync_path,
    open_new_file,
    open_regular_file,
    os_error_why_and_fix,
)
from fullshard.system.small_files import parse_json_line
from fullshard.system.targets import convert_write_errors
from fullshard.training.loop import Step

PREVIOUS_METRICS = "metrics.previous.jsonl"
_ANOTHER = "run.dir = another directory"


class MetricsLog:
    """Writes the file `metrics.jsonl` in the run's directory, one line of JSON per step.

    A run that resumes after `after_step` drops incomplete lines, and those of later steps, which it repeats.
    A new run (`after_step` 0) renames the last run's file to `metrics.previous.jsonl`. Raises SpecError if
    the directory cannot be written.
    """

    def __init__(self, directory: str | Path, *, after_step: int = 0) -> None:
        self.path = Path(directory, METRICS)
        with convert_write_errors(self.path, fix=_ANOTHER):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if after_step and self.path.exists():
                _drop_lines_after_step(self.path, after_step)
            elif self.path.exists() and self.path.stat().st_size:
                self.path.replace(self.path.with_name(PREVIOUS_METRICS))
            # Unbuffered, so that each line is one write and a killed process loses none. If the machine
            # crashes, lines since the last `flush_to_disk` may be lost.
            self._file = FileIO(self.path, "ab", opener=open_regular_file)

    def write_step(self, metrics: StepMetrics, *, window: Mapping[str, object] | None = None) -> None:
        """Appends the line of a step, with the figures of a window of steps if one has ended.

        Raises TrainError if it cannot be written.
        """
        self.write_line(metrics.step, metrics.measured_values() | dict(window or {}))

    def write_line(self, step: int, measured: Mapping[str, object]) -> None:
        """Appends a line of a step; numbers that are not finite become null. Raises as `write_step`."""
        values = {key: none_if_not_finite(value) for key, value in measured.items()}
        data = f"{json.dumps({'step': step} | values)}\n".encode()
        with self._convert_write_errors():
            while data:  # what a full disk did not take is written again, for the reason
                data = data[self._file.write(data) or 0 :]

    def flush_to_disk(self, *, fsync: Callable[[int], object] = os.fsync) -> None:
        """Flushes the lines so far to the disk, and the events beside them. Raises TrainError."""
        with self._convert_write_errors():
            fsync(self._file.fileno())
            with suppress(FileNotFoundError):
                fsync_path(self.path.with_name(EVENTS), fsync=fsync)
        with suppress(OSError):  # a file system that cannot flush directories
            fsync_path(self.path.parent, fsync=fsync)

    def drop_steps_after(self, last_step: int) -> None:
        """Drops the lines of steps after `last_step`, which the run repeats. Raises TrainError."""
        self._file.close()
        with self._convert_write_errors():
            _drop_lines_after_step(self.path, last_step)
            self._file = FileIO(self.path, "ab", opener=open_regular_file)

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _convert_write_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            why, fix = os_error_why_and_fix(error, directory="run.dir")
            why = why or "the system says no more"
            raise TrainError(
                f"{self.path} cannot be written any more.",
                got=error.strerror,
                why=f"{why}, and a run without its figures would continue unseen",
                fix=f"{fix or 'a look at the disk'}; then fullshard train --resume",
            ) from error


def record_attempt_start(directory: Path, run: Run, *, ranks: RankInfo) -> None:
    """Appends the `start` of another attempt to train `run`. Raises SpecError if it cannot be written."""
    path = directory / EVENTS
    details = {
        "ranks": ranks.world_size,
        "device": ranks.device.type,
        "steps": run.train.steps,
        "torch": torch.__version__,
        "process": f"{socket.gethostname()}:{os.getpid()}",
        "launch": os.environ.get("TORCHELASTIC_RUN_ID"),
    }
    with convert_write_errors(path, fix=_ANOTHER):
        RunEvent.now("start", attempt=count_attempts(path) + 1, details=details).append_to(path)


def count_attempts(path: Path) -> int:
    """Returns the number of attempts that the file `path` has the start of; 0 if it cannot be read."""
    try:
        return len(read_events(path, kind="start"))
    except OSError:
        return 0


class RunLog:
    """Records finished steps, and events. Does nothing on ranks other than 0. See `open_run_log`."""

    def __init__(
        self,
        *,
        every: int,
        peak_tokens_per_second: float | None = None,
        progress: ProgressPrinter | None = None,
        metrics: MetricsLog | None = None,
        events: Path | None = None,
        trackers: Iterable[TrackerThread] = (),
    ) -> None:
        self.every, self._peak, self._events = every, peak_tokens_per_second, events
        self.attempt = 1 if events is None else count_attempts(events) or 1  # only rank 0 knows it
        self._progress, self._metrics, self._trackers = progress, metrics, list(trackers)
        self._window: dict[str, object] = {}  # figures that the next line of metrics.jsonl gets
        self._tracked: dict[str, float] = {}  # values that the trackers get with the next step

    def record_step(
        self,
        step: Step,
        *,
        compile_seconds: float | None = None,
        peak_bytes: int | None = None,
        results: Mapping[str, float] | None = None,
        memory: Mapping[str, float] | None = None,
    ) -> None:
        """Records and shows a finished step. Raises TrainError if its line cannot be written to disk.

        compile_seconds: seconds of the step in torch.compile, if any
        results: those of the evaluations after it, by name; see `Evaluation.result_key`
        memory: this rank's memory at its end, by name

        The trackers receive every `log.every`-th step, and every step with results.
        """
        metrics = StepMetrics(
            step=step.index,
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            tokens=step.tokens,
            trained_tokens=step.trained_tokens,
            seconds=step.seconds,
            data_seconds=step.data_seconds,
            compile_seconds=compile_seconds,
            skipped=step.skipped,
            mfu=step.tokens / step.seconds / self._peak if self._peak and step.seconds > 0 else None,
            peak_bytes=peak_bytes,
        )
        results = results or {}
        if self._metrics is not None:
            self._metrics.write_step(metrics, window={**results, **(memory or {}), **self._window})
        self._window = {}
        if step.skipped:
            self.record_skip(step)
        if step.index % self.every == 0 or results:
            figures = metrics.measured_values() | dict(results) | dict(memory or {}) | self._tracked
            for one in self._trackers:
                one.log(step.index, figures)
            self._tracked = {}
        self._print_tracker_messages()
        if self._progress is not None:
            self._progress.add_step_and_show_if_due(metrics)
        self._print_results(step.index, results)

    def record_results_before_first_step(self, results: Mapping[str, float]) -> None:
        """Records results of evaluations of the initial model, as those of step 0. Raises TrainError."""
        if self._metrics is not None and results:
            self._metrics.write_line(0, results)
        for one in self._trackers if results else ():
            one.log(0, results)
        self._print_results(0, results)

    def _print_results(self, step: int, results: Mapping[str, float]) -> None:
        for text in results_text(results):
            self.print_message(f"step {step}: {text}")

    def add_window_to_next_step(self, figures: Mapping[str, object], *, tracked: Mapping[str, float]) -> None:
        """Adds a window's figures to the next line of metrics.jsonl, and `tracked` to what trackers get."""
        self._window |= figures
        self._tracked |= tracked

    def record_event(
        self, event: str, *, step: int | None = None, details: Mapping[str, object] | None = None
    ) -> None:
        """Appends an event to events.jsonl. See `spec.records.event.RunEvent` for kinds and details."""
        if self._events is None:
            return
        try:
            RunEvent.now(event, attempt=self.attempt, step=step, details=details).append_to(self._events)
        except OSError as error:  # the run does not depend on its events
            self.print_message(f"{self._events} cannot be written: {error.strerror}; lost: {event}")

    def record_skip(self, step: Step) -> None:
        details = {"loss": step.loss, "grad_norm": step.grad_norm}
        self.record_event("spike" if step.spike else "skip", step=step.index, details=details)

    def print_message(self, text: str) -> None:
        """Prints `text` on standard error, for an event between steps such as a saved checkpoint."""
        if self._progress is not None:
            self._progress.print_line(text)

    def flush_to_disk(self) -> None:
        """Flushes the lines and events so far, which a checkpoint is to acknowledge. Raises TrainError."""
        if self._metrics is not None:
            self._metrics.flush_to_disk()

    def drop_steps_after(self, last_step: int) -> None:
        """Drops the steps after `last_step` from metrics.jsonl, because the run repeats them."""
        if self._metrics is not None:
            self._metrics.drop_steps_after(last_step)

    def close_trackers(self, *, exit_code: int = 0) -> None:
        """Closes the trackers, and passes them the `exit_code` of the run. Waits at most CLOSE_SECONDS."""
        close_trackers(self._trackers, exit_code=exit_code)
        self._print_tracker_messages()
        self._trackers.clear()

    def _print_tracker_messages(self) -> None:
        for one in self._trackers:
            for message in one.take_messages():
                self.print_message(f"{message}\n  the run does not need it; metrics.jsonl has everything")


@contextmanager
def open_run_log(
    run: Run,
    *,
    rank: int,
    world_size: int,
    after_step: int = 0,
    peak_tokens_per_second: float | None = None,
    file: TextIO | None = None,
) -> Generator[RunLog]:
    """Context with the log of a run that resumes after `after_step` (0: a new run). Every rank opens it.

    peak_tokens_per_second: speed of all ranks at which MFU is 1; None if it is not known
    file: destination of the progress; standard error by default

    Raises an error on all ranks if a tracker is not installed, and SpecError on rank 0 if one of a new run
    does not start, or `run.dir` cannot be written.
    """
    steps, every = run.train.step_count, run.log.every
    check_trackers_installed(run.log.trackers)
    if rank != 0:
        yield RunLog(every=every)
        return
    with closing(MetricsLog(run.run.dir, after_step=after_step)) as metrics:
        course = RunProgress(steps=steps, world_size=world_size)
        shown = ProgressPrinter(course, every=every, file=file or sys.stderr)
        trackers = open_trackers(run, after_step=after_step, say=shown.print_line)
        log = RunLog(
            every=every,
            peak_tokens_per_second=peak_tokens_per_second,
            progress=shown,
            metrics=metrics,
            events=Path(run.run.dir, EVENTS),
            trackers=trackers,
        )
        exit_code = 1
        try:
            yield log
            exit_code = 0
        except SystemExit as left:
            exit_code = left.code if isinstance(left.code, int) else 1
            raise
        finally:
            log.close_trackers(exit_code=exit_code)


def _drop_lines_after_step(path: Path, last_step: int) -> None:
    """Rewrites the file without incomplete lines and lines of steps after `last_step`, if it has such."""

    def is_kept(line: bytes) -> bool:
        step = parse_json_line(line).get("step")
        return isinstance(step, int) and step <= last_step

    with open(path, "rb", opener=open_regular_file) as old:
        lines = partial(iter, partial(old.readline, LONGEST_LINE_BYTES), b"")
        if all(map(is_kept, lines())):
            return
        old.seek(0)
        with atomic_replace_context(path) as draft, open_new_file(draft) as new:
            new.writelines(filter(is_kept, lines()))
