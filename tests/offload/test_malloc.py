"""What is freed goes back, so that what is resident is what is alive; a user's own settings stay."""

import subprocess
import sys

import pytest

from fullshard.offload.malloc import fix_malloc_thresholds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is resident is read from /proc")

# Blocks of 16 MiB are freed, of 160 KiB freed with every other one alive: 64 and then 20 MiB of them go.
PROGRAM = """
import ctypes, re, sys
from pathlib import Path
from fullshard.offload.malloc import fix_malloc_thresholds

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def taken(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

if sys.argv[1] == "fixed":
    assert fix_malloc_thresholds()
before = resident()
for block in [taken(16 << 20) for _ in range(4)]:
    libc.free(block)
blocks = [taken(160 << 10) for _ in range(256)]
for block in blocks[::2]:
    libc.free(block)
print(resident() - before)
"""


def left(how: str, **environment: str) -> int:
    """Bytes that are resident with 20 MiB alive and 20 MiB freed."""
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def test_what_is_freed_is_not_resident():
    assert left("fixed") == pytest.approx(20 << 20, rel=0.1)
    assert left("as it was") > 36 << 20, "where glibc gives it back by itself this module is not needed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "1000000"),
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=1000000"),
    ],
)
def test_what_the_user_has_set_stays(name: str, value: str):
    assert not fix_malloc_thresholds({name: value})
