"""The figures of one step, and the JSON lines file that keeps them."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from fullshard.errors import SpecError, TrainError
from fullshard.system.files import open_regular, replacing

FILE_NAME = "metrics.jsonl"
PREVIOUS_FILE_NAME = "metrics.previous.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one finished step, over all ranks. None means not measured in this step.

    tokens: valid tokens in this step
    seconds: duration of the step
    data_seconds: the part of `seconds` spent waiting for data (on rank 0)
    mfu: fraction of the peak, from 0 to 1
    peak_bytes: peak memory of the fullest rank
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    data_seconds: float | None = None
    skipped: bool = False
    mfu: float | None = None
    peak_bytes: int | None = None
    validation_loss: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def values(self) -> dict[str, float]:
        """Returns the measured values by name, without the step number."""
        fields = dataclasses.asdict(self) | {"tokens_per_second": self.tokens_per_second}
        del fields["step"]
        return {name: value for name, value in fields.items() if value is not None}


class MetricsLog:
    """The file `metrics.jsonl` in the run's directory: one line of JSON per step, each written in one piece.

    A run that resumes after `after_step` keeps the lines up to that step and drops later ones, whose steps it
    repeats. Every step has one line, and the file is one curve. A line that a crash left incomplete is
    dropped too. A new run (`after_step` 0) keeps the last run's file as `metrics.previous.jsonl`.

    Only rank 0 creates one. Raises SpecError if the directory cannot be written.
    """

    def __init__(self, directory: str | Path, *, after_step: int = 0) -> None:
        self.path = Path(directory, FILE_NAME)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                _set_aside(self.path) if after_step == 0 else _keep_until(self.path, after_step)
            # Unbuffered, so that each line is one write and a crash between two steps loses nothing.
            self._file = FileIO(self.path, "ab", opener=open_regular)
        except OSError as error:
            raise SpecError(
                f"{self.path} cannot be written.", got=error.strerror, fix="run.dir = another directory"
            ) from error

    def write(self, metrics: StepMetrics) -> None:
        """Appends a line. Raises TrainError if it cannot be written."""
        line = json.dumps({"step": metrics.step} | {k: _json(v) for k, v in metrics.values().items()})
        data = f"{line}\n".encode()
        try:
            written = self._file.write(data)
        except OSError as error:
            raise _write_failed(self.path, str(error.strerror)) from error
        if written != len(data):
            raise _write_failed(self.path, f"{written} of {len(data)} bytes were written: the disk is full")

    def rewind(self, last_step: int) -> None:
        """Drops the lines of steps after `last_step`, which will be repeated. Raises TrainError."""
        self._file.close()
        try:
            _keep_until(self.path, last_step)
            self._file = FileIO(self.path, "ab", opener=open_regular)
        except OSError as error:
            raise _write_failed(self.path, str(error.strerror)) from error

    def close(self) -> None:
        self._file.close()


def _json(value: Any) -> Any:
    """Returns null for NaN and infinity, such as the loss of a skipped step, because JSON has neither."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _set_aside(path: Path) -> None:
    if path.stat().st_size:
        os.replace(path, path.with_name(PREVIOUS_FILE_NAME))


def _keep_until(path: Path, last_step: int) -> None:
    """Drops the lines of later steps and invalid lines.

    The file is replaced atomically, and only if needed.
    """

    def is_kept(line: bytes) -> bool:
        step = _step_of(line)
        return step is not None and step <= last_step

    with open(path, "rb", opener=open_regular) as old:
        if all(map(is_kept, old)):
            return
        old.seek(0)
        with replacing(path) as draft, draft.open("xb") as new:
            new.writelines(filter(is_kept, old))


def _step_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    step = fields.get("step") if isinstance(fields, dict) else None
    return step if isinstance(step, int) else None


def _write_failed(path: Path, got: str) -> TrainError:
    return TrainError(
        f"{path} cannot be written any more.",
        got=got,
        why="a run whose figures are lost would continue unseen",
        fix="free the disk, then fullshard train --resume",
    )
