"""A streamed file holds the bytes that were written, whatever their parts, or says that it does not."""

import ctypes
import errno
import mmap
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from fullshard.system.direct_io import ALIGNMENT, BLOCK_BYTES, LARGE_BYTES, DirectFileWriter

DATA = random.Random(0).randbytes(2 * BLOCK_BYTES + 12345)


def at(shift: int, data: bytes = DATA) -> memoryview:
    """`data` in memory of which the address is `shift` behind a page's."""
    block = mmap.mmap(-1, shift + len(data))
    block[shift:] = data
    return memoryview(block)[shift:]


def written(path: Path, *, parts: list[int], shift: int = 0) -> bytes:
    data = at(shift)
    with DirectFileWriter(path) as file:
        for count in parts:
            assert file.write(data[:count]) == len(data[:count])
            data = data[count:]
        file.flush_to_disk()
    return path.read_bytes()


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [1],
        [4096],
        [BLOCK_BYTES],
        [BLOCK_BYTES - 1, 2],
        [2 * BLOCK_BYTES],
        [100, len(DATA)],
        [1 << 20] * 40,
        [777_777] * 50,
        [LARGE_BYTES - 1, 1, LARGE_BYTES + 1, 4095, BLOCK_BYTES],
        [64, BLOCK_BYTES, 1, LARGE_BYTES + 4096, 4095 + LARGE_BYTES, 64],
        [8192, LARGE_BYTES, 100, 3996, BLOCK_BYTES + LARGE_BYTES + 7, 4089, LARGE_BYTES],
        [BLOCK_BYTES - 4096, BLOCK_BYTES + 4096, 5],
    ],
)
@pytest.mark.parametrize(
    ("shift", "place"), [(0, "disk"), (1, "disk"), (64, "disk"), (4095, "disk"), (1, "memory")]
)
def test_the_bytes_are_those_written(tmp_path: Path, parts: list[int], shift: int, place: str) -> None:
    memory = Path("/dev/shm")
    if place == "memory" and not memory.is_dir():
        pytest.skip("no file system in memory here")
    path = (tmp_path if place == "disk" else memory) / f"stream-{os.getpid()}"
    try:
        assert written(path, parts=parts, shift=shift) == DATA[: sum(parts)]
    finally:
        path.unlink()


def has_direct_writing(directory: Path) -> bool:
    """Returns whether the file system writes a block past the page cache, by a direct system call."""
    try:
        file = os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
    except OSError:
        return False
    try:
        return hasattr(os, "O_DIRECT") and os.write(file, mmap.mmap(-1, ALIGNMENT)) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(file)


def cached_pages(path: Path) -> list[int]:
    """Which pages of a file lie in the page cache."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        done = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), found
        )
        del begin  # the mapping cannot be closed while it is there
    assert done == 0
    return [number for number, there in enumerate(found) if there & 1]


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("parts", [[len(DATA)], [100, 3996, BLOCK_BYTES, 8192, 777_777], [1 << 19] * 40])
def test_nothing_but_the_end_goes_through_the_page_cache(
    tmp_path: Path, parts: list[int], shift: int
) -> None:
    if not has_direct_writing(tmp_path):
        pytest.skip("no direct writing on this file system")
    data, path = at(shift), tmp_path / "file"
    with DirectFileWriter(path) as file:
        for count in parts:
            file.write(data[:count])
            data = data[count:]
        file.flush_to_disk()
    size = path.stat().st_size
    assert set(cached_pages(path)) <= ({size // mmap.PAGESIZE} if size % mmap.PAGESIZE else set())
    path.read_bytes()
    assert len(cached_pages(path)) > 1  # what is cached is seen


def own_memory_bytes() -> int:
    """Bytes of this process that belong to no file (Linux)."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(line[1]) << 10 for line in lines if line[0] in ("RssAnon:", "RssShmem:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc of Linux")
def test_data_aligned_as_in_the_file_is_not_copied(tmp_path: Path) -> None:
    if not has_direct_writing(tmp_path):
        pytest.skip("no direct writing on this file system")
    held = {}
    for before, shift in ((0, 0), (0, 64), (64, 0)):  # bytes before, and where in a page the data is
        data = at(shift, DATA[: 2 * BLOCK_BYTES])
        began = own_memory_bytes()
        with DirectFileWriter(tmp_path / f"file-{before}-{shift}") as file:
            file.write(bytes(before))
            file.write(data)
            held[before, shift] = own_memory_bytes() - began
            file.flush_to_disk()
        assert (tmp_path / f"file-{before}-{shift}").read_bytes() == bytes(before) + data
        del file  # its blocks
    assert held[0, 0] < BLOCK_BYTES // 4
    assert min(held[0, 64], held[64, 0]) > BLOCK_BYTES


@pytest.mark.parametrize("shift", [0, 64])
def test_signals_lose_nothing(tmp_path: Path, shift: int) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        assert written(tmp_path / "file", parts=[5, 4091, len(DATA)], shift=shift) == DATA
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen


@pytest.mark.parametrize("shift", [0, 64])
def test_memory_may_change_after_a_write_returns(tmp_path: Path, shift: int) -> None:
    data = at(shift, DATA[:BLOCK_BYTES])
    with DirectFileWriter(tmp_path / "file") as file:
        for byte in range(3):
            data[:] = bytes([byte]) * BLOCK_BYTES
            file.write(data)
        file.flush_to_disk()
    found = (tmp_path / "file").read_bytes()
    assert [set(found[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(3)] == [{0}, {1}, {2}]


def test_writing_a_new_file_refuses_an_existing_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError), DirectFileWriter(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_bytes() == b"before"


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("room", [BLOCK_BYTES + 5000, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 100, 0])
def test_an_error_of_the_disk_names_the_file_and_comes_before_the_end(
    tmp_path: Path, room: int, shift: int
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        with pytest.raises(OSError, match="file") as caught:
            written(tmp_path / "file", parts=[len(DATA)], shift=shift)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "file"))
