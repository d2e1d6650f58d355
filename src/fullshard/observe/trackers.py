"""Experiment trackers of a run: finding them, starting them, and sending them figures from a thread.

A tracker is code from outside, which may be slow or raise any exception. See `docs/trackers.md`.
"""

import importlib.util
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Self

from fullshard.errors import FullshardError, MissingExtraError, SpecError
from fullshard.observe.tracker import (
    MlflowTracker,
    TensorboardTracker,
    Tracker,
    TrackerStart,
    WandbTracker,
)
from fullshard.spec.records.run_files import TRACKERS
from fullshard.spec.run import Run
from fullshard.spec.settings.run_checks import TRACKERS_OF_EXTRAS
from fullshard.system.files import write_file_atomically

_CLASSES = (TensorboardTracker, WandbTracker, MlflowTracker)
_EXTRAS: dict[str, Callable[[TrackerStart], Tracker]] = dict(zip(TRACKERS_OF_EXTRAS, _CLASSES, strict=True))
GROUP = "fullshard.trackers"  # group of the entry points of other packages' trackers
MOST_WAITING = 1000  # steps that wait for a slow tracker, before steps are left out
CLOSE_SECONDS = 30.0
"""Time that trackers have at the end of a run. Schedulers kill a process soon after SIGTERM."""


class CaughtError:
    """Context that ends any exception of a tracker's code in its block, and keeps it in `error`.

    This is the one place where exceptions of every kind are caught: those of other people's trackers are not
    known, and none of them may end a run.
    """

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None

    @property
    def text(self) -> str:
        return str(self.error) if isinstance(self.error, FullshardError) else repr(self.error)


class TrackerThread:
    """Sends figures to a tracker on a thread, so that a slow or broken tracker neither delays nor ends a run.

    The thread ends with the first exception of the tracker. If MOST_WAITING steps wait, further ones are left
    out. Both are reported by `take_message`, with the number of steps that were left out at the end.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._changed = Condition()  # guards all that follows
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._exit_code: int | None = None
        self._message: str | None = None
        self._left_out = 0
        # A daemon, so that a tracker that hangs cannot keep the process from ending.
        self._thread = Thread(target=self._run, name=f"fullshard-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hands over the values of a step, without waiting. Does nothing if the tracker has failed."""
        if not self._thread.is_alive():
            return
        with self._changed:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append((step, values))
            else:
                self._left_out += 1
                if self._left_out == 1:
                    self._message = f"{self._name} is slow: it lacks steps from step {step} on"
            self._changed.notify()

    def take_message(self) -> str | None:
        """Returns a message about a problem, once."""
        with self._changed:
            message, self._message = self._message, None
        return message

    def start_closing(self, *, exit_code: int) -> None:
        """Lets the thread close the tracker after the steps that wait."""
        with self._changed:
            self._exit_code = exit_code
            self._changed.notify()

    def wait_until_closed(self, *, seconds: float) -> None:
        """Waits for the thread, for at most `seconds`."""
        self._thread.join(seconds)
        with self._changed:
            if self._thread.is_alive():
                waiting = len(self._waiting)
                self._message = f"{self._name} did not end within {CLOSE_SECONDS:g} s; {waiting} steps wait"
            elif self._left_out and self._message is None:
                self._message = f"{self._name} was too slow: it lacks {self._left_out:,} steps"

    def _run(self) -> None:
        with CaughtError() as caught:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._exit_code is not None)
                    if not self._waiting:
                        break
                    step, values = self._waiting.popleft()
                self._tracker.log(step, values)
            self._tracker.close(exit_code=self._exit_code or 0)
        if caught.error is not None:
            with self._changed:
                self._message = f"{self._name} failed: {caught.text}"


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
        with CaughtError() as caught:
            tracker = _make_tracker(name, run, after_step=after_step, run_id=before.get(name))
            if tracker.run_id is not None:
                run_ids[name] = tracker.run_id
            opened.append(TrackerThread(name, tracker))
        if caught.error is not None and after_step:
            say(f"{name} does not start: {caught.text}\n  the run resumes without it")
        elif caught.error is not None:
            close_trackers(opened, exit_code=1)
            fix = "leave it out of log.trackers"
            error = SpecError(f"the tracker {name} does not start.", got=caught.text, fix=fix)
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
            for key, value in fields.items()
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
