"""Checks of the directory of the checkpoints: renames, flushes, space."""

import os
import statistics
import threading
import time
from contextlib import suppress
from pathlib import Path

from fullshard.checks.machine_access import MachineAccess, nearest_existing_directory, temporary_file_in
from fullshard.checks.run_context import RunContext
from fullshard.quantities import format_bytes, format_seconds
from fullshard.spec.finding import Finding

_OBJECT_STORE = "checkpoints are on an object store"
_RENAMES, _FILE_BYTES = 60, 70_000
_FLUSHES, _PIECE_BYTES, _PIECES = 15, 1 << 20, 32
# A drive with a protected write cache takes 20 to 50 µs, others 0.2 to 20 ms.
_LEAST_FLUSH_SECONDS = 20e-6
_VOLATILE = ("tmpfs", "ramfs")


def check_atomic_rename(context: RunContext) -> Finding:
    """Replaces a file by renames while a thread reads it: every read must be whole."""
    directory = context.checkpoint_directory
    if directory is None:
        return Finding.skipped(_OBJECT_STORE)
    try:
        torn, reads = _count_torn_reads(nearest_existing_directory(directory), context.machine)
    except OSError as error:
        return _cannot_write(directory, error)
    if torn:
        return Finding.failure(
            f"{torn} of {reads} reads during renames saw a missing or mixed file in {directory}",
            why="a checkpoint that is being replaced can be read half written",
            fix="run.dir or checkpoint.dir on a local disk, or on a network file system with atomic renames",
        )
    return Finding.ok(f"{_RENAMES} renames were atomic")


def _count_torn_reads(directory: Path, machine: MachineAccess) -> tuple[int, int]:
    path, draft = temporary_file_in(directory), temporary_file_in(directory)
    path.write_bytes(b"0" * _FILE_BYTES)
    stop, torn, reads = threading.Event(), 0, 0

    def read_until_stopped() -> None:
        nonlocal torn, reads
        while not stop.is_set():
            reads += 1
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                data = b""
            torn += len(data) != _FILE_BYTES or len(set(data)) != 1

    reader = threading.Thread(target=read_until_stopped)
    reader.start()
    try:
        for number in range(_RENAMES):
            draft.write_bytes(b"0123456789"[number % 10 :][:1] * _FILE_BYTES)
            machine.replace(draft, path)
    finally:
        stop.set()
        reader.join()
        for one in (path, draft):
            with suppress(OSError):
                one.unlink()
    return torn, reads


def check_flush(context: RunContext) -> Finding:
    """Times `fsync`, and the writing of 32 MiB, in the directory of the checkpoints."""
    directory = context.checkpoint_directory
    if directory is None:
        return Finding.skipped(_OBJECT_STORE)
    place = nearest_existing_directory(directory)
    kind = context.machine.file_system_kind(place)
    if kind in _VOLATILE:
        return Finding.warning(
            f"{directory} is in memory ({kind})",
            why="its checkpoints are lost when the machine restarts, and take memory from the run",
            fix="run.dir or checkpoint.dir on a disk",
        )
    try:
        flush_seconds, rate = _flush_seconds_and_write_rate(place, context.machine)
    except OSError as error:
        return _cannot_write(directory, error)
    if flush_seconds < _LEAST_FLUSH_SECONDS:
        return Finding.warning(
            f"fsync takes {flush_seconds * 1e6:.1f} µs in {directory}",
            why="no drive is as fast: it returns before data is durable, so a power cut may lose saved steps",
            fix="a mount without `nobarrier` or `eatmydata`, or another disk",
        )
    took = context.checkpoint_bytes
    each = f", a checkpoint about {format_seconds(took / rate)}" if took else ""
    return Finding.ok(f"fsync takes {format_seconds(flush_seconds)}, {format_bytes(rate)}/s{each}")


def _flush_seconds_and_write_rate(directory: Path, machine: MachineAccess) -> tuple[float, float]:
    """Returns (median seconds of a flush of 4 KiB, bytes per second of writing and flushing 32 MiB)."""
    path, seconds, piece = temporary_file_in(directory), list[float](), os.urandom(_PIECE_BYTES)
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(_FLUSHES):
                file.write(piece[:4096])
                started = time.perf_counter()
                machine.fsync(file.fileno())
                seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            for _ in range(_PIECES):
                file.write(piece)
            machine.fsync(file.fileno())
            return statistics.median(seconds), _PIECES * _PIECE_BYTES / (time.perf_counter() - started)
    finally:
        path.unlink()


def check_checkpoint_space(context: RunContext) -> Finding:
    """Compares the free space with the checkpoints that the run keeps, and one more."""
    directory, size = context.checkpoint_directory, context.checkpoint_bytes
    if directory is None:
        return Finding.skipped(_OBJECT_STORE)
    if size is None:
        return Finding.skipped("the size of a checkpoint is not predicted for this run")
    section, steps = context.run.checkpoint, context.run.train.step_count
    saves = (steps // section.every if section.every else 0) + 1
    kept = min(saves, section.keep or saves)
    kept += steps // section.keep_every if section.keep_every else 0
    number = min(kept + 1, saves)  # a new one is complete before the oldest is removed
    free = context.machine.space_bytes(nearest_existing_directory(directory))[1]
    text = f"{format_bytes(free)} free for {number} checkpoint{'s' if number > 1 else ''}"
    got = f"{text} of {format_bytes(size)} in {directory}"
    if free < size:
        return Finding.failure(got, why="not even one fits", fix="free some space, or another checkpoint.dir")
    if free < number * size:
        fix = f"checkpoint.keep = {max(1, int(free // size) - 1)}, or another checkpoint.dir"
        return Finding.warning(got, why=f"{format_bytes(number * size)} are needed at once", fix=fix)
    return Finding.ok(got)


def _cannot_write(directory: Path, error: OSError) -> Finding:
    return Finding.failure(
        f"{directory} cannot be written: {error.strerror}", why="nothing can be saved", fix="another run.dir"
    )
