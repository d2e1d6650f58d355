"""RunContext: the plan of a run that is about to start, and the access of checks to its machine."""

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
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


@dataclass(frozen=True)
class RunContext:
    """Parts that the checks without torch and without the model read.

    plan: the plan of the run, with its prediction if the planner made one
    machine: access to this machine
    """

    plan: Plan
    machine: MachineAccess = MachineAccess()

    @property
    def run(self) -> Run:
        return self.plan.run

    @property
    def is_on_gpus(self) -> bool:
        return self.plan.device == "cuda"

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this machine: torchrun's number if it started this process, else all."""
        given = self.machine.environment.get("LOCAL_WORLD_SIZE", "")
        return int(given) if given.isdecimal() and int(given) else self.plan.world_size

    @property
    def has_other_hosts(self) -> bool:
        return self.ranks_on_host < self.plan.world_size

    @property
    def checkpoint_directory(self) -> Path | None:
        """The directory of the checkpoints; None on an object store."""
        own = self.run.checkpoint.dir
        if own is not None and "://" in own:
            return None
        return Path(own) if own is not None else Path(self.run.run.dir, "checkpoints")

    @property
    def checkpoint_bytes(self) -> int | None:
        """Predicted bytes of one checkpoint: parameters and optimizer state; None without a prediction."""
        prediction = self.plan.prediction
        if prediction is None:
            return None
        per_rank, offload = prediction.memory.staged_checkpoint_bytes, prediction.offload
        if offload is not None:
            per_rank += max(offload.host_bytes, offload.disk_bytes)
        return per_rank * self.plan.world_size // self.plan.replicate_degree
