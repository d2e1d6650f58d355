"""The events that rank 0 records while it trains: see `fullshard.spec.records.event`."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fullshard.errors import SpecError
from fullshard.parallel.mesh import RankInfo
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.run_files import EVENTS
from fullshard.spec.run import Run


class EventLog:
    """Appends events of one attempt to `<directory>/events.jsonl`.

    attempt: number of the attempt, from 1

    A failed write is reported to `say`, not raised: the run does not depend on its events.
    """

    def __init__(self, directory: str | Path, *, say: Callable[[str], object]) -> None:
        self._path, self._say = Path(directory, EVENTS), say
        self.attempt = count_attempts(self._path) or 1

    def record(
        self, event: str, *, step: int | None = None, details: Mapping[str, object] | None = None
    ) -> None:
        """Appends an event of this moment. See `RunEvent` for the kinds of events and their details."""
        try:
            RunEvent.now(event, attempt=self.attempt, step=step, details=details).append_to(self._path)
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error.strerror}; this event is lost: {event}")


def record_start(directory: Path, run: Run, *, ranks: RankInfo) -> None:
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
    try:
        RunEvent.now("start", attempt=count_attempts(path) + 1, details=details).append_to(path)
    except OSError as error:
        fix = "run.dir = another directory"
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix=fix) from error


def count_attempts(path: Path) -> int:
    """Returns the number of attempts that the file `path` has the start of; 0 if it cannot be read."""
    try:
        return sum(event.event == "start" for event in read_events(path))
    except OSError:
        return 0
