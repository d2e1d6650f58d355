"""The events that a launcher records about its ranks: see `fullshard.spec.records.event`."""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fullshard.launch.outcome import FailureReport
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.run_files import EVENTS, METRICS
from fullshard.system.files import open_regular_file
from fullshard.system.process import call_on_watchdog_exit

_TAIL_BYTES = 4096  # more than two lines of metrics.jsonl


class LaunchEventLog:
    """Appends events to `<directory>/events.jsonl`, if the newest attempt there belongs to this launch.

    Otherwise the ranks have failed before they opened the directory, which may belong to another run.

    own: details of the `start` events of this launch
    """

    def __init__(self, directory: str | Path, *, own: Mapping[str, str]) -> None:
        self._directory, self._own = Path(directory), own

    def record(self, event: str, details: Mapping[str, object]) -> None:
        """Appends an event of this moment. Does nothing if the file cannot be written."""
        path = self._directory / EVENTS
        with suppress(OSError):  # the ranks report a disk that is full
            starts = [one for one in read_events(path) if one.event == "start"]
            if starts and all(starts[-1].details.get(key) == value for key, value in self._own.items()):
                step = _last_recorded_step(self._directory / METRICS)
                made = RunEvent.now(event, attempt=starts[-1].attempt, step=step, details=details)
                made.append_to(path)

    def record_fault(self, failure: FailureReport, *, rank: int) -> None:
        """Appends the event of a failed rank."""
        details = {"rank": rank, "error": failure.name, "message": failure.message}
        self.record("fault", details | {"exit_code": failure.exit_code})


class OwnFaultRecorder(AbstractContextManager["OwnFaultRecorder"]):
    """Context that records the exception with which this process, a rank of torchrun or srun, ends its run.

    Only rank 0 records: it alone has recorded that the attempt started.

    process: host and process id, as in the `start` event of a run that this process trains
    """

    def __init__(self, directory: str | Path) -> None:
        self.process = f"{socket.gethostname()}:{os.getpid()}"
        self._log = LaunchEventLog(directory, own={"process": self.process})
        self._watchdog = call_on_watchdog_exit(self._record)

    def __enter__(self) -> Self:
        self._watchdog.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog.__exit__(None, None, None)
        if error is not None and not isinstance(error, SystemExit):
            self._record(error)

    def _record(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._log.record("stop", {"saved": False})
        else:
            self._log.record_fault(FailureReport.from_exception(error), rank=int(os.environ["RANK"]))


def _last_recorded_step(path: Path) -> int | None:
    """Returns the step of the last whole line of metrics.jsonl; None if there is none. Raises OSError."""
    try:
        with open(path, "rb", opener=open_regular_file) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    try:
        fields: Any = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    step = fields.get("step") if isinstance(fields, dict) else None
    return step if isinstance(step, int) else None
