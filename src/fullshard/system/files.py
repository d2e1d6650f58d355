"""Files: opened safely, locked, replaced atomically, flushed, digested; and reasons of their errors.

The kernel releases a lock when its process ends, however it ends. The library `filelock` follows links and
has no shared locks, so the locks are fullshard's own.
"""

import errno
import fcntl
import io
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import xxhash

from fullshard.errors import CheckpointError
from fullshard.quantities import format_bytes
from fullshard.system.process import is_process_running

_FULL = "free some space, keep fewer checkpoints, or save elsewhere"
_ROOM = "free some space there, or {directory} on a disk with room"
_WRITABLE, _OTHER = "{directory} that can be written", "{directory} elsewhere"
_CHECK_DISK = "{directory} on another disk, and a look at the system's log"
_CHECK_MOUNT = "the mount, then again, or {directory} on a local disk"
# (why, fix) by errno; `{directory}` is a directory, or the setting that names one.
_REASONS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _ROOM),
    errno.EDQUOT: ("the disk quota is used up", _ROOM),
    errno.EFBIG: ("a file may not grow so large there", "ulimit -f unlimited, or another file system"),
    errno.EROFS: ("the file system is read-only", _WRITABLE),
    errno.EACCES: ("this user may not write there", _WRITABLE),
    errno.EPERM: ("this user may not write there", _WRITABLE),
    errno.ENOTDIR: ("a part of the path is a file, not a directory", _OTHER),
    errno.EEXIST: ("it is a file, not a directory", _OTHER),
    errno.ENOTEMPTY: (
        "another process has just saved it, and a checkpoint is never overwritten",
        "{directory} of its own for each run",
    ),
    errno.ENAMETOOLONG: ("the path is too long", "{directory} with a shorter path"),
    errno.EIO: ("the disk reports an error", _CHECK_DISK),
    errno.ENODATA: ("the disk cannot read its stored data", _CHECK_DISK),
    errno.EUCLEAN: ("the file system is damaged", "fsck, or {directory} on another disk"),
    errno.ENODEV: ("the disk is gone", _CHECK_DISK),
    errno.ESTALE: ("the network file system lost it", _CHECK_MOUNT),
    errno.ETIMEDOUT: ("the network file system does not answer", _CHECK_MOUNT),
    errno.ENOTCONN: ("the network file system is not connected", _CHECK_MOUNT),
}


def open_regular_file(path: str | Path, flags: int, *, mode: int = 0o666) -> int:
    """Opens a regular file, and returns its descriptor. Can be passed to `open` as `opener`.

    Raises OSError, with ELOOP for a symbolic link and ENXIO for anything else that is not a regular file.
    """
    not_regular = OSError(errno.ENXIO, "not a regular file", str(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "a link; links are not followed", str(path)) from error
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a fifo without a reader, a socket, a directory
            raise not_regular from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular
    return descriptor


@contextmanager
def atomic_replace_context(path: Path, *, draft: Path | None = None) -> Generator[Path]:
    """Yields a path beside `path` for the block to create. That file then atomically replaces `path`.

    If the block fails, the new file is removed. A link is replaced, not followed. Raises OSError.

    draft: the path to yield, whose file from a killed process is removed first; by default a random name
    """
    if draft is None:
        draft = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    else:
        draft.unlink(missing_ok=True)
    try:
        yield draft
        draft.replace(path)
    finally:
        with suppress(OSError):  # the earlier error is the one to show
            draft.unlink(missing_ok=True)


def open_new_file(path: Path) -> io.BufferedWriter:
    """Opens a file that does not exist yet for writing. Raises FileExistsError, also for any link."""
    return path.open("xb")


@contextmanager
def write_new_file(path: Path) -> Generator[io.BufferedWriter]:
    """Yields a file that atomically replaces `path` after the block, flushed to the disk. Raises OSError."""
    with atomic_replace_context(path) as draft, open_new_file(draft) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file_atomically(path: Path, text: str | bytes) -> None:
    """Atomically replaces `path` by a file that contains `text`, flushed to the disk. Raises OSError."""
    with write_new_file(path) as file:
        file.write(text.encode() if isinstance(text, str) else text)


def write_file_or_stream(path: Path, text: str | bytes) -> None:
    """Writes `text` into the pipe or device `path`, or else replaces the file atomically.

    Raises OSError, also for a pipe that nobody reads.
    """
    if os.path.isfile(path) or not os.path.exists(path):
        write_file_atomically(path, text)
    else:
        with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK), "wb") as stream:
            os.set_blocking(stream.fileno(), True)
            stream.write(text.encode() if isinstance(text, str) else text)


def append_to_file(path: Path, text: str) -> None:
    """Appends `text` to the regular file `path`, which must exist. Raises OSError, also for a link."""
    with open(open_regular_file(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(text.encode())


def fsync_path(path: Path, *, fsync: Callable[[int], object] | None = None) -> None:
    """Flushes a file or directory to the disk. A rename is durable once its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        (fsync or os.fsync)(descriptor)
    finally:
        os.close(descriptor)


def make_durable_directory(path: Path) -> None:
    """Creates `path` and its missing parents, and flushes each to the disk before the next.

    Also flushes one that exists, as far as possible: a process may have been killed before it flushed it.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    with suppress(OSError):
        fsync_path((missing[-1].parent if missing else path).parent)
    for one in reversed(missing):
        one.mkdir(exist_ok=True)
        fsync_path(one.parent)
    path.mkdir(exist_ok=True)  # raises FileExistsError for a file


def xxh3_digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the 128-bit XXH3 digest as 32 hexadecimal digits. It detects corruption, not tampering."""
    found = xxhash.xxh3_128()
    found.update(data)  # releases the GIL
    return found.hexdigest()


def xxh3_digest_of_file(path: Path) -> str:
    """Returns the `xxh3_digest` of the content of a file. Raises OSError."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


class ExplainedOSError(OSError):
    """An OSError that fullshard itself raises, with the reason and a fix for the user."""

    def __init__(
        self, number: int, what: str, *, place: str, why: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(number, what, place)
        self.why, self.fix = why, fix


def os_error_why_and_fix(error: OSError, *, directory: str = "a directory") -> tuple[str | None, str | None]:
    """Returns the reason of an OSError and a fix, or None for each that is unknown.

    directory: how the fix names the directory to change, e.g. the setting that contains its path
    """
    if isinstance(error, ExplainedOSError):
        return error.why, error.fix
    why, fix = _REASONS.get(error.errno or 0, (None, None))
    return why, fix and fix.format(directory=directory)


def checkpoint_error_from_os_error(what: str, error: OSError) -> CheckpointError:
    """Returns a CheckpointError for `error`, with `what` (the failure) as its first line."""
    why, fix = os_error_why_and_fix(error)
    fix = _FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else fix
    place = f" ({error.filename})" if error.filename else ""
    return CheckpointError(what, got=f"{error.strerror or error}{place}", why=why, fix=fix)


@contextmanager
def os_errors_as_checkpoint_errors(what: str) -> Generator[None]:
    """Context that raises `checkpoint_error_from_os_error(what, …)` for an OSError."""
    try:
        yield
    except OSError as error:
        raise checkpoint_error_from_os_error(what, error) from error


def free_disk_bytes(path: Path) -> int:
    """Returns the free bytes for this user on the disk of `path`, which need not exist yet."""
    existing = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return shutil.disk_usage(existing).free


def check_disk_space(path: Path, *, needed_bytes: int, available_bytes: int) -> None:
    """Raises CheckpointError, with `path`, if `needed_bytes` exceeds `available_bytes`."""
    if needed_bytes > available_bytes:
        raise CheckpointError(
            f"not enough space for {path}.",
            got=f"{format_bytes(available_bytes)} free, {format_bytes(needed_bytes)} needed",
            why="nothing was written",
            fix=_FULL,
        )


# Children of a killed process may hold its lock until they notice that their parent is gone.
_DYING_SECONDS = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def lengthening_pauses() -> Iterator[float]:
    """Returns seconds to sleep between looks at what another process makes, each twice the last, up to ten.

    So thousands of waiting ranks hardly load a shared directory or store.
    """
    return (min(0.05 * 2 ** min(turn, 8), 10.0) for turn in count())


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
    began, pauses = time.monotonic(), lengthening_pauses()
    while (descriptor := _try_open_and_lock_file(path, required=required, mode=mode)) is None:
        if holder := find_lock_holder(path):
            patience = max(patience_seconds, _DYING_SECONDS if _is_dead_process(holder) else 0.0)
            left = patience - (time.monotonic() - began)
            if left <= 0:
                raise held_error(holder)
            waiting()
            time.sleep(min(next(pauses), left))
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


def _try_open_and_lock_file(path: Path, *, required: bool, mode: int) -> int | None:
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
