"""A streamed file holds the bytes that were written, whatever their parts, or says that it does not."""

import errno
import os
import random
import resource
import signal
from pathlib import Path

import pytest

from fullshard.checkpoint.stream import BLOCK_BYTES, StreamedFile

DATA = random.Random(0).randbytes(2 * BLOCK_BYTES + 12345)


def written(path: Path, *, parts: list[int]) -> bytes:
    data = memoryview(DATA)
    with StreamedFile(path) as file:
        for count in parts:
            assert file.write(data[:count]) == len(data[:count])
            data = data[count:]
        file.finish()
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
    ],
)
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_the_bytes_are_those_written(tmp_path: Path, parts: list[int], place: str) -> None:
    memory = Path("/dev/shm")
    if place == "memory" and not memory.is_dir():
        pytest.skip("no file system in memory here")
    path = (tmp_path if place == "disk" else memory) / f"stream-{os.getpid()}"
    try:
        assert written(path, parts=parts) == DATA[: sum(parts)]
    finally:
        path.unlink()


def test_what_is_written_may_change_afterwards(tmp_path: Path) -> None:
    data = bytearray(DATA[:BLOCK_BYTES])
    with StreamedFile(tmp_path / "file") as file:
        for byte in range(3):
            data[:] = bytes([byte]) * BLOCK_BYTES
            file.write(data)
        file.finish()
    found = (tmp_path / "file").read_bytes()
    assert [set(found[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]) for i in range(3)] == [{0}, {1}, {2}]


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(FileExistsError), StreamedFile(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_bytes() == b"before"


def test_an_error_of_the_disk_names_the_file_and_comes_before_the_end(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK_BYTES + 5000, limits[1]))
        with pytest.raises(OSError, match="file") as caught:
            written(tmp_path / "file", parts=[len(DATA)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "file"))
