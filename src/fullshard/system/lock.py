"""Locks on files, which the kernel releases when their process ends, however it ends.

The library `filelock` follows links and has no shared locks, so these are fullshard's own.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.system.files import open_regular_file
from fullshard.system.process import is_process_running

_POLL_SECONDS = 0.05
# Children of a killed process may hold its lock until they notice that their parent is gone.
_DYING_SECONDS = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def hold_exclusive_file_lock(
    path: Path,
    *,
    held_error: Callable[[str], Exception] = BlockingIOError,
    patience_seconds: float = 0.0,
    waiting: Callable[[], object] = lambda: None,
    required: bool = True,
    mode: int = 0o666,
) -> Generator[None]:
    """Context in which this process alone holds a lock on the file `path`.

    The file is created if it is missing, and contains the name of its holder.

    held_error: makes the error to raise from the name of another holder after `patience_seconds`
    patience_seconds: time to wait for another holder; at least ten seconds for a holder that has died
    waiting: called repeatedly while another process holds the lock
    required: True raises OSError on a file system without locks; False continues there without a lock
    mode: permissions of a new lock file
    """
    began = time.monotonic()
    while (descriptor := _open_and_lock_file(path, required=required, mode=mode)) is None:
        if holder := find_lock_holder(path):
            patience = max(patience_seconds, _DYING_SECONDS if _is_dead_process(holder) else 0.0)
            if time.monotonic() - began >= patience:
                raise held_error(holder)
            waiting()
            time.sleep(_POLL_SECONDS)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        # Closing is not enough: a forked child may still have the descriptor, and with it the lock.
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def find_lock_holder(path: Path) -> str | None:
    """Returns the name of the holder of the lock file `path`; None if no process holds it. Raises OSError."""
    try:
        descriptor = open_regular_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if try_lock(descriptor, fcntl.LOCK_SH):
            return None
        return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "a lock that is held"
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file without waiting. Returns False if another process holds the lock. Raises OSError."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_and_lock_file(path: Path, *, required: bool, mode: int) -> int | None:
    """Opens and locks `path`. Returns None if another process holds its lock or has removed the file."""
    descriptor = open_regular_file(path, os.O_RDWR | os.O_CREAT, mode=mode)
    try:
        if try_lock(descriptor) and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except FileNotFoundError:  # removed, with its directory, after it was opened
        pass
    except OSError as error:
        if error.errno in _NO_LOCKS and not required:
            return descriptor
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_dead_process(holder: str) -> bool:
    """Returns True if `holder` names a process of this machine that is not running; False if unknown."""
    match holder.split():
        case ["process", pid, "on", host] if pid.isdecimal() and host == socket.gethostname():
            return not is_process_running(int(pid))
        case _:
            return False
