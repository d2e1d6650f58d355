"""A drive file returns the bytes that were written, or raises an error that names the file."""

import errno
import logging
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import DamagedOffloadError, OffloadError
from fullshard.offload.drive import SYSTEM, DriveFile, DriveSystemCalls
from fullshard.system.direct_io import ALIGNMENT
from tests.faults.disks import small_disk
from tests.offload.systems import failing, that_takes_the_flag_alone, with_short_transfers, without_direct

SIZE = 24 * ALIGNMENT
SYSTEMS: dict[str, Callable[[], DriveSystemCalls]] = {
    "as it is": lambda: SYSTEM,
    "without direct I/O": without_direct,
    "direct only when opened": that_takes_the_flag_alone,
    "short transfers": lambda: with_short_transfers(0),
    "short and cached": lambda: replace(with_short_transfers(1), open=without_direct().open),
}
PLACES = [None, "/dev/shm"]  # a disk's and a memory's file system

blocks = st.tuples(st.integers(0, 23), st.integers(1, 24)).map(
    lambda one: (one[0] * ALIGNMENT, min(one[1], 24 - one[0]) * ALIGNMENT)
)


def _quick(descriptor: int) -> None:
    """Replaces the flush, which takes most of the time and which these tests do not need."""


def memory(data: bytes) -> memoryview:
    """A copy of `data` at a page's start."""
    page = memoryview(mmap.mmap(-1, len(data)))
    page[:] = data
    return page


@pytest.fixture(params=PLACES, ids=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param is None:
        yield tmp_path
    elif not Path(request.param).is_dir():
        pytest.skip("no file system in memory here")
    else:
        with tempfile.TemporaryDirectory(dir=request.param) as made:
            yield Path(made)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=60)
@given(
    moves=st.lists(st.tuples(st.sampled_from(["read", "write"]), blocks), min_size=1, max_size=12),
    seed=st.integers(0, 1 << 30),
)
def test_reads_return_the_bytes_written_last(place, system, moves, seed):
    rng, model = random.Random(seed), bytearray(SIZE)
    with (
        tempfile.TemporaryDirectory(dir=place) as made,
        DriveFile.open_or_create(
            Path(made) / "file", SIZE, system=replace(SYSTEMS[system](), fdatasync=_quick)
        ) as file,
    ):
        for doing, (offset, length) in moves:
            if doing == "write":
                data = rng.randbytes(length)
                file.write(memory(data), offset)
                model[offset : offset + length] = data
            else:
                target = memory(bytes(length))
                file.read(target, offset)
                assert target == model[offset : offset + length]
        assert file.path.read_bytes() == model
        assert file.path.stat().st_size == SIZE


@pytest.mark.parametrize("system", SYSTEMS)
def test_threads_that_touch_different_blocks_do_not_disturb_each_other(directory: Path, system: str) -> None:
    blocks_, threads = 64, 4
    with DriveFile.open_or_create(directory / "file", blocks_ * ALIGNMENT, system=SYSTEMS[system]()) as file:

        def work(thread: int) -> dict[int, bytes]:
            rng, written = random.Random(thread), {}
            for _ in range(150):
                block = rng.randrange(thread, blocks_, threads)
                written[block] = rng.randbytes(ALIGNMENT)
                file.write(memory(written[block]), block * ALIGNMENT)
                target = memory(bytes(ALIGNMENT))
                file.read(target, block * ALIGNMENT)
                assert target == written[block]
            return written

        with ThreadPoolExecutor(threads) as pool:
            written = {block: data for one in pool.map(work, range(threads)) for block, data in one.items()}
        content = file.path.read_bytes()
    assert all(content[n * ALIGNMENT : (n + 1) * ALIGNMENT] == data for n, data in written.items())


def test_a_file_is_allocated_whole_when_it_is_made(directory: Path) -> None:
    with DriveFile.open_or_create(directory / "file", 1 << 20) as file:
        status = file.path.stat()
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    assert [path.name for path in directory.iterdir()] == ["file"]


@pytest.mark.parametrize("make", [DriveFile.open_or_create, DriveFile.open])
@pytest.mark.parametrize(("found", "word"), [(SIZE - 1, "truncated"), (SIZE + 1, "not of the size")])
def test_one_of_another_size_is_refused_and_stays(tmp_path: Path, make, found: int, word: str) -> None:
    (tmp_path / "file").write_bytes(b"x" * found)
    with pytest.raises(DamagedOffloadError, match=f"(?s)file is {word}.*{found} bytes, {SIZE} expected"):
        make(tmp_path / "file", SIZE)
    assert (tmp_path / "file").read_bytes() == b"x" * found


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedOffloadError, match="file is missing"):
        DriveFile.open(tmp_path / "file", SIZE)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_zeros_are_written_without_fallocate(tmp_path: Path, number: int) -> None:
    size = (3 << 20) + ALIGNMENT
    with DriveFile.open_or_create(tmp_path / "file", size, system=failing("posix_fallocate", number)) as file:
        status = file.path.stat()
    assert (status.st_size, status.st_blocks * 512 >= size) == (size, True)


def test_a_full_drive_shows_when_the_file_is_made_and_nothing_is_left(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size_bytes=1 << 20) as disk:
        DriveFile.open_or_create(disk / "fits", 512 << 10).close()
        with pytest.raises(
            OffloadError, match=r"(?s)No space left.*ENOSPC.*1\.00 MiB to allocate.*disk is full"
        ):
            DriveFile.open_or_create(disk / "file", 1 << 20)
        assert [path.name for path in disk.iterdir()] == ["fits"]


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.EIO, "Input/output error (EIO)"), (errno.ENOSPC, "No space left on device (ENOSPC)")],
)
def test_an_error_names_the_file_the_offset_and_the_errno(directory: Path, number: int, word: str) -> None:
    data = memory(bytes(2 * ALIGNMENT))
    for call, doing in [("preadv", "read"), ("pwritev", "written")]:
        with DriveFile.open_or_create(directory / call, SIZE, system=failing(call, number)) as file:
            with pytest.raises(OffloadError) as caught:
                (file.read if doing == "read" else file.write)(data, 3 * ALIGNMENT)
            assert f"{directory / call} cannot be {doing}" in str(caught.value)
            assert f"{word}, 8.00 KiB at offset {3 * ALIGNMENT}" in str(caught.value)
    DriveFile.open_or_create(directory / "flush", SIZE).close()
    with DriveFile.open(directory / "flush", SIZE, system=failing("fdatasync", number)) as file:
        with pytest.raises(OffloadError) as caught:
            file.flush()
        assert f"{directory / 'flush'} cannot be flushed" in str(caught.value)
        assert word in str(caught.value)


def test_an_error_after_a_part_names_its_offset(tmp_path: Path) -> None:
    def pwritev(descriptor, buffers, offset):
        if offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwritev(descriptor, [buffers[0][:ALIGNMENT]], offset)

    with (
        DriveFile.open_or_create(tmp_path / "file", SIZE, system=replace(SYSTEM, pwritev=pwritev)) as file,
        pytest.raises(OffloadError, match=f"at offset {ALIGNMENT}"),
    ):
        file.write(memory(bytes(SIZE)), 0)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("left", [0, 1000, 5 * ALIGNMENT, SIZE - 512, SIZE - 1])
def test_a_file_that_was_cut_off_is_never_read_past_its_end(directory: Path, system: str, left: int) -> None:
    with DriveFile.open_or_create(directory / "file", SIZE, system=SYSTEMS[system]()) as file:
        os.truncate(file.path, left)
        for offset in (0, ALIGNMENT, SIZE - ALIGNMENT):
            with pytest.raises(DamagedOffloadError, match=f"(?s)truncated.*{left} bytes, {SIZE} expected"):
                file.read(memory(bytes(SIZE - offset)), offset)


@pytest.mark.parametrize(
    ("offset", "length"), [(SIZE, 1), (SIZE - 1, 2), (0, SIZE + 1), (-1, 1), (2 * SIZE, 1)]
)
def test_nothing_past_the_planned_end_is_touched(directory: Path, offset: int, length: int) -> None:
    with DriveFile.open_or_create(directory / "file", SIZE) as file:
        with pytest.raises(OffloadError, match=f"{length} bytes at offset {offset} of {SIZE}"):
            file.write(memory(bytes(length)), offset)
        with pytest.raises(OffloadError, match="past the end"):
            file.read(memory(bytes(length)), offset)
        assert file.path.stat().st_size == SIZE


@pytest.mark.parametrize("system", ["without direct I/O", "direct only when opened"])
def test_missing_direct_io_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, system: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="fullshard"):
        for name in ("one", "other"):
            with DriveFile.open_or_create(tmp_path / name, SIZE, system=SYSTEMS[system]()) as file:
                file.write(memory(bytes(SIZE)), 0)
                file.read(memory(bytes(SIZE)), 0)
                assert not file.direct
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"{tmp_path} has no direct I/O"
    ]


def test_a_closed_file_is_not_another_one(tmp_path: Path) -> None:
    """The number of its descriptor may be that of a file which was opened since."""
    file = DriveFile.open_or_create(tmp_path / "file", SIZE)
    file.close()
    with DriveFile.open_or_create(tmp_path / "other", SIZE), pytest.raises(OffloadError, match="EBADF"):
        file.write(memory(b"x" * SIZE), 0)
    assert set((tmp_path / "other").read_bytes()) == {0}
