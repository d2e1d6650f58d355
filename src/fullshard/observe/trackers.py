"""Experiment trackers of a run: the interface, those built in, and a thread that sends them figures.

A tracker is code from outside, which may be slow or raise any exception. It never ends a run that has begun.
See `docs/trackers.md`.
"""

import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from fullshard.distributed.agreement import ErrorCapture
from fullshard.errors import FullshardError, MissingExtraError, SpecError
from fullshard.quantities import count_text
from fullshard.spec.records.run_files import TRACKERS
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import TRACKERS_OF_EXTRAS
from fullshard.system.files import write_file_atomically

GROUP = "fullshard.trackers"  # group of the entry points of other packages' trackers
MOST_WAITING = 1000  # steps that wait for a slow tracker, before steps are left out
CLOSE_SECONDS = 30.0
"""Time that trackers have at the end of a run. Schedulers kill a process soon after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class TrackerStart:
    """The run that a tracker is started for.

    name: name of the run: the last part of `run.dir`
    run_directory: `run.dir`. A tracker may keep files in its subdirectory `trackers`.
    settings: all settings of the run, by `section.key`
    after_step: the step after which the run resumes; 0 for a new run
    run_id: the tracker's `run_id` in the earlier attempt of this run, which it continues; None for a new run
    """

    name: str
    run_directory: Path
    settings: Mapping[str, Any]
    after_step: int
    run_id: str | None


class Tracker(Protocol):
    """A destination for the figures of a run's steps, made by calling an entry point with a TrackerStart.

    Created on rank 0 only. `log` and `close` are called from one thread.
    """

    @property
    def run_id(self) -> str | None:
        """Identifier with which another process continues this record. It is saved in `trackers.json`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step. Steps are repeated after a rollback, and values may be NaN."""

    def close(self, *, exit_code: int) -> None:
        """Sends remaining data, and how the run ended: finished if `exit_code` is 0."""


class TensorboardTracker:
    """Writes event files into `<run.dir>/tensorboard`. Steps that a resumed run repeats are shown once."""

    run_id = None  # a resumed run writes into the same directory

    def __init__(self, start: TrackerStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = start.run_directory / "tensorboard"
        purge = start.after_step + 1 if start.after_step else None
        try:
            self._writer = SummaryWriter(str(directory), purge_step=purge)
        except OSError as error:
            raise SpecError(f"tensorboard cannot write to {directory}.", got=error.strerror) from error
        settings = "\n".join(f"    {name} = {value}" for name, value in start.settings.items())
        self._writer.add_text("run", settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, exit_code: int) -> None:
        del exit_code  # event files have no place for it
        self._writer.close()


class WandbTracker:
    """Logs to a run of the wandb project `fullshard` (or WANDB_PROJECT), with files in `<run.dir>/wandb`.

    The horizontal axis is our own value `step`: wandb's own step only grows, and drops the figures of steps
    that are repeated after a rollback or a resume.
    """

    def __init__(self, start: TrackerStart) -> None:
        wandb = importlib.import_module("wandb")
        start.run_directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fullshard"),
                name=os.environ.get("WANDB_NAME", start.name),
                dir=str(start.run_directory),
                config=dict(start.settings),
                id=start.run_id,
                resume="allow",
                allow_val_change=True,  # settings may change when a run resumes
                settings=wandb.Settings(console="off"),  # the terminal is ours
            )
        except wandb.errors.Error as error:
            fix = "wandb login, or WANDB_MODE=offline"
            raise SpecError("wandb will not start.", got=str(error), fix=fix) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id: str = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


_CLASSES = (TensorboardTracker, WandbTracker)
_EXTRAS: dict[str, Callable[[TrackerStart], Tracker]] = dict(zip(TRACKERS_OF_EXTRAS, _CLASSES, strict=True))


class TrackerThread:
    """Sends figures to a tracker on a thread, so that a slow or broken tracker neither delays nor ends a run.

    The thread ends with the first exception of the tracker. If MOST_WAITING steps wait, further ones are left
    out. Both are reported by `take_messages`, with the number of steps that were left out at the end.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._waiting = SimpleQueue[tuple[int, Mapping[str, float]] | None]()  # None: the run ends
        self._messages = SimpleQueue[str]()
        self._exit_code = self._left_out = 0
        # A daemon, so that a tracker that hangs cannot keep the process from ending.
        self._thread = Thread(target=self._run, name=f"fullshard-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hands over the values of a step, without waiting. Does nothing if the tracker has failed."""
        if not self._thread.is_alive():
            return
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((step, values))
        else:
            self._left_out += 1
            if self._left_out == 1:
                self._messages.put(f"{self._name} is slow: it lacks steps from step {step} on")

    def take_messages(self) -> list[str]:
        """Returns messages about problems, each once."""
        return [self._messages.get() for _ in range(self._messages.qsize())]

    def start_closing(self, *, exit_code: int) -> None:
        """Lets the thread close the tracker after the steps that wait."""
        self._exit_code = exit_code
        self._waiting.put(None)

    def wait_until_closed(self, *, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            waiting = count_text(max(0, self._waiting.qsize() - 1), "step")
            self._messages.put(f"{self._name} did not end within {CLOSE_SECONDS:g} s, with {waiting} waiting")
        elif self._left_out:
            self._messages.put(f"{self._name} was too slow: it lacks {count_text(self._left_out, 'step')}")

    def _run(self) -> None:
        with ErrorCapture() as caught:
            while (one := self._waiting.get()) is not None:
                self._tracker.log(*one)
            self._tracker.close(exit_code=self._exit_code)
        if caught.error is not None:
            self._messages.put(f"{self._name} failed: {_error_text(caught.error)}")


def check_trackers_installed(names: Sequence[str]) -> None:
    """Raises an error for the first of the named trackers that is not installed. Imports none of them.

    The error is a MissingExtraError for an extra of fullshard, else a SpecError.
    """
    for name in names:
        if name in _EXTRAS:
            if importlib.util.find_spec(name) is None:
                raise MissingExtraError(name, package=name, needed_for=f'log.trackers = ["{name}"]')
        elif name not in (others := entry_points(group=GROUP).names):
            raise SpecError(
                f"log.trackers: there is no tracker {name!r}.",
                got=f'log.trackers = ["{name}"]',
                why=f"there are {', '.join([*_EXTRAS, *sorted(others)])}",
                fix=f"a package with the entry point {name!r} in the group {GROUP!r}: docs/trackers.md",
            )


def open_trackers(
    run: Run, *, after_step: int = 0, say: Callable[[str], object] = print
) -> list[TrackerThread]:
    """Starts the trackers that `run.log.trackers` names, which must be installed.

    Each continues the record of the run's earlier attempts, whose identifiers are in `trackers.json`.

    after_step: the step after which the run resumes, or 0
    say: gets a message about each tracker that a resumed run continues without, because it does not start

    Raises SpecError if a tracker of a new run does not start, and if `trackers.json` cannot be written.
    """
    path = Path(run.run.dir, TRACKERS)
    before = _read_run_ids(path)
    run_ids, opened = dict(before), list[TrackerThread]()
    for name in run.log.trackers:
        with ErrorCapture() as caught:
            tracker = _make_tracker(name, run, after_step=after_step, run_id=before.get(name))
            if tracker.run_id is not None:
                run_ids[name] = tracker.run_id
            opened.append(TrackerThread(name, tracker))
        if caught.error is not None and after_step:
            say(f"{name} does not start: {_error_text(caught.error)}\n  the run resumes without it")
        elif caught.error is not None:
            close_trackers(opened, exit_code=1)
            fix = "leave it out of log.trackers"
            error = SpecError(f"the tracker {name} does not start.", got=_error_text(caught.error), fix=fix)
            raise caught.error if isinstance(caught.error, FullshardError) else error from caught.error
    if run_ids != before:
        try:
            write_file_atomically(path, json.dumps(run_ids, indent=1) + "\n")
        except OSError as error:
            close_trackers(opened, exit_code=1)
            raise SpecError(f"{path} cannot be written.", got=error.strerror) from error
    return opened


def close_trackers(trackers: Iterable[TrackerThread], *, exit_code: int) -> None:
    """Closes the trackers at the same time, and waits for at most CLOSE_SECONDS in all."""
    trackers = list(trackers)
    for one in trackers:
        one.start_closing(exit_code=exit_code)
    end = time.monotonic() + CLOSE_SECONDS
    for one in trackers:
        one.wait_until_closed(seconds=max(0.0, end - time.monotonic()))


def _make_tracker(name: str, run: Run, *, after_step: int, run_id: str | None) -> Tracker:
    start = TrackerStart(
        name=Path(run.run.dir).name,
        run_directory=Path(run.run.dir),
        settings={
            f"{section}.{key}": value
            for section, fields in run.model_dump(mode="json").items()
            for key, value in (fields.items() if isinstance(fields, dict) else enumerate(fields))
        },
        after_step=after_step,
        run_id=run_id,
    )
    if name in _EXTRAS:
        return _EXTRAS[name](start)
    [found, *_] = entry_points(group=GROUP, name=name)
    return found.load()(start)


def _read_run_ids(path: Path) -> dict[str, str]:
    """Returns the identifier of each tracker's record; none if the file is absent or not readable."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: one for name, one in entries if isinstance(one, str)}


def _error_text(error: BaseException) -> str:
    return str(error) if isinstance(error, FullshardError) else repr(error)
