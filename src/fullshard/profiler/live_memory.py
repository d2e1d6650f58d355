"""Reads how much memory this process holds at the end of a step, without a profiler.

On CUDA, the figures are those of torch's allocator, which the host keeps: reading them does not wait for the
device. torch's CPU allocator does not count its bytes, so live bytes on the host are those that glibc's
malloc counts (mallinfo2): tensors, and everything else that C and C++ allocate. Unlike resident memory, they
do not grow by fragmentation, so they show a leak. With another malloc, or without glibc, they are unknown.
"""

import ctypes
import os
import resource
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

# Most of the processor time that may be spent on mallinfo2, which walks all free blocks of the heap.
_MALLOC_SHARE = 0.005
_MALLINFO_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer. man mallinfo."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS.split()]


@dataclass(frozen=True)
class LiveMemory:
    """Memory of this process at the end of a step. Figures that are not known are None.

    host_bytes: live bytes of malloc
    resident_bytes: resident memory of the process
    allocated_bytes, reserved_bytes: live tensors on the device, and device memory that the allocator reserves
    peak_allocated_bytes, peak_reserved_bytes: their highest values since the previous reading
    allocator_retries: number of times since the start that the allocator freed its cache to serve a request
    fragmentation: fraction of the reserved memory that is free, in blocks split off from blocks in use
    """

    host_bytes: int | None = None
    resident_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocator_retries: int | None = None
    fragmentation: float | None = None

    def known_figures(self) -> dict[str, float]:
        """Returns the known figures by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class LiveMemoryMeter:
    """Reads the memory of this process, on `device` and on the host. Close it at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._malloc, self._read_again_at = _find_mallinfo2(), 0.0
        self._malloc_costs = deque[float](maxlen=4)  # processor seconds of the last readings
        self._host_bytes: int | None = None
        self._page = os.sysconf("SC_PAGE_SIZE")
        statm = "/proc/self/statm"
        self._statm = os.open(statm, os.O_RDONLY | os.O_CLOEXEC) if os.path.exists(statm) else None

    def read(self) -> LiveMemory:
        """Returns the current figures. On CUDA, resets the peaks."""
        host, resident = self._read_malloc(), self._read_resident()
        if self._device is None:
            return LiveMemory(host_bytes=host, resident_bytes=resident)
        stats: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return memory_of_allocator_stats(stats, host_bytes=host, resident_bytes=resident)

    def read_free_bytes(self) -> dict[str, int]:
        """Returns the bytes by which `host_bytes` and `allocated_bytes` may still grow, by name, if known."""
        free = dict[str, int]()
        if (host := _free_host_bytes()) is not None:
            free["host_bytes"] = host
        if self._device is not None:
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            free["allocated_bytes"] = torch.cuda.mem_get_info(self._device)[0] + cached
        return free

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None

    def _read_malloc(self) -> int | None:
        """Returns the live bytes; those of the last reading if another would exceed _MALLOC_SHARE."""
        if self._malloc is None or time.monotonic() < self._read_again_at:
            return self._host_bytes
        started = time.thread_time()
        figures = self._malloc()
        self._host_bytes = figures.uordblks + figures.hblkhd
        # The least of the last few: a single one may be dear, because other programs had the caches.
        self._malloc_costs.append(time.thread_time() - started)
        self._read_again_at = time.monotonic() + min(self._malloc_costs) / _MALLOC_SHARE
        return self._host_bytes

    def _read_resident(self) -> int | None:
        if self._statm is None:
            return None
        return int(os.pread(self._statm, 200, 0).split()[1]) * self._page


def memory_of_allocator_stats(
    stats: Any, *, host_bytes: int | None = None, resident_bytes: int | None = None
) -> LiveMemory:
    """Returns the figures of torch.cuda.memory_stats_as_nested_dict; zeros before the first allocation."""

    def figure(name: str, kind: str) -> int:
        return stats.get(name, {}).get("all", {}).get(kind, 0)

    reserved = figure("reserved_bytes", "current")
    return LiveMemory(
        host_bytes=host_bytes,
        resident_bytes=resident_bytes,
        allocated_bytes=figure("allocated_bytes", "current"),
        reserved_bytes=reserved,
        peak_allocated_bytes=figure("allocated_bytes", "peak"),
        peak_reserved_bytes=figure("reserved_bytes", "peak"),
        allocator_retries=stats.get("num_alloc_retries", 0),
        fragmentation=figure("inactive_split_bytes", "current") / reserved if reserved else 0.0,
    )


def _find_mallinfo2() -> Callable[[], Any] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocFigures
    return function


def _free_host_bytes() -> int | None:
    """Returns memory that this process may still allocate on the host, by the system and its own limit."""
    free: list[int] = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            free.append(max(0, limit - pages * os.sysconf("SC_PAGE_SIZE")))
    except (OSError, ValueError):
        pass
    return min(free, default=None)
