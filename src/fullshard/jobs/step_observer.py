"""Observes the steps of a run on this rank: records their spans, and writes some of them."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from fullshard.distributed.agreement import all_gather_object, rank
from fullshard.distributed.ranges import record_ranges
from fullshard.jobs.run_log import RunLog
from fullshard.jobs.span_files import SpanFile
from fullshard.jobs.straggler_watch import StragglerWatch, WindowResult
from fullshard.profiler.clock_offset import compare_clocks
from fullshard.profiler.interruptions import Interruptions
from fullshard.profiler.recorded_step import RecordedStep
from fullshard.profiler.span_clock import DeviceClock, HostClock, SpanClock
from fullshard.profiler.step_recorder import StepRecorder
from fullshard.profiler.unit_hooks import UnitHooks, record_units
from fullshard.quantities import format_seconds
from fullshard.spec.straggler import StragglerCause
from fullshard.survival.phase import PhaseTracker
from fullshard.survival.stragglers import Straggler
from fullshard.training.loop import Step

STEPS_AROUND_EVENT = 3  # the step before it, that of the event, and the next one, which is detailed
MOST_LISTED_RANKS = 512
"""Ranks up to which metrics.jsonl lists the own seconds of each."""
_EARLY = 10
"""A step of each attempt that is written, so that short runs have one. Earlier ones are detailed."""
_MOST_EVENTS = 20  # of one attempt, around which steps are written


class StepObserver:
    """Writes sampled steps, and steps around events. All ranks call each method in the same steps.

    Sampled steps, and those after an event, have the spans of each unit. Others have those of phases and
    collectives.

    hooks: the wrapped methods of the units
    every: number of steps between samples
    first_step: number of the attempt's first step

    file: the rank's file of spans
    """

    def __init__(
        self,
        recorder: StepRecorder,
        file: SpanFile,
        *,
        hooks: UnitHooks,
        watch: StragglerWatch,
        log: RunLog,
        every: int,
        first_step: int,
    ) -> None:
        self.recorder, self.file, self._hooks = recorder, file, hooks
        self._watch, self._log = watch, log
        self._held_up: set[tuple[int, StragglerCause]] = set()
        self.note_phase, self.current_wait = recorder.note_phase, recorder.current_wait  # of `PhaseObserver`
        self._every, self._first, self._seen, self._events = every, first_step, first_step - 1, 0
        self._event: tuple[str, int] | None = None
        self._prepare_step(first_step)

    def observe_step(self, step: Step) -> None:
        """Observes `step`, which `train` yielded."""
        self._watch.add_steps(self.take_closed_steps())
        result = self._watch.exchange(step.index)
        if result is not None:
            self._report_window(result, step=step.index)
        if step.result.is_read and step.skipped:
            self.note_event("spike" if step.spike else "skip", step=step.index)
        self._prepare_step(step.index + 1)

    def take_closed_steps(self) -> list[RecordedStep]:
        """Returns the steps that were closed since the last call, and writes those that are due."""
        closed = self.recorder.closed_after(self._seen)
        if not closed:
            return []
        self._seen = closed[-1].step
        self.file.write((step for step in closed if self._is_sampled(step.step)), reason="sampled")
        if self._event is not None and self._seen > self._event[1]:
            self._write_event()
        return closed

    def note_event(self, event: str, *, step: int) -> None:
        """Writes the steps around `step`, which has just been run, once the next one is closed."""
        self._events += 1
        if self._events <= _MOST_EVENTS:
            self._event = (event, step)

    def forget_after(self, step: int) -> None:
        """Notes that the steps after `step` are repeated."""
        self._seen = min(self._seen, step)
        self._watch.forget()
        self.recorder.drop_after(step)
        self.file.forget_after(step)
        self._prepare_step(step + 1)

    def write_predicted(self, line: str | None) -> None:
        """Writes the planned step beside the measured ones: see `SpanFile.write_predicted`."""
        self.file.write_predicted(line)

    def write_last(self) -> None:
        """Writes the steps around an event of the last one, and the last step of a run shorter than ten."""
        self.recorder.finish()
        self.take_closed_steps()
        if self._event is not None:
            self._write_event()
        if self._seen < self._first + _EARLY - 1:
            self.file.write([*self.recorder.closed][-1:], reason="last")

    def note_hang(self) -> None:
        """Writes the last steps, and the one that hangs. See `PhaseObserver`."""
        last = [*self.recorder.closed][-STEPS_AROUND_EVENT + 1 :]
        self.file.write([*last, *self.recorder.copy_open_step()], reason="watchdog")

    def _report_window(self, result: WindowResult, *, step: int) -> None:
        """Records a window's figures, and the ranks that begin or cease to hold the others up in it.

        step: the last step that was run
        """
        figures: dict[str, object] = {"waiting_seconds": round(result.waiting_seconds, 6)}
        if len(result.own_seconds) <= MOST_LISTED_RANKS:
            figures["own_seconds"] = [round(one, 6) for one in result.own_seconds]
        tracked = {"waiting_seconds": result.waiting_seconds, "own_seconds_most": max(result.own_seconds)}
        for one in result.stragglers:
            tracked |= {"straggler_rank": one.rank, f"straggler_seconds/{one.cause}": one.seconds}
        self._log.record_window(figures, tracked=tracked)
        before, first = self._held_up, result.last_step - self._watch.every + 1
        self._held_up = {(one.rank, one.cause) for one in result.stragglers}
        for one, cause in sorted(before - self._held_up):
            self._log.record_event("straggler_over", step=first, details={"rank": one, "cause": cause})
        for one in result.stragglers:
            if (one.rank, one.cause) not in before:
                self._log.print_message(straggler_text(one, step=result.last_step))
                details = {"rank": one.rank, "cause": one.cause, "from_step": first}
                details |= {"seconds": one.seconds, "share": one.share}
                self._log.record_event("straggler", step=result.last_step, details=details)
                self.note_event("straggler", step=step)

    def _write_event(self) -> None:
        assert self._event is not None, "there is an event"
        self.file.write([*self.recorder.closed][-STEPS_AROUND_EVENT:], reason=self._event[0])
        self._event = None

    def _prepare_step(self, step: int) -> None:
        """Prepares the recording of `step`, which is the next one."""
        follows_event = self._event is not None and step == self._event[1] + 1
        is_early = step < self._first + _EARLY
        self._hooks.set_detailed(is_early or follows_event or self._is_sampled(step))

    def _is_sampled(self, step: int) -> bool:
        return step % self._every == 0 or step - self._first + 1 == _EARLY


class NoObserver:
    """Stands for a StepObserver in a run that records no spans."""

    def observe_step(self, step: Step) -> None: ...
    def forget_after(self, step: int) -> None: ...
    def write_last(self) -> None: ...
    def write_predicted(self, line: str | None) -> None: ...


@contextmanager
def observe_steps(
    model: nn.Module, phases: PhaseTracker, *, log: RunLog, directory: Path, every: int, first_step: int
) -> Generator[StepObserver | NoObserver]:
    """Context in which the steps that train `model` are observed; or not, if `every` is 0. Collective.

    every, first_step: see `StepObserver`
    """
    if every == 0:
        yield NoObserver()
        return
    with ExitStack() as stack:
        attempt = all_gather_object(log.attempt)[0]
        file = SpanFile(directory, rank=rank(), attempt=attempt, say=log.print_message)
        file.offset = compare_clocks()
        interruptions = stack.enter_context(Interruptions())
        recorder = StepRecorder(_make_clock(model), interruptions=interruptions)
        stack.callback(recorder.close)
        stack.enter_context(record_ranges(recorder))
        hooks = stack.enter_context(record_units(model, recorder))
        watch = StragglerWatch(every=log.every, device=next(model.parameters()).device)
        observer = StepObserver(
            recorder, file, hooks=hooks, watch=watch, log=log, every=every, first_step=first_step
        )
        phases.observer = observer
        stack.callback(setattr, phases, "observer", None)
        yield observer


def straggler_text(one: Straggler, *, step: int) -> str:
    """Returns the message about a rank that holds the others up."""
    per_step = f", {format_seconds(one.seconds)} per step ({100 * one.share:.0f} %)" if one.seconds else ""
    return f"step {step}: rank {one.rank} holds the others up: {one.cause}{per_step}"


def _make_clock(model: nn.Module) -> SpanClock:
    device = next(model.parameters()).device
    return (
        DeviceClock(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else HostClock()
    )
