"""Makes a CPU rank return freed memory to the system, so that resident memory matches the plan.

[Note: malloc keeps] glibc serves allocations below a threshold from arenas that grow in place: memory freed
below a live allocation stays resident. The threshold also moves: the first large tensor that is freed raises
it, up to 32 MiB, so that hardly any tensor is above it. Resident memory then grows beyond the plan: for 61M
parameters on a drive to 2.9 × the plan, or to 1.06 × with the threshold fixed here
(tests/training/test_offloaded_memory.py). The price is a page fault for each page of each allocation, which
adds half to a step's time. So this is for runs with a memory limit (`offload.host_bytes`).
"""

import ctypes
import os
from collections.abc import Mapping

THRESHOLD_BYTES = 1 << 16  # larger than norms, smaller than activations of few tokens
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def fix_malloc_thresholds(environment: Mapping[str, str] = os.environ) -> bool:
    """Sets glibc's thresholds so that freed memory returns to the system: see [Note: malloc keeps].

    Returns False, and changes nothing, if the C library is not glibc, or if `environment` sets either
    threshold already. Returns False also if glibc rejects a threshold.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(name in environment for name in _OF_THE_USER) or any(name in tunables for name in _TUNABLES):
        return False
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        return False
    done = library.mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES) == 1
    done = library.mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES) == 1 and done
    library.malloc_trim(0)
    return done
