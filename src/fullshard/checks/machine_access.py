"""Access of checks to this machine: environment, files of the kernel, commands, limits, system calls."""

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.system.process import count_usable_cores

_COMMAND_SECONDS = 20


def _run_command(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _torch_version_file() -> str:
    found = importlib.util.find_spec("torch")  # does not import it
    places = found.submodule_search_locations if found is not None else None
    with suppress(OSError):
        return Path(next(iter(places or ())), "version.py").read_text(encoding="utf-8")
    return ""


def _can_resolve(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _space_bytes(path: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


@dataclass(frozen=True)
class MachineAccess:
    """The parts of this machine that checks read. Tests replace them.

    environment: environment variables
    root: directory that holds proc and sys
    run_command: returns the output of a command; None if it is absent or fails
    torch_version_file: returns the text of torch's version.py
    can_resolve: returns whether a host name has an address
    space_bytes: returns the total and free bytes of the file system of a directory
    usable_cores: returns the number of cores that this process may use
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    run_command: Callable[[Sequence[str]], str | None] = _run_command
    torch_version_file: Callable[[], str] = _torch_version_file
    can_resolve: Callable[[str], bool] = _can_resolve
    space_bytes: Callable[[Path], tuple[int, int]] = _space_bytes
    usable_cores: Callable[[], int] = count_usable_cores

    def read(self, path: str) -> str | None:
        """Returns the text of a file below `root`, stripped; None if it cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / path).read_text(encoding="utf-8").strip()
        return None

    def list_names(self, path: str) -> list[str]:
        """Returns the sorted names in a directory below `root`; [] if it cannot be read."""
        with suppress(OSError):
            return sorted(one.name for one in (self.root / path).iterdir())
        return []

    def memory_bytes(self, name: str) -> int | None:
        """Returns a figure of /proc/meminfo, such as `MemAvailable`, in bytes; None if it is unknown."""
        for line in (self.read("proc/meminfo") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
        return None


def nearest_existing_directory(path: Path) -> Path:
    """Returns `path`, or its nearest ancestor that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir())
