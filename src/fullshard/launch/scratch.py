"""The private directory of a launch. If the launch is killed, a later launch removes it."""

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.errors import LaunchError
from fullshard.system.files import open_regular_file
from fullshard.system.lock import try_lock
from fullshard.system.process import boot_id

_PREFIX = "fullshard-"
_LOCK, _UNLOCKED = "lock", "unlocked"


@contextmanager
def temporary_private_directory() -> Generator[Path]:
    """Context that creates a temporary directory, which only this user can read, and finally removes it.

    First removes the directories that killed processes left: see `remove_abandoned_directories`.
    """
    try:
        remove_abandoned_directories(Path(tempfile.gettempdir()))
    except FileNotFoundError as error:
        raise LaunchError(
            "there is no temporary directory.",
            got=error.strerror,
            fix="TMPDIR = a directory that can be written",
        ) from error
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with (directory / _UNLOCKED).open("w") as lock:
            lock.write(_running_kernel_id())
            lock.flush()
            # The file gets its final name only once it is locked, so a free lock belongs to a dead process.
            # Without locks on this file system, `remove_abandoned_directories` skips the directory.
            with suppress(OSError):
                try_lock(lock.fileno())
                (directory / _UNLOCKED).rename(directory / _LOCK)
            yield directory


def remove_abandoned_directories(parent: Path) -> None:
    """Removes the private directories in `parent` whose process is certainly dead.

    A free lock proves this only for processes of this kernel. Directories of other machines, from before the
    last boot, of other users, or without a lock are kept.
    """
    for directory in parent.glob(f"{_PREFIX}*"):
        if _is_own_directory(directory) and _is_lock_of_dead_process(directory / _LOCK):
            shutil.rmtree(directory, ignore_errors=True)


def _is_own_directory(directory: Path) -> bool:
    with suppress(OSError):  # another launch removed it at the same time
        found = directory.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _is_lock_of_dead_process(lock: Path) -> bool:
    """Returns True if a process of this kernel held the lock file `lock`, and has ended."""
    with suppress(OSError):
        descriptor = open_regular_file(lock, os.O_RDWR)
        try:
            return os.read(descriptor, 1000) == _running_kernel_id().encode() and try_lock(descriptor)
        finally:
            os.close(descriptor)
    return False


def _running_kernel_id() -> str:
    """Returns a name that identifies the running kernel."""
    return boot_id() or socket.gethostname()
