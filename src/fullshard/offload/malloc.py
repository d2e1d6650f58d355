"""What a CPU rank frees goes back to the system, so that what is resident is what is planned.

[Note: malloc keeps] glibc takes what is below a threshold out of arenas that grow in place: what is freed
below something that is alive stays resident. And the threshold moves: the first large tensor that is freed
lifts it, up to 32 MiB, so that hardly a tensor is above. A rank then holds the sum of what it held at
different times: 2.9 × the plan of 61M parameters on a drive, 1.06 × with the threshold fixed here
(tests/training/test_offloaded_memory.py). The price is a page fault for each page of each allocation, half as
much again of a step's time, so it is for runs that are told what they may take (`offload.host_bytes`).
"""

import ctypes
import os
from collections.abc import Mapping

THRESHOLD_BYTES = 1 << 16  # below are norms and the interpreter; activations of few tokens are above
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OF_THE_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold")


def fix_malloc_thresholds(environment: Mapping[str, str] = os.environ) -> bool:
    """From now on, tensors of this process are mappings of their own, and what is free already is given back.

    False, and nothing changes, where the C library is not glibc, or `environment` has set either threshold
    already (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`). See [Note: malloc keeps].
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(name in environment for name in _OF_THE_USER) or any(name in tunables for name in _TUNABLES):
        return False
    library = _glibc()
    if library is None:
        return False
    done = library.mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES) == 1
    done = library.mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES) == 1 and done
    library.malloc_trim(0)
    return done


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it is glibc."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
