"""Identity and state of processes, and what a watchdog calls before it ends this one. No torch."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullshard.errors import TrainError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The environment variables that configure torch's allocators. The first is the present name."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"


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
