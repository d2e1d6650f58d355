"""The outcome of a process, the report of its failure, and the events that a launcher records about ranks."""

import faulthandler
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fullshard.errors import FullshardError, user_code_location_text
from fullshard.launch.environment import is_started_by_srun
from fullshard.spec.records.event import RunEvent, read_events
from fullshard.spec.records.run_files import EVENTS, METRICS
from fullshard.system.files import hold_exclusive_file_lock, open_new_file, write_file_atomically
from fullshard.system.process import call_on_watchdog_exit
from fullshard.system.small_files import (
    VALUE_BYTES,
    parse_json,
    parse_json_line,
    read_last_lines,
    read_text,
)
from fullshard.system.terminal import print_to_stderr

TRACEBACK_VARIABLE = "FULLSHARD_TRACEBACK"
CTRL_C_EXIT_CODE = 130
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # ATTEMPT_OF_NODE/LOCAL_RANK/error.json

# Phrases in errors of gloo, NCCL and the store when another rank has gone.
_PEER_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
    "connection refused",
    "connectfullmesh failed",
    "remote process exited",
    "ncclremoteerror",
    "nccl communicator was aborted",
)
_TAIL_BYTES = 4096  # more than two lines of metrics.jsonl


@dataclass(frozen=True)
class FailureReport:
    """A report of an exception, which one process writes to a file and another shows.

    name: name of the exception's class
    at: time of the exception, in seconds since the epoch
    peer_lost: True if the error only reports that another rank has gone
    """

    name: str
    message: str
    exit_code: int
    at: float
    peer_lost: bool
    traceback: str

    @classmethod
    def from_exception(cls, error: BaseException) -> Self:
        foreseen = isinstance(error, FullshardError)
        texts = [str(one).lower() for one in _iterate_exception_chain(error)]
        return cls(
            name=type(error).__name__,
            message=str(error) if foreseen else _unexpected_error_message(error),
            exit_code=error.exit_code if foreseen else 1,
            at=time.time(),
            peer_lost=any(sign in text for text in texts for sign in _PEER_LOST),
            traceback="".join(traceback.format_exception(error)),
        )

    def user_message(self, rank: int | None = None) -> str:
        """Returns the message for the user; names `rank`, and has the traceback if FULLSHARD_TRACEBACK=1."""
        shown = os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
        is_named = self.message.startswith(f"rank {rank} ")
        who = "error: " if rank is None else "" if is_named else f"rank {rank}: "
        return f"{self.traceback if shown else ''}{who}{self.message}"

    def write_torchrun_error_file(self) -> None:
        """Writes the report for torchrun, with a traceback if it is unexpected. An earlier report stays."""
        shown = self.message if self.peer_lost or self.exit_code != 1 else self.traceback
        details = {"py_callstack": shown, "timestamp": str(int(self.at))}
        text = json.dumps({"message": {"message": self.message, "extraInfo": details}})
        with suppress(KeyError, OSError), open_new_file(Path(os.environ[_ERROR_FILE])) as file:
            file.write(text.encode())

    def report_once_per_node(self, text: str) -> None:
        """Prints `text`, and writes torchrun's error file, unless a rank of this node did for an equal one.

        Torchrun ends all ranks once one has ended: the lock holds the others until the text is printed.
        """
        with suppress(KeyError, OSError):
            of_node, own = _find_directory_of_node()
            with hold_exclusive_file_lock(of_node / "printing", patience_seconds=10.0):
                message = self.message.encode(errors="surrogatepass")
                path = of_node / f"printed-{hashlib.blake2b(message, digest_size=8).hexdigest()}"
                ranks = path.read_text().split() if path.exists() else []
                if not ranks or own in ranks:  # it has failed before, in an earlier command of a step
                    self.write_torchrun_error_file()
                    print_to_stderr(text)
                    ranks = []
                with suppress(OSError):
                    write_file_atomically(path, " ".join([*ranks, own]))
            return
        self.write_torchrun_error_file()
        print_to_stderr(text)


def _find_directory_of_node() -> tuple[Path, str]:
    """Returns (directory that the ranks of a launch on this node share, name of this rank in it).

    Under srun, makes the directory in the temporary directory, and leaves it there. Raises KeyError if
    neither torchrun nor srun started this process, and OSError if the directory is another user's.
    """
    if _ERROR_FILE in os.environ or not is_started_by_srun():
        of_rank = Path(os.environ[_ERROR_FILE]).parent
        return of_rank.parent, of_rank.name
    step = "-".join(os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
    path = Path(tempfile.gettempdir(), f"fullshard-srun-{step}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path} is another user's")
    return path, os.environ["SLURM_LOCALID"]


class ProcessOutcome(AbstractContextManager["ProcessOutcome"]):
    """Context that catches every exception, and sets the `exit_code` and `failure` of the process.

    The exit code is that of a SystemExit or a FullshardError, 130 for Ctrl-C, and 1 for other exceptions.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self.failure: FailureReport | None = None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, SystemExit):
            code = error.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
            self.exit_code = code or 0
        elif isinstance(error, KeyboardInterrupt):
            self.exit_code = CTRL_C_EXIT_CODE
        elif error is not None:
            self.failure = FailureReport.from_exception(error)
            self.exit_code = self.failure.exit_code
        return True

    def save(self, path: Path) -> None:
        """Writes the outcome atomically: another process may read it while this one is killed."""
        failure = asdict(self.failure) if self.failure else None
        write_file_atomically(path, json.dumps({"exit_code": self.exit_code, "failure": failure}))

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Reads an outcome that `save` wrote, or returns None if the file does not exist."""
        if not path.exists():
            return None
        data = parse_json(read_text(path, most_bytes=VALUE_BYTES))
        ending = cls()
        ending.exit_code = data["exit_code"]
        ending.failure = FailureReport(**data["failure"]) if data["failure"] else None
        return ending


def _iterate_exception_chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _unexpected_error_message(error: BaseException) -> str:
    name, text = type(error).__name__, str(error).strip() or "(it says nothing)"
    notes = [f"  {str(note).splitlines()[0]}" for note in getattr(error, "__notes__", ()) if note]
    lines = [f"{name}: {text}", *notes, f"  where: {user_code_location_text(error)}"]
    if name == "OutOfMemoryError":
        lines.append('  try: a smaller train.microbatch, recompute.mode = "full", or more ranks')
    lines.append(f"  the whole traceback: {TRACEBACK_VARIABLE}=1")
    return "\n".join(lines)


class LaunchEventLog:
    """Appends events to `<directory>/events.jsonl`, if the newest attempt there belongs to this launch.

    Otherwise the ranks have failed before they opened the directory, which may belong to another run.

    own: details of the `start` events of this launch
    """

    def __init__(self, directory: str | Path, *, own: Mapping[str, str]) -> None:
        self._directory, self._own = Path(directory), own

    def record(self, event: str, details: Mapping[str, object]) -> None:
        """Appends an event of this moment, or nothing if the newest attempt is not this launch's."""
        path = self._directory / EVENTS
        with suppress(OSError):  # the ranks report a disk that is full
            starts = read_events(path, kind="start")
            if starts and all(starts[-1].details.get(key) == value for key, value in self._own.items()):
                step = self.read_last_step()
                made = RunEvent.now(event, attempt=starts[-1].attempt, step=step, details=details)
                made.append_to(path)

    def read_last_step(self) -> int | None:
        """Returns the step of the last whole line of metrics.jsonl; None if there is no such line."""
        step, path = None, self._directory / METRICS
        with suppress(OSError):
            for line in read_last_lines(path, most_bytes=_TAIL_BYTES, longest=_TAIL_BYTES):
                step = parse_json_line(line).get("step", step)
        return step if isinstance(step, int) else None

    def record_fault(self, failure: FailureReport, *, rank: int) -> None:
        details = {"rank": rank, "error": failure.name, "message": failure.message}
        self.record("fault", details | {"exit_code": failure.exit_code})


class OwnFaultRecorder(AbstractContextManager["OwnFaultRecorder"]):
    """Context that records the exception with which this process, a rank of torchrun or srun, ends its run.

    Each rank records for torchrun, and in the run's events only rank 0, which recorded the attempt's start.

    process: host and process id, as in the `start` event of a run that this process trains
    """

    def __init__(self, directory: str | Path) -> None:
        self.process = f"{socket.gethostname()}:{os.getpid()}"
        self._log = LaunchEventLog(directory, own={"process": self.process})
        self._watchdog = call_on_watchdog_exit(self._record, shows_error=False)

    def __enter__(self) -> Self:
        faulthandler.enable(sys.__stderr__ or sys.stderr)
        self._watchdog.__enter__()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._watchdog.__exit__(None, None, None)
        if error is not None and not isinstance(error, SystemExit):
            self._record(error)

    def _record(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._log.record("stop", {"saved": False})
        else:
            failure = FailureReport.from_exception(error)
            failure.write_torchrun_error_file()
            self._log.record_fault(failure, rank=int(os.environ["RANK"]))
