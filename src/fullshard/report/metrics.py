"""The figures of a run's steps, read from `metrics.jsonl` into columns."""

import json
import math
from array import array
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
    "tokens_per_second",
    "seconds",
    "data_seconds",
    "skipped",
    "mfu",
    "peak_bytes",
)
_LONGEST_LINE_BYTES = 1 << 16
_LARGEST_STEP = 2**53  # which a float holds exactly


@dataclass(frozen=True)
class StepColumns:
    """Figures by step. Values that were not measured, or are not finite, are NaN.

    steps: numbers of the steps, ascending
    columns: values by name, each as long as `steps`. See `fullshard.jobs.progress.StepMetrics`.
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


def read_metrics(path: Path) -> StepColumns:
    """Reads the figures of all whole lines of the file `path`; none if it does not exist. Raises OSError.

    If a step has several lines, the last counts: a run that resumes repeats steps.
    """
    rows: dict[float, list[float]] = {}
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            for line in file:
                fields = _parse_line(line)
                step = _number(fields.get("step"))
                if 0 < step <= _LARGEST_STEP:
                    rows[step] = [_number(fields.get(name)) for name in _NAMES]
    except FileNotFoundError:
        return StepColumns()
    ordered = sorted(rows)
    columns = {name: array("d", (rows[step][i] for step in ordered)) for i, name in enumerate(_NAMES)}
    return StepColumns(array("d", ordered), columns)


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
