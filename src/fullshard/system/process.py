"""Identity and state of processes, as the kernel gives them; "" where a system does not have /proc."""

import os
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Returns an identifier of the running kernel: another one after each boot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def pid_namespace() -> str:
    """Returns an identifier of the namespace in which this process's pid is valid."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def is_running(pid: int) -> bool:
    """Returns whether a process of this kernel and pid namespace has the process id `pid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat behind the command's name, or [] if there are none.

    Field 3 of man proc_pid_stat, the state, comes first.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
