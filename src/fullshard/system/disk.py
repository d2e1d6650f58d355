"""Durable files and directories: writes that are flushed to the disk, and errors that explain a failure."""

import errno
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.quantities import format_bytes
from fullshard.system.direct_io import StreamedFile

_FULL = "free some space, keep fewer checkpoints, or save elsewhere"
_REASONS: dict[int, tuple[str, str | None]] = {
    errno.ENOSPC: ("the disk is full", _FULL),
    errno.EDQUOT: ("the disk quota is used up", _FULL),
    errno.EFBIG: ("a file may not grow so large there", "ulimit -f unlimited, or another file system"),
    errno.EROFS: ("the file system is read-only", "a directory that can be written"),
    errno.EACCES: ("this user may not write there", "a directory that can be written"),
    errno.EPERM: ("this user may not write there", "a directory that can be written"),
    errno.ENOTDIR: ("a part of the path is a file, not a directory", "another directory"),
    errno.EEXIST: ("it is a file, not a directory", "another directory"),
    errno.ENOTEMPTY: (
        "another process has just saved it, and a checkpoint is never overwritten",
        "a directory a run",
    ),
    errno.ENAMETOOLONG: ("the path is too long", "a shorter one"),
    errno.EIO: ("the disk reports an error", "another disk, and a look at the system's log"),
    errno.ESTALE: ("the network file system lost it", "the mount, then again"),
}


class ExplainedError(OSError):
    """An OSError raised by fullshard itself, which carries its reason and its fix."""

    def __init__(
        self, number: int, what: str, *, place: str, why: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(number, what, place)
        self.why, self.fix = why, fix


def reason(error: OSError) -> tuple[str | None, str | None]:
    """Returns (why, fix) for an error of the operating system."""
    if isinstance(error, ExplainedError):
        return error.why, error.fix
    return _REASONS.get(error.errno or 0, (None, None))


def os_error(what: str, error: OSError) -> CheckpointError:
    """Returns the CheckpointError for an OSError."""
    why, fix = reason(error)
    place = f" ({error.filename})" if error.filename else ""
    return CheckpointError(what, got=f"{error.strerror or error}{place}", why=why, fix=fix)


def flush(path: Path) -> None:
    """Calls fsync on a file or a directory. A rename is durable once its directory is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(path: Path) -> None:
    """Asks the system to drop a flushed file from its page cache, so that the disk is read next."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def create_durable(path: Path) -> Generator[StreamedFile]:
    """Opens a new file, which must not exist yet, and flushes it to the disk if the block succeeds."""
    with StreamedFile(path) as file:
        yield file
        file.finish()


@contextmanager
def replace_atomically(path: Path) -> Generator[StreamedFile]:
    """Opens a file that replaces `path` if the block succeeds. Until then, and after a failure, `path` is
    unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with create_durable(temporary) as file:
            yield file
        temporary.replace(path)
        flush(path.parent)
    finally:
        with suppress(OSError):  # the earlier error is the one to show
            temporary.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Creates `path` and its missing parents, and flushes them to the disk."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in missing:
        flush(one.parent)


def free_bytes(path: Path) -> int:
    """Returns the number of bytes that this user may still write where `path` is or will be."""
    existing = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    return shutil.disk_usage(existing).free


def require_space(path: Path, *, needed_bytes: int, available_bytes: int) -> None:
    """Raises CheckpointError if fewer than `needed_bytes` are free."""
    if needed_bytes > available_bytes:
        raise CheckpointError(
            f"not enough space for {path}.",
            got=f"{format_bytes(available_bytes)} free, {format_bytes(needed_bytes)} needed",
            why="nothing was written",
            fix=_FULL,
        )
