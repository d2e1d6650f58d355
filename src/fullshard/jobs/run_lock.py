"""The lock of a run's directory.

It does not need torch, so the launcher can check it before any rank starts.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.errors import TrainError
from fullshard.system.files import open_regular

_LOCK = ".lock"
_TURN_SECONDS = 0.2


@contextmanager
def locked(root: Path, *, patience_seconds: float = 0.0) -> Generator[None]:
    """Holds `<root>/.lock`.

    The kernel releases it when the process ends, so a killed run leaves nothing to clean up.

    Raises TrainError if another process holds it for longer than `patience_seconds`; OSError.
    """
    deadline = time.monotonic() + patience_seconds
    with open(root / _LOCK, "a+", opener=open_regular) as file:
        while not _taken(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise _held(root, file.fileno())
            time.sleep(_TURN_SECONDS)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def require_unlocked(root: Path) -> None:
    """Raises TrainError if another process holds the lock now. Writes nothing."""
    with explained(root), suppress(FileNotFoundError):
        descriptor = open_regular(root / _LOCK, os.O_RDONLY)
        try:
            if not _taken(descriptor, fcntl.LOCK_SH):
                raise _held(root, descriptor)
        finally:
            os.close(descriptor)


def require_writable(root: Path) -> None:
    """Raises TrainError if `root` can be neither written nor created. Leaves no directory behind."""
    with explained(root):
        place = Path(os.path.realpath(root))
        missing = [one for one in (place, *place.parents) if not one.exists()]
        try:
            make(root)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "this user may not write there", str(place))
        finally:
            for one in missing:
                with suppress(OSError):  # it was not created, or another run uses it by now
                    one.rmdir()


def make(root: Path) -> None:
    """Creates the directory. For a link, creates its target."""
    Path(os.path.realpath(root)).mkdir(parents=True, exist_ok=True)


@contextmanager
def explained(root: Path) -> Generator[None]:
    """Converts an OSError caused by a path in `root`, or above it, into a TrainError."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename is not None else None
        place = Path(os.path.realpath(root))
        if path is None or not (path in place.parents or any(map(path.is_relative_to, (root, place)))):
            raise
        raise TrainError(
            f"the run's directory {root} cannot be written.",
            got=f"{path}: {error.strerror}",
            fix="another run.dir",
        ) from error


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(root: Path, descriptor: int) -> TrainError:
    return TrainError(
        f"another run is writing {root}.",
        got=os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "a lock that is held",
        fix="wait for it, or --set run.dir=<another directory>",
    )
