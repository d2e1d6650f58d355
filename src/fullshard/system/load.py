"""Load of this machine by other programs, which measurements must know of."""

import os

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


def busy_machine_text(fraction: float) -> str | None:
    """Returns a warning about measurements at this load; None if the machine is not busy."""
    if fraction < BUSY:
        return None
    return f"while other programs used {100 * fraction:.0f} % of the processors: rates may be too low"
