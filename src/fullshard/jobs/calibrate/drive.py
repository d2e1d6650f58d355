"""Measures a drive as offload uses it: all ranks read and write at the same time, past the page cache."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from fullshard.errors import OffloadError
from fullshard.jobs.calibrate.device import mean_over_ranks
from fullshard.offload.drive import DriveFile
from fullshard.offload.store import allocate_host_memory, as_memoryview

_PIECE_BYTES = 16 << 20


def read_plus_write_bandwidth(directory: Path, *, pieces: int = 16) -> float | None:
    """Returns the bytes/s, read plus written, per rank while all ranks work. Collective.

    Each rank has two files in `directory`, of `pieces` × 16 MiB each. One is read while the other is written
    and flushed. The result is None on all ranks if any of them cannot write there.
    """
    files, rate = None, 0.0
    with ExitStack() as stack:
        with suppress(OSError, OffloadError):
            files = open_two_random_files(directory, stack, pieces=pieces)
        mean_over_ranks(0.0)  # all ranks begin together
        if files is not None:
            with suppress(OffloadError):
                rate = _own_read_plus_write_rate(*files)
    everywhere, mean = mean_over_ranks(float(rate > 0)) == 1, mean_over_ranks(rate)
    return float(f"{mean:.3g}") if everywhere else None


def open_two_random_files(directory: Path, stack: ExitStack, *, pieces: int) -> tuple[DriveFile, DriveFile]:
    """Returns two open, unlinked files of random numbers. (Zeros may be faster, and holes are not read.)"""
    with tempfile.TemporaryDirectory(prefix="fullshard-calibrate-", dir=directory) as name:
        one, other = (
            stack.enter_context(DriveFile.open_or_create(Path(name, own), pieces * _PIECE_BYTES))
            for own in ("one", "other")
        )
    for file in (one, other):
        _write_whole_file(file, _random_piece())
    return one, other


def _own_read_plus_write_rate(one: DriveFile, other: DriveFile) -> float:
    data, into = _random_piece(), as_memoryview(allocate_host_memory(_PIECE_BYTES, pinned=False))
    with ThreadPoolExecutor(max_workers=1) as beside:
        started = time.perf_counter()
        for source, target in ((one, other), (other, one)):
            reading = beside.submit(_read_whole_file, source, into)
            _write_whole_file(target, data)
            reading.result()
        return 4 * one.size_bytes / (time.perf_counter() - started)


def _random_piece() -> memoryview:
    found = allocate_host_memory(_PIECE_BYTES, pinned=False)
    found.view(torch.int32).random_()
    return as_memoryview(found)


def _write_whole_file(file: DriveFile, data: memoryview) -> None:
    for offset in range(0, file.size_bytes, _PIECE_BYTES):
        file.write(data, offset)
    file.flush()


def _read_whole_file(file: DriveFile, into: memoryview) -> None:
    for offset in range(0, file.size_bytes, _PIECE_BYTES):
        file.read(into, offset)
