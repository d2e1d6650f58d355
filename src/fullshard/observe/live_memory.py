"""Reads how much memory this process holds at the end of a step, without a profiler.

On CUDA, the figures are those of torch's allocator, which the host keeps: reading them does not wait for the
device. torch's CPU allocator does not count its bytes, so live bytes on the host are those that glibc's
malloc counts (mallinfo2): tensors, and everything else that C and C++ allocate. Unlike resident memory, they
do not grow by fragmentation, so they show a leak. With another malloc, or without glibc, they are unknown.
"""

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# Most of the processor time that may be spent on mallinfo2, which walks all free blocks of the heap.
_MALLOC_SHARE = 0.005
_MALLINFO_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocFigures(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer. man mallinfo."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS.split()]


class LiveMemoryMeter:
    """Reads the memory of this process, on `device` and on the host, as figures by name.

    host_bytes: live bytes of malloc
    resident_bytes: resident memory of the process
    allocated_bytes, reserved_bytes: live tensors on the device, and device memory that the allocator reserves
    peak_allocated_bytes, peak_reserved_bytes: their highest values since the previous reading
    allocator_retries: number of times since the start that the allocator freed its cache to serve a request
    fragmentation: fraction of the reserved memory that is free, in blocks split off from blocks in use
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._malloc, self._read_again_at = _find_mallinfo2(), 0.0
        self._malloc_costs = deque[float](maxlen=4)  # processor seconds of the last readings
        self._host_bytes = 0.0

    def read(self) -> dict[str, float]:
        """Returns the known figures. On CUDA, resets the peaks."""
        figures: dict[str, float] = {}
        if self._malloc is not None:
            figures["host_bytes"] = self._read_malloc(self._malloc)
        with suppress(OSError):
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
            figures["resident_bytes"] = int(pages) * os.sysconf("SC_PAGE_SIZE")
        if self._device is not None:
            stats: Any = torch.cuda.memory_stats_as_nested_dict(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            figures |= allocator_figures(stats)
        return figures

    def _read_malloc(self, mallinfo2: Callable[[], Any]) -> float:
        """Returns the live bytes; those of the last reading if another would exceed _MALLOC_SHARE."""
        if time.monotonic() >= self._read_again_at:
            started = time.thread_time()
            figures = mallinfo2()
            self._host_bytes = figures.uordblks + figures.hblkhd
            # The least of the last few: a single one may be dear, because other programs had the caches.
            self._malloc_costs.append(time.thread_time() - started)
            self._read_again_at = time.monotonic() + min(self._malloc_costs) / _MALLOC_SHARE
        return self._host_bytes


def allocator_figures(stats: Any) -> dict[str, float]:
    """Returns the figures of torch.cuda.memory_stats_as_nested_dict; zeros before the first allocation."""

    def figure(name: str, kind: str) -> int:
        return stats.get(name, {}).get("all", {}).get(kind, 0)

    reserved = figure("reserved_bytes", "current")
    return {
        "allocated_bytes": figure("allocated_bytes", "current"),
        "reserved_bytes": reserved,
        "peak_allocated_bytes": figure("allocated_bytes", "peak"),
        "peak_reserved_bytes": figure("reserved_bytes", "peak"),
        "allocator_retries": stats.get("num_alloc_retries", 0),
        "fragmentation": figure("inactive_split_bytes", "current") / reserved if reserved else 0.0,
    }


def _find_mallinfo2() -> Callable[[], Any] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _MallocFigures
    return function
