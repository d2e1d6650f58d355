"""Files: opened safely, replaced atomically, flushed to the disk, digested; and reasons of their errors."""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from fullshard.errors import CheckpointError
from fullshard.quantities import format_bytes

_FULL = "free some space, keep fewer checkpoints, or save elsewhere"
_ROOM = "free some space there, or {directory} on a disk with room"
_WRITABLE, _OTHER = "{directory} that can be written", "{directory} elsewhere"
_CHECK_DISK = "{directory} on another disk, and a look at the system's log"
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
    errno.ESTALE: (
        "the network file system lost it",
        "the mount, then again, or {directory} on a local disk",
    ),
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


def write_file_atomically(path: Path, text: str | bytes) -> None:
    """Atomically replaces `path` by a file that contains `text`, flushed to the disk. Raises OSError."""
    with atomic_replace_context(path) as draft, draft.open("xb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: Path, *, fsync: Callable[[int], object] = os.fsync) -> None:
    """Flushes a file or directory to the disk. A rename is durable once its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable_directory(path: Path) -> None:
    """Creates `path` and its missing parents, and flushes them to the disk."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        fsync_path(one.parent)


def xxh3_digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the 128-bit XXH3 digest as 32 hexadecimal digits. It detects corruption, not tampering."""
    found = xxhash.xxh3_128()
    found.update(data)  # releases the GIL
    return found.hexdigest()


class ExplainedOSError(OSError):
    """An OSError that fullshard itself raises, with the reason and a fix for the user."""

    def __init__(
        self, number: int, what: str, *, place: str, why: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(number, what, place)
        self.why, self.fix = why, fix


def os_error_reason_and_fix(
    error: OSError, *, directory: str = "a directory"
) -> tuple[str | None, str | None]:
    """Returns the reason of an OSError and a fix, or None for each that is unknown.

    directory: how the fix names the directory to change, e.g. the setting that contains its path
    """
    if isinstance(error, ExplainedOSError):
        return error.why, error.fix
    why, fix = _REASONS.get(error.errno or 0, (None, None))
    return why, fix and fix.format(directory=directory)


def checkpoint_error_from_os_error(what: str, error: OSError) -> CheckpointError:
    """Returns a CheckpointError for `error`, with `what` (the failure) as its first line."""
    why, fix = os_error_reason_and_fix(error)
    fix = _FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else fix
    place = f" ({error.filename})" if error.filename else ""
    return CheckpointError(what, got=f"{error.strerror or error}{place}", why=why, fix=fix)


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
