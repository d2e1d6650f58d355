"""Calls functions that read untrusted data in worker processes, which end if they go beyond limits.

A worker reads pickled functions from stdin and writes pickled answers to stdout. It is started as a command
because multiprocessing would import the user's script again.
"""

import atexit
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, BinaryIO, cast

from fullshard.errors import DataError, FullshardError
from fullshard.quantities import format_bytes
from fullshard.system.small_files import ForeignErrorTranslator

_IDLE_SECONDS, _NO_MEMORY_CODE = 10, 77
# Threads would compete with other workers, and their stacks and Arrow's pools reserve memory.
_SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}


@dataclass(frozen=True)
class Limits:
    """Limits of the memory that a call allocates, and of its processor time; it may restart that clock."""

    memory_bytes: int = 896 << 20
    seconds: float = 20.0


LIMITS, NO_LIMITS = Limits(), Limits(memory_bytes=1 << 62, seconds=0)


class Worker:
    """A process that runs one function after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve_calls; serve_calls()"]
        self.process = Popen(command, env=os.environ | _SETTINGS, stdin=PIPE, stdout=PIPE)
        self.idle_since: float | None = time.monotonic()  # None in a call, and if the process died in it
        atexit.register(self.close)

    def call(self, function: Callable[[], object], *, what: str, limits: Limits, fix: str = "") -> list[Any]:
        """Returns a list of the members of what `function()` returns in the process, if these are iterable.

        Raises the FullshardError of the function, and DataError with `what` for other errors and, with `fix`,
        if the process dies.
        """
        self.idle_since, answers = None, list[Any]()
        stdin, stdout = cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stdout)
        try:
            pickle.dump((function, what, limits), stdin)
            stdin.flush()
            while not isinstance(answer := pickle.load(stdout), FullshardError | None):
                answers.append(answer)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.process.kill()  # if it has not died, but written what is not an answer
            code = self.process.wait()
            ended = {-signal.SIGPROF: "too much time", _NO_MEMORY_CODE: "too much memory"}
            ended[-signal.SIGABRT] = "an abort, as where a library gets no memory"
            most = f"{format_bytes(limits.memory_bytes)} of memory and {limits.seconds:g} s of processor time"
            got = f"{ended.get(code, f'exit code {code}')}; it may use {most}"
            raise DataError(what, got=got, fix=fix) from error
        self.idle_since = time.monotonic()
        if answer is not None:
            raise answer
        return answers

    def close(self) -> None:
        """Ends the process, and closes its files; an unread answer is dropped."""
        self.process.kill()
        with suppress(OSError), self.process:
            pass


_IDLE: dict[int, Worker] = {}  # by the process that started it, which may be forked


@contextmanager
def borrow_worker() -> Generator[Worker]:
    """Context with a worker: one whose last call was a few seconds ago, or a new one."""
    worker = _IDLE.pop(os.getpid(), None) or Worker()
    if time.monotonic() - (worker.idle_since or 0) > _IDLE_SECONDS / 2:  # it ends soon
        worker.close()
        worker = Worker()
    try:
        yield worker
    finally:
        if worker.idle_since is None or _IDLE.setdefault(os.getpid(), worker) is not worker:
            worker.close()


def call_in_worker(function: Callable[[], object], *, what: str) -> list[Any]:
    """Calls `function` in a borrowed worker, see `Worker.call`."""
    with borrow_worker() as worker:
        return worker.call(function, what=what, limits=LIMITS)


def serve_calls() -> None:
    """Runs a worker, until stdin ends or no call comes for some seconds."""
    stdin, stream = cast(Any, sys.stdin.buffer), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the caller must not unpickle what a library prints
    while stdin.peek():  # nothing if the caller has ended
        function, what, limits = pickle.load(stdin)
        signal.alarm(0)
        last = None
        try:
            with suppress(OSError, ValueError):  # no /proc, as on macOS; or a lower limit from outside
                pages = int(Path("/proc/self/statm").read_text().split()[5])
                most = pages * resource.getpagesize() + limits.memory_bytes
                resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            with ForeignErrorTranslator(lambda got, what=what: DataError(what, got=got)):
                _call_and_dump(function, stream)
        except FullshardError as error:
            last = error
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(_IDLE_SECONDS)  # ends the process
        pickle.dump(last, stream)
        stream.flush()


def _call_and_dump(function: Callable[[], object], stream: BinaryIO) -> None:
    try:
        answers = function()
        for answer in answers if isinstance(answers, Iterable) else ():
            pickle.dump(answer, stream)
    except MemoryError:
        os._exit(_NO_MEMORY_CODE)
