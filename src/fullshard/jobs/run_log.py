"""The log that rank 0 shows and keeps of every step: the progress, `metrics.jsonl`, and the trackers."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, contextmanager
from typing import TextIO

from fullshard.errors import TrainError
from fullshard.jobs.metrics import MetricsLog, StepMetrics
from fullshard.jobs.progress import Progress, progress
from fullshard.jobs.trackers import Tracker, open_trackers, require_trackers
from fullshard.spec.measurement import MatmulPeak, peak_tokens_per_second
from fullshard.spec.run import Run
from fullshard.training.loop import Step


class RunLog:
    """Records finished steps. Created by `open_run_log`; on ranks other than 0 it does nothing.

    peak_tokens_per_second: reference for MFU (see `fullshard.spec.measurement`); None for no MFU
    """

    def __init__(
        self,
        *,
        every: int,
        peak_tokens_per_second: float | None = None,
        progress: Progress | None = None,
        metrics: MetricsLog | None = None,
        trackers: Iterable[Tracker] = (),
    ) -> None:
        self._every, self._peak = every, peak_tokens_per_second
        self._progress, self._metrics, self._trackers = progress, metrics, list(trackers)

    def step(
        self, step: Step, *, peak_bytes: int | None = None, validation_loss: float | None = None
    ) -> None:
        """Records and shows a finished step.

        peak_bytes: peak memory of the fullest rank, if it was measured

        The trackers receive every `log.every`-th step, and those with a validation loss. Raises TrainError if
        the line cannot be written to disk.
        """
        metrics = StepMetrics(
            step=step.index,
            loss=step.loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            tokens=step.tokens,
            seconds=step.seconds,
            data_seconds=step.data_seconds,
            skipped=step.skipped,
            mfu=step.tokens / step.seconds / self._peak if self._peak and step.seconds > 0 else None,
            peak_bytes=peak_bytes,
            validation_loss=validation_loss,
        )
        if self._metrics is not None:
            self._metrics.write(metrics)
        if step.index % self._every == 0 or validation_loss is not None:
            self._track(metrics)
        if self._progress is not None:
            self._progress.show(metrics)
        if validation_loss is not None:
            self.message(f"step {step.index}: validation loss {validation_loss:.4f}")

    def message(self, text: str) -> None:
        """Prints a line on standard error for an event between steps, such as a saved checkpoint."""
        if self._progress is not None:
            self._progress.say(text)

    def rewind(self, last_step: int) -> None:
        """Drops the steps after `last_step`, to which the run returns. `metrics.jsonl` stays one curve."""
        if self._metrics is not None:
            self._metrics.rewind(last_step)

    def close(self, *, exit_code: int = 0) -> None:
        """Closes the trackers, and passes them the `exit_code` of the run."""
        for tracker in self._trackers:
            self._try(lambda tracker=tracker: tracker.close(exit_code=exit_code))
        self._trackers.clear()

    def _track(self, metrics: StepMetrics) -> None:
        values = metrics.values()
        reached = [
            tracker
            for tracker in self._trackers
            if self._try(lambda tracker=tracker: tracker.log(metrics.step, values))
        ]
        self._trackers = reached

    def _try(self, act: Callable[[], None]) -> bool:
        """Returns whether `act` succeeded.

        Losing a tracker does not end the run: `metrics.jsonl` has everything.
        """
        try:
            act()
        except TrainError as error:
            self.message(f"{error}\n  the run continues without it; metrics.jsonl has everything")
            return False
        return True


@contextmanager
def open_run_log(
    run: Run,
    *,
    rank: int,
    world_size: int,
    after_step: int = 0,
    flops_per_token: float | None = None,
    peak: MatmulPeak | None = None,
    file: TextIO | None = None,
) -> Generator[RunLog]:
    """Opens the log of a run that resumes after `after_step` (0: a new run). Every rank opens it alike.

    flops_per_token, peak: values that MFU is computed from
    file: destination of the progress; standard error by default

    Raises MissingExtraError on all ranks for a tracker that is not installed, and SpecError if a tracker does
    not start or `run.dir` cannot be written.
    """
    require_trackers(run.log.trackers)
    if rank != 0:
        yield RunLog(every=run.log.every)
        return
    at_peak = None
    if peak is not None and flops_per_token:
        at_peak = peak_tokens_per_second(peak, flops_per_token=flops_per_token, world_size=world_size)
    with (
        closing(MetricsLog(run.run.dir, after_step=after_step)) as metrics,
        progress(
            steps=run.train.steps, every=run.log.every, world_size=world_size, file=file or sys.stderr
        ) as shown,
    ):
        log = RunLog(
            every=run.log.every,
            peak_tokens_per_second=at_peak,
            progress=shown,
            metrics=metrics,
            trackers=open_trackers(run, after_step=after_step),
        )
        exit_code = 1
        try:
            yield log
            exit_code = 0
        except SystemExit as left:
            exit_code = left.code if isinstance(left.code, int) else 1
            raise
        finally:
            log.close(exit_code=exit_code)
