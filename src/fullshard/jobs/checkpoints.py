"""Checkpoints written during a run, synchronously or in the background."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.checkpoint import BackgroundSaver, location_of, read_manifest
from fullshard.checkpoint.save import CheckpointSaver
from fullshard.distributed.agreement import run_on_rank_zero
from fullshard.errors import CheckpointError, OffloadError, TrainError
from fullshard.quantities import format_seconds
from fullshard.spec.plan import Plan
from fullshard.training.state import TrainState


class RunCheckpointSaver(AbstractContextManager["RunCheckpointSaver"]):
    """Saves checkpoints of a run into `directory`. Collective.

    say: prints a message about each save
    record: `RunLog.record_event`, called with the event of each save
    flush: `RunLog.flush_to_disk`, called before each save, which acknowledges all steps before it

    last: the newest checkpoint that was written
    postponed: whether a save is due that was not made because steps were skipped
    """

    def __init__(
        self,
        directory: str | Path,
        plan: Plan,
        *,
        say: Callable[[str], None],
        record: Callable[..., object] = lambda event, *, step, details: None,
        flush: Callable[[], object] = lambda: None,
    ) -> None:
        self._say, self._record, self._flush = say, record, flush
        section = plan.run.checkpoint
        options = section.model_dump(include={"keep", "keep_every"})
        self._saver = CheckpointSaver(location_of(directory), plan=plan, **options)
        in_background = section.mode == "async"
        self._background = BackgroundSaver(directory, plan=plan, **options) if in_background else None
        self.last: Path | str | None = None
        self.postponed = False

    def __exit__(self, *error: Any) -> None:
        if self._background is not None:
            self._background.__exit__(*error)

    def save(self, state: TrainState) -> bool:
        """Saves `state`, and returns whether it did. In the mode `async`, only starts the save.

        If the last step was skipped, sets `postponed` instead: what the run does next shows whether the state
        can still be trained. See [Note: the last good checkpoint] in `checkpoint.location`.

        A CheckpointError, also for a state that no training can continue from, is reported, not raised.
        Raises TrainError if the log cannot be flushed, and OffloadError if the last update failed, because
        then there is no state to train on.
        """
        state.wait_for_updates()
        skipped = state.counts.wait_and_count_unread().skipped_in_a_row
        if skipped and not self.postponed:
            were = "step was" if skipped == 1 else f"{skipped} steps were"
            after = "saved after the next step that is not"
            self._say(f"step {state.step}: not saved, since the last {were} skipped; {after}")
        self.postponed = skipped > 0
        if skipped:
            return False
        started = time.perf_counter()
        self._flush()
        try:
            if self._background is not None:
                self._background.save(state)
            else:
                self._report_saved(self._saver.save(state), step=state.step, started=started)
        except CheckpointError as error:
            self._report_save_failure(error, step=state.step)
            return False
        return True

    def save_last(self, state: TrainState) -> None:
        """Saves `state` at the end of the run, and returns when the checkpoint is written.

        If no run should resume from it (see [Note: the last good checkpoint]), none will from the newest
        generation on the offload drive either. Raises CheckpointError, OffloadError if the state cannot be
        read from its drive, and TrainError for a state, saved now, that no training can continue from.
        """
        state.wait_for_updates()
        self.wait_for_saves()
        started, before = time.perf_counter(), self.last
        self._flush()
        try:
            path = replace(self._saver, saves_unusable=True).save(state)
        except CheckpointError as error:
            if isinstance(cause := error.__cause__, OffloadError):
                raise type(cause)(error.what, got=error.got, why=error.why, fix=error.fix) from error
            raise
        manifest = run_on_rank_zero(lambda: read_manifest(path), doing=f"reading {path}")
        if state.offloaded and manifest.why_avoided is not None:
            state.offloaded.withdraw_generation()
        self._report_saved(path, step=state.step, started=started)
        if manifest.unusable is not None:
            raise TrainError(
                f"no training can continue from the state after step {state.step}.",
                got=manifest.unusable,
                why=f"{path} holds it, but is loaded only by its name, or without another checkpoint",
                fix=f"--resume, which starts at {before or 'the checkpoint before it, if there is one'}",
            )

    def report_finished_saves(self) -> None:
        """Reports the background saves that finished since the last call."""
        for ended in self._background.outcomes() if self._background is not None else ():
            if ended.path is not None:
                took, waited = ended.seconds, ended.stalled_seconds
                self._say(
                    f"step {ended.step}: saved {ended.path} in {format_seconds(took)}, while training waited "
                    f"{format_seconds(waited)}"
                )
                self._record_saved(ended.path, step=ended.step, seconds=took, stalled_seconds=waited)
            if ended.error is not None:
                self._report_save_failure(ended.error, step=ended.step)

    def wait_for_saves(self) -> None:
        """Waits until no background save is running, and reports the finished ones."""
        if self._background is not None:
            self._background.wait()
            self.report_finished_saves()

    def _report_saved(self, path: Path | str, *, step: int, started: float) -> None:
        """Reports a checkpoint for which training waited since `started`, a time of `perf_counter`."""
        seconds = time.perf_counter() - started
        self._say(f"step {step}: saved {path}")
        self._record_saved(path, step=step, seconds=seconds, stalled_seconds=seconds)

    def _record_saved(self, path: Path | str, *, step: int, seconds: float, stalled_seconds: float) -> None:
        self.last = path
        details = {"path": str(path), "seconds": seconds, "stalled_seconds": stalled_seconds}
        self._record("save", step=step, details=details)

    def _report_save_failure(self, error: CheckpointError, *, step: int) -> None:
        self._say(f"step {step}: NOT SAVED; training continues\n{error}")
        self._record("save_failed", step=step, details={"error": str(error)})
