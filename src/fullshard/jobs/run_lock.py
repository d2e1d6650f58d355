"""The lock of a run's directory, without torch, so that the launcher can check it before any rank starts."""

import errno
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from fullshard.errors import TrainError
from fullshard.system.lock import find_lock_holder, hold_exclusive_file_lock

_LOCK = ".lock"


def hold_run_lock(root: Path, *, patience_seconds: float = 0.0) -> AbstractContextManager[None]:
    """Context in which this process holds the lock of the run's directory `root`.

    The kernel releases the lock when the process ends, so a killed run leaves nothing to clean up.

    Raises TrainError if another process holds the lock for longer than `patience_seconds`, or OSError.
    """
    held_error = partial(_lock_held_error, root)
    return hold_exclusive_file_lock(root / _LOCK, held_error=held_error, patience_seconds=patience_seconds)


def check_unlocked(root: Path) -> None:
    """Raises TrainError if another process holds the lock of the directory `root`. Writes nothing."""
    with convert_os_errors(root):
        if holder := find_run_lock_holder(root):
            raise _lock_held_error(root, holder)


def find_run_lock_holder(root: Path) -> str | None:
    """Returns the process that trains in the directory `root`, or None. Writes nothing. Raises OSError."""
    return find_lock_holder(root / _LOCK)


def check_writable(root: Path) -> None:
    """Raises TrainError if `root` can be neither written nor created. Creates nothing that remains."""
    with convert_os_errors(root):
        place = Path(os.path.realpath(root))
        missing = [one for one in (place, *place.parents) if not one.exists()]
        try:
            make_run_directory(root)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "this user may not write there", str(place))
        finally:
            for one in missing:
                with suppress(OSError):  # it was not created, or another run uses it by now
                    one.rmdir()


def make_run_directory(root: Path) -> None:
    """Creates the directory `root`, or its target if `root` is a symbolic link, unless it exists."""
    Path(os.path.realpath(root)).mkdir(parents=True, exist_ok=True)


@contextmanager
def convert_os_errors(root: Path) -> Generator[None]:
    """Context that converts an OSError about a path in `root`, or above `root`, into a TrainError."""
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


def _lock_held_error(root: Path, holder: str) -> TrainError:
    return TrainError(
        f"another run is writing {root}.", got=holder, fix="wait for it, or --set run.dir=<another directory>"
    )
