"""The calls of this process to the operating system below one directory: each in turn fails, or kills it.

Python's own functions are replaced, whoever calls them: those of `os`, and `open`, by the one that is written
in Python and calls those of `os`. Reads of a C file are not seen; the open or the advice before them is.
"""

import _pyio
import builtins
import errno
import io
import itertools
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60
READS = ("read", "pread", "preadv", "stat", "lstat", "fstat", "scandir", "listdir", "posix_fadvise")
WRITES = ("write", "pwrite", "pwritev")
CHANGES = ("open", "fsync", "fdatasync", "ftruncate", "posix_fallocate", "replace", "rename", "link")
CHANGES += ("unlink", "remove", "mkdir", "rmdir")
SHORT, NOTHING = "a short write", "a write of nothing"
ERRORS = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EROFS)
ANY_ERROR = "an error"  # each of these in turn
KILL, KILLED = "a kill", 77


@dataclass(frozen=True)
class Call:
    """A call below the directory. `make()` makes it."""

    name: str
    path: Path
    arguments: tuple[Any, ...]
    make: Callable[..., Any]


@contextmanager
def watched(directory: Path, act: Callable[[Call], Any]) -> Generator[None]:
    """Every call below `directory` returns what `act` of it returns, in all threads of this process."""
    place = os.path.realpath(directory)
    real = {name: getattr(os, name) for name in (*READS, *WRITES, *CHANGES)}
    opens = builtins.open, io.open
    readlink, inside = os.readlink, threading.local()

    def path_of(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        first = options.get("path", arguments[0] if arguments else ".")
        if isinstance(first, int):
            return readlink(f"/proc/self/fd/{first}")
        begin = options.get("dir_fd")
        begin = os.getcwd() if begin is None else readlink(f"/proc/self/fd/{begin}")
        return os.path.join(begin, os.fsdecode(first))

    def made(name: str, *arguments: Any, **options: Any) -> Any:
        make = partial(real[name], *arguments, **options)
        if getattr(inside, "yes", False):
            return make()
        inside.yes = True
        try:
            path = path_of(name, arguments, options)
            below = f"{path}/".startswith(f"{place}/")
            return act(Call(name, Path(path), arguments, make)) if below else make()
        finally:
            inside.yes = False

    try:
        for name in real:
            setattr(os, name, partial(made, name))
        builtins.open = io.open = _pyio.open
        yield
    finally:
        builtins.open, io.open = opens
        for name, function in real.items():
            setattr(os, name, function)


class Fault:
    """Makes every call but that of number `at`, from 1, of those that `how` can befall.

    how: an errno; SHORT, or NOTHING from then on, of which writes alone can be; or KILL, in the middle of a
        write or before another change
    """

    def __init__(self, at: int, how: int | str) -> None:
        self.at, self.how = at, how
        self.hit = ""
        self._count = itertools.count(1)

    def __call__(self, call: Call) -> Any:
        is_write = call.name in WRITES
        others = (self.how in (SHORT, NOTHING) and not is_write) or (self.how == KILL and call.name in READS)
        number = 0 if others else next(self._count)
        if number != self.at and not (self.how == NOTHING and number > self.at):
            return call.make()
        self.hit = f"{call.name} {call.path}"
        if isinstance(self.how, int):
            raise OSError(self.how, os.strerror(self.how), str(call.path))
        if self.how == NOTHING:
            return 0
        if is_write:
            descriptor, data, *at = call.arguments
            begin = (data[0] if call.name == "pwritev" else memoryview(data))[:]
            begin = begin[: begin.nbytes // 2 or 1]
            given = [begin] if call.name == "pwritev" else begin
            written = call.make.func(descriptor, given, *at)  # type: ignore[attr-defined]
            if self.how == SHORT:
                return written
        os._exit(KILLED)


def faults(how: int | str, stride: int) -> Generator[Fault]:
    """A fault at the first call, at that `stride` later, and so on, until one had no call to befall."""
    for at in itertools.count(1, stride):
        fault = Fault(at, ERRORS[at % len(ERRORS)] if how == ANY_ERROR else how)
        yield fault
        if not fault.hit:
            return


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what `function` returns in a forked process, or KILLED. Raises AssertionError for other ends.

    For a process of one thread. `faults` cannot see what its copy of a Fault was hit by there.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_SECONDS)
        try:
            answer = pickle.dumps(function(*arguments))
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"the process ended with {code}"
    return KILLED if code else pickle.loads(answer)
