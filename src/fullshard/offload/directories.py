"""The directory of a rank's files on a drive: its lock, small files, and directories that earlier runs left.

<offload.path>/<run id>/rank-00003/    lock, identity.json, and the files of `generations`
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.errors import OffloadError
from fullshard.offload.drive import SYSTEM, System, os_error
from fullshard.quantities import format_bytes
from fullshard.system.files import open_regular

IDENTITY = "identity.json"
LOCK = "lock"
RANKS, FIRST_RANK = "rank-*", "rank-00000"
_PATIENCE_SECONDS, _TURN_SECONDS = 1.0, 0.05
# Children of a killed rank may hold its lock until they notice that their parent is gone.
_DYING_SECONDS = 10.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def rank_directory(path: Path, *, run_id: str, rank: int) -> Path:
    """Returns the directory of a rank's files, below `offload.path`."""
    return path / run_id / f"rank-{rank:05d}"


def leftovers(
    path: Path, *, alive_run_id: str | None = None, alive_ranks: int | None = None
) -> list[tuple[Path, int]]:
    """Returns directories of finished runs in `offload.path` and their bytes on the drive, largest first.

    Of the run `alive_run_id`, only ranks from `alive_ranks` on are included, which it had earlier.
    """
    found: list[tuple[Path, int]] = []
    with suppress(OSError):
        for run in sorted(path.iterdir()):
            ranks = sorted(identity.parent for identity in run.glob(f"{RANKS}/{IDENTITY}"))
            if run.name == alive_run_id:
                past = [] if alive_ranks is None else [one for one in ranks if _number(one) >= alive_ranks]
                found += [(one, disk_usage(one)) for one in past if not _is_held(one / LOCK)]
            elif ranks and not any(_is_held(one / LOCK) for one in ranks):
                found.append((run, sum(disk_usage(one) for one in ranks)))
    return sorted(found, key=lambda one: -one[1])


def no_space_error(directory: Path, *, needed_bytes: int, free_bytes: int) -> OffloadError:
    """Returns the error for a rank's `directory` whose files do not fit. It names what could be removed."""
    path, run_id = directory.parent.parent, directory.parent.name
    left = leftovers(path, alive_run_id=run_id)
    names = ", ".join(f"{one} ({format_bytes(size)})" for one, size in left)
    remove = f"remove what earlier runs have left: {names}; or " if left else ""
    return OffloadError(
        f"not enough space for optimizer state in {directory}.",
        got=f"{format_bytes(free_bytes)} free, {format_bytes(needed_bytes)} needed by this rank",
        why="it is allocated before the first step: two generations, one of which is whole at any moment",
        fix=f"{remove}offload.path = a directory on a drive with more room",
    )


@contextmanager
def exclusive(directory: Path) -> Generator[None]:
    """Makes `directory` and locks it for this process. Raises OffloadError if another process holds it."""
    try:
        make_directory(directory)
        descriptor = _lock(directory)
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        # Closing is not enough: a forked child may still have the descriptor, and with it the lock.
        with suppress(OSError):  # file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Makes `directory` and its missing parents, and flushes them to the drive."""
    missing = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for one in missing:
        flush_directory(one.parent)


def remove_empty(rank_directory: Path, *, up_to: Path) -> None:
    """Removes the directories above a rank's, below `up_to`, once the last rank has left them empty."""
    with suppress(OSError):
        for one in rank_directory.parents:
            if one == up_to or up_to not in one.parents:
                break
            one.rmdir()


def flush_directory(directory: Path, *, system: System = SYSTEM) -> None:
    """Makes files created, renamed or removed in the directory survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        system.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path, *, system: System = SYSTEM) -> None:
    """Removes a file, if it exists, and flushes the removal to the drive."""
    path.unlink(missing_ok=True)
    # Flushed even if the file does not exist: an earlier removal may have failed before its flush.
    flush_directory(path.parent, system=system)


def replace(path: Path, data: bytes, *, system: System) -> None:
    """Replaces `path` atomically: whatever happens, it is as it was or holds all of `data`."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.unlink(missing_ok=True)
    overwrite(draft, data, system=system)
    draft.replace(path)
    flush_directory(path.parent, system=system)


def overwrite(path: Path, data: bytes, *, system: System) -> None:
    """Overwrites the first bytes of a file in place, and flushes them. Bytes behind them stay."""
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


def _unusable(directory: Path, error: OSError) -> OffloadError:
    """Returns the error for a directory that cannot be made, naming `offload.path` if that is the cause."""
    path = directory.parent.parent
    if os.path.isdir(path):  # `Path.is_dir` raises if a parent cannot be read
        return os_error(f"{directory} cannot be used.", error)
    return os_error(f"offload.path = {path} is no directory, and cannot be made one.", error, where=str(path))


def _lock(directory: Path) -> int:
    began = time.monotonic()
    while True:
        descriptor = open_regular(directory / LOCK, os.O_RDWR | os.O_CREAT, mode=0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            waited = time.monotonic() - began
            if waited > (_DYING_SECONDS if _is_dead(holder) else _PATIENCE_SECONDS):
                raise _held(directory, holder) from None
            time.sleep(_TURN_SECONDS)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        else:
            if _is_the_one(descriptor, directory / LOCK):
                return descriptor
            os.close(descriptor)  # it was removed with its directory after it was opened


def _held(directory: Path, holder: str) -> OffloadError:
    return OffloadError(
        f"another process keeps its state in {directory}.",
        got=holder or "a lock that is held",
        why="two would write over each other's",
        fix="wait for it or end it, or another run.dir or offload.path",
    )


def _is_dead(holder: str) -> bool:
    """Returns whether the holder was a process on this machine that has ended, as far as can be seen."""
    words = holder.split()
    if len(words) != 4 or not words[1].isdecimal() or words[3] != socket.gethostname():
        return False
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _is_the_one(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_held(lock: Path) -> bool:
    try:
        descriptor = open_regular(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not a lock file of fullshard: left alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno in _NO_LOCKS  # unknown without locks: left alone
    finally:
        os.close(descriptor)
    return False


def _number(rank: Path) -> int:
    """Returns a rank's number: `rank-00003` -> 3; -1 for any other name."""
    digits = rank.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def disk_usage(directory: Path) -> int:
    """Returns the bytes that a rank's files take on the drive. Raises OSError."""
    return sum(one.lstat().st_blocks * 512 for one in directory.iterdir())
