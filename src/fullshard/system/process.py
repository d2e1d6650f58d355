"""Identity and signals of processes, and what a watchdog calls before it ends this one. No torch."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from fullshard.errors import TrainError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The environment variables that configure torch's allocators. The first is the present name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"


@cache
def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is absent."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def pid_namespace() -> str:
    """Returns an identifier of the namespace in which this process's pid is valid; "" without /proc."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def is_process_running(pid: int) -> bool:
    """Returns True if this kernel and pid namespace have a process with the id `pid`."""
    try:
        with suppress(PermissionError):  # another user's
            os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def read_stat_fields_after_comm(pid: int) -> list[str]:
    """Returns the third (the state) and later fields of `man proc_pid_stat`; [] if they cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def count_oom_kills() -> int | None:
    """Returns how many processes this kernel has killed because memory ran out, containers' too, if known."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    return None


def raise_open_file_limit() -> None:
    """Raises the soft limit of open files to the hard one: a store has two connections per rank.

    At most to 2^20: a hard limit may be 10⁹, and some programs close all numbers below the soft one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS allows less than its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 20)), hard))


def count_usable_cores() -> int:
    """Returns the number of cores that this process may run on; all of the machine's if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_cores_of_rank(
    ranks: int,
    *,
    environment: Mapping[str, str] = os.environ,
    list_cores: Callable[[int], set[int]] = lambda pid: os.sched_getaffinity(pid),
) -> float:
    """Returns this process's share of the cores that it may use, as one of `ranks` ranks of this machine.

    A launcher that binds each rank to cores of its own (srun --cpus-per-task, mpirun) lets it run on fewer
    than it may use itself, at most one rank's share. `list_cores`: those of a pid; 0 is this process.
    """
    try:
        own, launcher = list_cores(0), list_cores(os.getppid())
    except (AttributeError, OSError):  # the system does not say
        return count_usable_cores() / ranks
    every = int(environment.get("SLURM_CPUS_ON_NODE") or os.cpu_count() or 1)
    is_bound = "RANK" in environment and own < launcher and len(own) * ranks <= every
    return len(own) if is_bound else len(own) / ranks


Receiver = Callable[[TrainError], object]

_RECEIVERS: list[tuple[Receiver, bool]] = []


@contextmanager
def call_on_watchdog_exit(receiver: Receiver, *, shows_error: bool) -> Generator[None]:
    """Context in which a watchdog calls `receiver` with the error before the watchdog ends this process.

    shows_error: whether the user sees the error because of the receiver; else the watchdog prints it
    """
    _RECEIVERS.append((receiver, shows_error))
    try:
        yield
    finally:
        _RECEIVERS.remove((receiver, shows_error))


def watchdog_exit_receivers() -> tuple[tuple[Receiver, bool], ...]:
    """Returns (receiver, shows_error) of all open `call_on_watchdog_exit` contexts."""
    return tuple(_RECEIVERS)


# One Ctrl-C may arrive twice: from the terminal, and from a process in between (uv run, timeout).
_SAME_CTRL_C_SECONDS = 0.5


@dataclass
class RecordedSignals:
    """Signals and their times (of `time.monotonic`), in the order of arrival."""

    arrivals: list[tuple[signal.Signals, float]] = field(default_factory=list[tuple[signal.Signals, float]])

    @property
    def first_signal(self) -> signal.Signals | None:
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def is_interrupted_twice(self) -> bool:
        """True if a SIGINT followed over half a second after the first signal: the user will not wait."""
        interrupts = [at for number, at in self.arrivals[1:] if number == signal.SIGINT]
        return any(at > self.arrivals[0][1] + _SAME_CTRL_C_SECONDS for at in interrupts)


@contextmanager
def record_signals(*numbers: signal.Signals, raise_second_sigint: bool = False) -> Generator[RecordedSignals]:
    """Context in which the signals `numbers` are recorded in the value that it yields, and do nothing else.

    raise_second_sigint: a second SIGINT raises KeyboardInterrupt

    Signals that the process already ignores (under nohup, in a shell's background jobs) are not recorded, nor
    are any outside the main thread, where Python allows no handlers.
    """
    signals = RecordedSignals()

    def record_signal(number: int, frame: FrameType | None) -> None:
        signals.arrivals.append((signal.Signals(number), time.monotonic()))
        if number == signal.SIGINT and raise_second_sigint:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, record_signal) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
