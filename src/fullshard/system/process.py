"""Identity, state and load of processes, and what a watchdog calls before it ends this one. No torch."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fullshard.errors import TrainError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The environment variables that configure torch's allocators. The first is the present name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
BUSY = 0.15  # fraction of the processors from which rates that are measured beside it are notably too low


def boot_id() -> str:
    """Returns an identifier of the running kernel, which changes with each boot; "" without /proc."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


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


def count_usable_cores() -> int:
    """Returns the number of cores that this process may run on; all of the machine's if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Receiver = Callable[[TrainError], object]

_RECEIVERS: list[Receiver] = []


@contextmanager
def call_on_watchdog_exit(receiver: Receiver) -> Generator[None]:
    """Context in which a watchdog calls `receiver` with the error before the watchdog ends this process."""
    _RECEIVERS.append(receiver)
    try:
        yield
    finally:
        _RECEIVERS.remove(receiver)


def watchdog_exit_receivers() -> tuple[Receiver, ...]:
    """Returns the receivers of all open `call_on_watchdog_exit` contexts."""
    return tuple(_RECEIVERS)


def busy_processor_fraction() -> float:
    """Returns the processors that programs used in the last minute, as a fraction of all; at most 1.

    It is the load average over the number of processors, and 0 on systems that do not report it.
    """
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0
    return min(1.0, load / (os.cpu_count() or 1))


class ProcessorSeconds(NamedTuple):
    """Seconds of processor time since the machine and this process started, or between two such moments.

    machine: seconds of all programs
    available: seconds that all processors had, idle or not; 0 on systems that do not report both
    process: seconds of this process and of those that it has waited for
    """

    machine: float
    available: float
    process: float

    @classmethod
    def now(cls) -> "ProcessorSeconds":
        """Returns the seconds until now. Reads /proc/stat, which only Linux has."""
        own = os.times()
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split()[1:9]]
        except (OSError, ValueError):
            ticks = [0] * 8
        seconds = [tick / os.sysconf("SC_CLK_TCK") for tick in ticks]
        idle = seconds[3] + seconds[4]  # idle, and waiting for drives
        return cls(sum(seconds) - idle, sum(seconds), sum(own[:4]))

    def since(self, earlier: "ProcessorSeconds") -> "ProcessorSeconds":
        """Returns the seconds since `earlier`; none is negative, though the system's idle time may be."""
        machine, available, process = (
            max(0.0, now - before) for now, before in zip(self, earlier, strict=True)
        )
        return ProcessorSeconds(min(machine, available), available, process)


def other_programs_fraction(processes: list[ProcessorSeconds]) -> float:
    """Returns the processors that programs besides `processes` used, as a fraction of all of one machine.

    processes: seconds of each process of one machine in the same period

    Returns 0 on systems that do not report the time of all processors.
    """
    available = max(one.available for one in processes)
    others = max(one.machine for one in processes) - sum(one.process for one in processes)
    return min(1.0, max(0.0, others / available)) if available > 0 else 0.0
