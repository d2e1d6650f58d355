"""Load of this machine by other programs, which measurements must know of."""

import os
from pathlib import Path
from typing import NamedTuple

BUSY = 0.15  # fraction of the processors from which rates that are measured beside it are notably too low


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
