"""Everything that a run's directory says about the run, also while it trains and after it died."""

import errno
import math
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from fullshard.errors import SpecError
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.measurement import Measurement
from fullshard.spec.records.run_files import EVENTS, MEASUREMENT, METRICS, PLAN
from fullshard.spec.settings.evaluate_section import RESULT
from fullshard.system.small_files import parse_json_line, read_last_lines

Points: TypeAlias = Sequence[tuple[float, float]]
RunState = Literal["finished", "stopped", "running", "restarting", "failed", "lost"]
T = TypeVar("T")

# A launcher starts ranks again within this time; later, it must have ended, too.
_RESTART_SECONDS = 300.0


_NAMES = (
    "loss",
    "validation_loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "trained_tokens",
    "tokens_per_second",
    "seconds",
    "data_seconds",
    "skipped",
    "peak_bytes",
    "resident_bytes",
    "peak_allocated_bytes",
)
LONGEST_LINE_BYTES = 1 << 16
_MOST_BYTES, _MOST_LINES = 1 << 30, 2_000_000
_LARGEST_FIGURE = 1e100
_MOST_RESULTS = 64
_LARGEST_STEP = 2**53  # which a float holds exactly


@dataclass(frozen=True)
class StepColumns:
    """Figures by step. Values that were not measured, or are not finite, are NaN.

    steps: numbers of the steps, ascending
    results: (step, value) of each result of [[evaluate]] by name, also of step 0, before the first
    columns: values by name, each as long as `steps`. See `fullshard.observe.step_metrics.StepMetrics`, and
        `fullshard.observe.memory.read_memory_and_reset_peaks` for those of rank 0's memory.
    """

    steps: "array[float]"
    columns: "dict[str, array[float]]"
    results: dict[str, Points] = field(default_factory=dict[str, Points])

    def points(self, name: str) -> Points:
        """Returns (step, value) of the steps in which `name` was measured."""
        values = self.columns[name]
        return [(step, one) for step, one in zip(self.steps, values, strict=True) if not math.isnan(one)]

    def values(self, name: str) -> list[float]:
        """Returns the measured values of `name`, in the order of steps."""
        return [value for value in self.columns[name] if not math.isnan(value)]

    def skipped_steps(self) -> list[int]:
        return [int(step) for step, skipped in self.points("skipped") if skipped]


def read_steps(path: Path) -> StepColumns:
    """Reads the whole lines of a `metrics.jsonl`, also while a run writes it.

    None without the file. If a step has several lines, the last counts: a resumed run repeats steps. Raises
    OSError, also for more than two million lines in the last GiB.
    """
    found, results = dict[float, "array[float]"](), dict[float, dict[str, float]]()
    lines = read_last_lines(path, most_bytes=_MOST_BYTES, longest=LONGEST_LINE_BYTES)
    for number, line in enumerate(lines):
        if number == _MOST_LINES:
            raise OSError(errno.EFBIG, f"it has more than {_MOST_LINES:,} lines", str(path))
        fields = parse_json_line(line)
        step = _figure_or_nan(fields.get("step"))
        if 0 < step <= _LARGEST_STEP:
            found[step] = array("d", [_figure_or_nan(fields.get(name)) for name in _NAMES])
        if 0 <= step <= _LARGEST_STEP:
            results[step] = {key: _figure_or_nan(fields[key]) for key in fields if RESULT.fullmatch(key)}
            if not results[step]:
                del results[step]
    steps = sorted(found)
    columns = {name: array("d", [found[step][i] for step in steps]) for i, name in enumerate(_NAMES)}
    return StepColumns(array("d", steps), columns, _points_by_name(results))


def _points_by_name(results: Mapping[float, Mapping[str, float]]) -> dict[str, Points]:
    """Returns (step, value) of the finite results, by name, of at most _MOST_RESULTS names."""
    found: dict[str, list[tuple[float, float]]] = {}
    for step in sorted(results):
        for name, value in results[step].items():
            if not math.isnan(value) and (name in found or len(found) < _MOST_RESULTS):
                found.setdefault(name, []).append((step, value))
    return dict(found)


def _figure_or_nan(value: object) -> float:
    """Returns a number of at most 1e100 as float, 0 if it is below 1e-100, and NaN for anything else.

    Nothing that a run measures is larger or smaller, and sums, ratios and logarithms of figures are finite.
    """
    if not isinstance(value, int | float) or not abs(value) <= _LARGEST_FIGURE:
        return math.nan
    return float(value) if abs(value) >= 1 / _LARGEST_FIGURE else 0.0


@dataclass(frozen=True)
class RunRecord:
    """The records of one run.

    state: finished; stopped, on request, saved or not; running; restarting; failed, with an error; lost,
        without a record of its end, like a process that was killed
    plan: plan of the last attempt; None if it is not known
    measurement: what the last attempt measured; None if it has not ended, or ended without
    unreadable: names of records that are there, and that this version cannot read
    """

    directory: Path
    state: RunState
    metrics: StepColumns
    plan: Plan | None = None
    measurement: Measurement | None = None
    events: list[RunEvent] = field(default_factory=list[RunEvent])
    unreadable: tuple[str, ...] = ()

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none."""
        return int(self.metrics.steps[-1]) if self.metrics.steps else 0

    @property
    def prediction(self) -> Prediction | None:
        return None if self.plan is None else self.plan.prediction

    @property
    def planned_steps(self) -> int | None:
        """Number of the run's steps; None if the plan is not known."""
        return None if self.plan is None else self.plan.run.train.steps

    @property
    def attempts(self) -> int:
        return max((event.attempt for event in self.events), default=1)

    @property
    def seconds_in_attempts(self) -> float | None:
        """Seconds of all attempts, from each start to its last event; None without a start."""
        starts = [index for index, event in enumerate(self.events) if event.event == "start"]
        if not starts:
            return None
        spans = pairwise([*starts, len(self.events)])
        return sum((self.events[b - 1].at - self.events[a].at).total_seconds() for a, b in spans)

    def values_of_last_attempt(self, name: str) -> list[float]:
        """Returns the known values of a column of the steps since the run was last resumed."""
        resumed = (event for event in self.events_of_kinds("resume") if event.attempt == self.attempts)
        after = max((event.step or 0 for event in resumed), default=0)
        return [value for step, value in self.metrics.points(name) if step > after]

    def events_of_kinds(self, *kinds: str) -> list[RunEvent]:
        return [event for event in self.events if event.event in kinds]


def read_run(directory: Path, *, is_running: bool, now: datetime) -> RunRecord:
    """Reads the records in `directory`.

    is_running: whether a process holds the lock of the directory

    Raises SpecError if it is not the directory of a run, or if its steps or events cannot be read.
    """
    if not os.path.isdir(directory):  # which is also False for names that are too long
        raise SpecError(f"{directory} is not a directory.", fix="the directory of a run: runs/default")
    try:
        metrics, events = read_steps(directory / METRICS), read_events(directory / EVENTS)
    except OSError as error:
        raise SpecError(f"{error.filename} cannot be read.", got=error.strerror) from error
    unreadable: list[str] = []
    measurement = _load_if_present(directory / MEASUREMENT, Measurement.load, unreadable=unreadable)
    planned = _load_if_present(directory / PLAN, Plan.load, unreadable=unreadable)
    if not metrics.steps and not events and measurement is None:
        raise SpecError(
            f"{directory} holds no run.",
            got=f"no {METRICS}, no {EVENTS} and no {MEASUREMENT} that this version can read",
            fix="the directory that run.dir names, such as runs/default",
        )
    if measurement is not None and not _is_measurement_of_last_attempt(events):
        measurement = None
    plan = planned if measurement is not None else (_last_recorded_plan(events) or planned)
    if measurement is not None:
        moved = _current_path(measurement.checkpoint, measurement.directory, directory=directory)
        measurement = measurement.model_copy(update={"directory": str(directory), "checkpoint": moved})
    for index, event in enumerate(events):
        if plan is not None and isinstance(path := event.details.get("path"), str):
            moved = _current_path(path, plan.run.run.dir, directory=directory)
            events[index] = event.model_copy(update={"path": moved})
    return RunRecord(
        directory=directory,
        state=_find_state(events, is_running=is_running, now=now),
        metrics=metrics,
        plan=plan,
        measurement=measurement,
        events=events,
        unreadable=tuple(unreadable),
    )


def _current_path(path: str | None, earlier: str, *, directory: Path) -> str | None:
    """Returns the present path of a recorded file. `earlier`: the run's directory when it was recorded."""
    own = f"{Path(earlier)}/"
    return str(directory / path[len(own) :]) if path is not None and path.startswith(own) else path


def _load_if_present(path: Path, load: Callable[[Path], T], *, unreadable: list[str]) -> T | None:
    """Returns the record at `path`, or None. Adds its name to `unreadable` if it cannot be read."""
    if not path.exists():
        return None
    try:
        return load(path)
    except SpecError:
        unreadable.append(path.name)
        return None


def _is_measurement_of_last_attempt(events: list[RunEvent]) -> bool:
    """Returns whether the last attempt wrote the measurement: an attempt that died leaves an older one."""
    for event in reversed(events):
        if event.event == "start":
            return False
        if event.event == "end" or (event.event == "stop" and event.details.get("saved") is True):
            return True
    return not events  # an earlier version wrote none


def _last_recorded_plan(events: list[RunEvent]) -> Plan | None:
    """Returns the plan of the last attempt that recorded one; None if this version cannot read it."""
    plans = [event.details.get("plan") for event in events if event.event == "plan"]
    if not plans or not isinstance(plans[-1], dict):
        return None
    try:
        return Plan.model_validate(plans[-1], extra="ignore")
    except ValidationError:
        return None


def _find_state(events: list[RunEvent], *, is_running: bool, now: datetime) -> RunState:
    """Returns the state by the last event that decides it; a restart without a start is soon `lost`."""
    if is_running:
        return "running"
    state: RunState = "lost"
    for event in events:
        if event.event in ("start", "restart"):
            state = "lost" if event.event == "start" else "restarting"
        elif event.event == "end":
            state = "finished"
        elif event.event == "stop":
            state = "stopped"
        elif event.event == "fault":
            state = "failed"
    if state == "restarting" and (now - events[-1].at).total_seconds() > _RESTART_SECONDS:
        return "lost"
    return state
