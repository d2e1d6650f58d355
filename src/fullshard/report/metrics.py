"""The figures of a run's steps, read from `metrics.jsonl` into columns."""

import json
import math
import os
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from fullshard.report.curves import Points
from fullshard.system.files import open_regular_file

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
    "mfu",
    "peak_bytes",
    "host_bytes",
    "resident_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "allocator_retries",
    "fragmentation",
)
_LONGEST_LINE_BYTES = 1 << 16
_LARGEST_STEP = 2**53  # which a float holds exactly


@dataclass(frozen=True)
class StepColumns:
    """Figures by step. Values that were not measured, or are not finite, are NaN.

    steps: numbers of the steps, ascending
    columns: values by name, each as long as `steps`. See `fullshard.jobs.progress.StepMetrics`, and
        `fullshard.profiler.live_memory.LiveMemoryMeter` for those of rank 0's memory.
    """

    steps: "array[float]" = field(default_factory=lambda: array("d"))
    columns: "dict[str, array[float]]" = field(
        default_factory=lambda: {name: array("d") for name in _NAMES},
    )

    @property
    def last_step(self) -> int | None:
        return int(self.steps[-1]) if self.steps else None

    def points(self, name: str) -> Points:
        """Returns (step, value) of the steps in which `name` was measured."""
        values = self.columns[name]
        return [(step, one) for step, one in zip(self.steps, values, strict=True) if not math.isnan(one)]

    def values(self, name: str) -> list[float]:
        """Returns the measured values of `name`, in the order of steps."""
        return [value for value in self.columns[name] if not math.isnan(value)]

    def skipped_steps(self) -> list[int]:
        """Returns the steps that updated nothing."""
        return [int(step) for step, skipped in self.points("skipped") if skipped]


class MetricsReader:
    """Reads the lines of a `metrics.jsonl` that were added since the last call, also while a run writes it.

    columns: the figures so far. If a step has several lines, the last counts: a resumed run repeats steps.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_again()

    def read_new_lines(self) -> None:
        """Adds all whole lines that are new. Starts again if the file was replaced. Raises OSError."""
        try:
            with open(self._path, "rb", opener=open_regular_file) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._start_again()
                self._inode = status.st_ino
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # the rest is written later
                    self._offset += len(line)
                    self._add_line(line)
        except FileNotFoundError:
            self._start_again()

    def _start_again(self) -> None:
        self.columns, self._inode, self._offset = StepColumns(), 0, 0

    def _add_line(self, line: bytes) -> None:
        fields = _parse_line(line)
        step = _number(fields.get("step"))
        if not 0 < step <= _LARGEST_STEP:
            return
        steps = self.columns.steps
        place = bisect_left(steps, step) if steps and step <= steps[-1] else len(steps)
        is_known = place < len(steps) and steps[place] == step
        if not is_known:
            steps.insert(place, step)
        for name, column in self.columns.columns.items():
            value = _number(fields.get(name))
            if is_known:
                column[place] = value
            else:
                column.insert(place, value)


def read_metrics(path: Path) -> StepColumns:
    """Reads the figures of all whole lines of the file `path`; none if it does not exist. Raises OSError."""
    reader = MetricsReader(path)
    reader.read_new_lines()
    return reader.columns


def _parse_line(line: bytes) -> dict[str, Any]:
    if len(line) > _LONGEST_LINE_BYTES or not line.endswith(b"\n"):
        return {}
    try:
        fields: object = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], fields) if isinstance(fields, dict) else {}


def _number(value: object) -> float:
    """Returns a finite number as float, and NaN for anything else."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan
