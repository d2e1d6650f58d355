"""Durable files and directories: writes that are flushed to the disk, and errors that explain a failure."""

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.quantities import format_bytes
from fullshard.system.direct_io import DirectFileWriter
from fullshard.system.files import atomic_replace_context, fsync_path

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


@contextmanager
def open_atomic_replacement(path: Path) -> Generator[DirectFileWriter]:
    """Opens a new file that atomically replaces `path` when the block succeeds, flushed to the disk."""
    with atomic_replace_context(path) as draft, DirectFileWriter(draft) as file:
        yield file
    fsync_path(path.parent)


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
