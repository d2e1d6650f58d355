"""The directory of a rank's files on a drive: its lock, small files, and leftovers of earlier runs.

<offload.path>/<run id>/rank-00003/    lock, identity.json, and the files of `generations`
"""

import errno
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from fullshard.errors import OffloadError
from fullshard.offload.drive import SYSTEM, DriveSystemCalls, offload_error_from_os_error
from fullshard.quantities import format_bytes
from fullshard.system.files import atomic_replace_context, fsync_path, make_durable_directory
from fullshard.system.lock import find_lock_holder, hold_exclusive_file_lock

IDENTITY = "identity.json"
LOCK = "lock"
RANKS, FIRST_RANK = "rank-*", "rank-00000"
_PATIENCE_SECONDS = 1.0


def rank_directory(path: Path, *, run_id: str, rank: int) -> Path:
    """Returns the directory of a rank's files, below the directory `path` (`offload.path`)."""
    return path / run_id / f"rank-{rank:05d}"


def list_leftover_directories(path: Path, *, alive_run_id: str) -> list[tuple[Path, int]]:
    """Returns unlocked directories of other runs in `offload.path`, and their bytes, the largest first."""
    found: list[tuple[Path, int]] = []
    with suppress(OSError):
        for run in sorted(path.iterdir()):
            ranks = sorted(identity.parent for identity in run.glob(f"{RANKS}/{IDENTITY}"))
            if run.name != alive_run_id and ranks and not any(_is_locked(one) for one in ranks):
                found.append((run, sum(directory_disk_bytes(one) for one in ranks)))
    return sorted(found, key=lambda one: -one[1])


def no_space_error(directory: Path, *, needed_bytes: int, free_bytes: int) -> OffloadError:
    """Returns the error for a rank's `directory` whose files do not fit. It names the removable leftovers."""
    path, run_id = directory.parent.parent, directory.parent.name
    left = list_leftover_directories(path, alive_run_id=run_id)
    names = ", ".join(f"{one} ({format_bytes(size)})" for one, size in left)
    remove = f"remove what earlier runs have left: {names}; or " if left else ""
    return OffloadError(
        f"not enough space for optimizer state in {directory}.",
        got=f"{format_bytes(free_bytes)} free, {format_bytes(needed_bytes)} needed by this rank",
        why="it is allocated before the first step: two generations, one of which is whole at any moment",
        fix=f"{remove}offload.path = a directory on a drive with more room",
    )


@contextmanager
def lock_directory(directory: Path) -> Generator[None]:
    """Makes `directory`, and locks it until the context ends. Raises OffloadError if it is locked."""
    with ExitStack() as stack:
        try:
            make_durable_directory(directory)
            lock = hold_exclusive_file_lock(
                directory / LOCK,
                held_error=partial(_directory_locked_error, directory),
                patience_seconds=_PATIENCE_SECONDS,
                required=False,
                mode=0o600,
            )
            stack.enter_context(lock)
        except OSError as error:
            path, what, where = directory.parent.parent, f"{directory} cannot be used.", ""
            if not os.path.isdir(path):  # `Path.is_dir` raises if a parent cannot be read
                what, where = f"offload.path = {path} is not a directory, and cannot be made one.", str(path)
            raise offload_error_from_os_error(what, error, where=where) from error
        yield


def _directory_locked_error(directory: Path, holder: str) -> OffloadError:
    return OffloadError(
        f"another process keeps its state in {directory}.",
        got=holder,
        why="two would write over each other's",
        fix="wait for it or end it, or another run.dir or offload.path",
    )


def remove_empty_parents(rank_directory: Path, *, up_to: Path) -> None:
    """Removes the directories above a rank's directory and below `up_to` if they are empty."""
    with suppress(OSError):
        for one in rank_directory.parents:
            if one == up_to or up_to not in one.parents:
                break
            one.rmdir()


def remove_file_and_flush(path: Path, *, system: DriveSystemCalls = SYSTEM) -> None:
    """Removes a file, if it exists, and flushes the removal to the drive."""
    path.unlink(missing_ok=True)
    # Flushed even if the file does not exist: an earlier removal may have failed before its flush.
    fsync_path(path.parent, fsync=system.fsync)


def replace_file_atomically(path: Path, data: bytes, *, system: DriveSystemCalls) -> None:
    """Replaces a file atomically: after a crash it has its old content, or all of `data`."""
    with atomic_replace_context(path, draft=path.with_name(f".{path.name}.tmp")) as draft:
        write_file_start_and_flush(draft, data, system=system)
    fsync_path(path.parent, fsync=system.fsync)


def write_file_start_and_flush(path: Path, data: bytes, *, system: DriveSystemCalls) -> None:
    """Writes `data` over the beginning of a file, or a new file, and flushes it. Later bytes stay."""
    descriptor = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        left, offset = memoryview(data), 0
        while left.nbytes:
            try:
                count = system.pwritev(descriptor, [left], offset)
            except InterruptedError:
                continue
            if not count:
                raise OSError(errno.EIO, "the drive took nothing")
            left, offset = left[count:], offset + count
        system.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _is_locked(directory: Path) -> bool:
    try:
        return find_lock_holder(directory / LOCK) is not None
    except OSError:  # not a lock file of fullshard, or a file system without locks: counts as held
        return True


def directory_disk_bytes(directory: Path) -> int:
    """Returns the bytes that the files in a directory take on the drive. Raises OSError."""
    return sum(one.lstat().st_blocks * 512 for one in directory.iterdir())
