"""Copies tensors from safetensors files in byte order: threads read ahead, and the calling thread converts.

[Note: past the page cache] Blocks are read from the disk into our own buffers (O_DIRECT), two at a time. This
takes a fraction of the processor time of reads through the page cache, and leaves that time for converting.
If several ranks of a node read the same bytes, the page cache is used, because it serves all of them except
the first. It is also used if the file system does not support O_DIRECT.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fullshard.errors import DamagedCheckpointError
from fullshard.system.direct_io import ALIGNMENT, is_direct, open_direct
from fullshard.weights.files import PretrainedFiles
from fullshard.weights.strided import GAP_BYTES, StridedCopy, split

BUFFER_BYTES = 8 << 20
_THREADS = 2  # threads that wait for the disk
_BUFFERS = _THREADS + 2  # one per thread, one being emptied, and one full, so that no thread waits
# Bytes per read through the page cache: data in the processor's own cache is copied faster.
_CACHED_BYTES = 1 << 20


@dataclass
class _Read:
    """A read of bytes `begin` to `end` of a file.

    moves: (first byte in the file, copy) of each copy out of the range
    """

    file: str
    begin: int
    end: int
    moves: list[tuple[int, StridedCopy]] = field(default_factory=list[tuple[int, StridedCopy]])


def carry_out(moves: Iterable[StridedCopy], files: PretrainedFiles, *, cached: bool) -> int:
    """Fills the targets of `moves` from `files`. Returns the number of bytes read.

    `cached` reads through the page cache, for bytes that other ranks read too. Uses four buffers of 8 MiB.
    Raises DamagedCheckpointError for a file that ends early; OSError.
    """
    moves = list(moves)
    reads = _reads(moves, files)
    pinned = any(move.target.is_cuda for move in moves)
    with _Reader(files, cached=cached, pinned=pinned) as reader, torch.no_grad():
        reader.run(reads)
    return sum(read.end - read.begin for read in reads)


def _reads(moves: Iterable[StridedCopy], files: PretrainedFiles) -> list[_Read]:
    """Returns the reads for `moves`, in order of file and byte. Neighbouring copies share one read."""
    placed: list[tuple[str, int, int, StridedCopy]] = []
    for move in moves:
        tensor = files.tensors[move.source]
        itemsize = tensor.dtype.itemsize
        for piece in split(move, most=(BUFFER_BYTES - ALIGNMENT) // itemsize, itemsize=itemsize):
            begin = tensor.begin + piece.begin * itemsize
            placed.append((tensor.file, begin, begin + piece.span * itemsize, piece))
    placed.sort(key=lambda one: one[:3])
    reads: list[_Read] = []
    for file, begin, end, move in placed:
        if not reads or not _joins(reads[-1], file, begin=begin, end=end):
            reads.append(_Read(file, begin, end))
        reads[-1].end = max(reads[-1].end, end)
        reads[-1].moves.append((begin, move))
    return reads


def _joins(read: _Read, file: str, *, begin: int, end: int) -> bool:
    """Returns True if `read` can include bytes `begin` to `end` of `file`: near enough, within one buffer."""
    fits = max(end, read.end) - _down(read.begin) <= BUFFER_BYTES
    return read.file == file and fits and begin - read.end <= GAP_BYTES


class _Reader:
    """Runs reads on threads, with the open files and the buffers that the threads fill."""

    def __init__(self, files: PretrainedFiles, *, cached: bool, pinned: bool) -> None:
        self.files = files
        self.cached = cached
        self.open: dict[str, int] = {}
        self.buffers = [_buffer(pinned=pinned) for _ in range(_BUFFERS)]
        self.threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="read")

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        for descriptor in self.open.values():
            os.close(descriptor)

    def run(self, reads: Iterable[_Read]) -> None:
        waiting: deque[tuple[_Read, Tensor, Future[None]]] = deque()
        for turn, read in enumerate(reads):
            if len(waiting) == _BUFFERS:
                self._empty(waiting.popleft())
            buffer = self.buffers[turn % _BUFFERS]
            descriptor = self._descriptor(read.file)
            if hasattr(os, "posix_fadvise") and self.cached:  # not on macOS
                os.posix_fadvise(descriptor, read.begin, read.end - read.begin, os.POSIX_FADV_WILLNEED)
            waiting.append(
                (read, buffer, self.threads.submit(self._fill, read, buffer, descriptor=descriptor))
            )
        while waiting:
            self._empty(waiting.popleft())

    def _descriptor(self, file: str) -> int:
        if file not in self.open:
            path = self.files.directory / file
            opener = os.open if self.cached else open_direct
            self.open[file] = opener(path, os.O_RDONLY | os.O_CLOEXEC)
            self.cached = self.cached or not is_direct(self.open[file])
        return self.open[file]

    def _fill(self, read: _Read, buffer: Tensor, *, descriptor: int) -> None:
        """Reads the aligned blocks that contain the bytes of `read` into `buffer`."""
        at, end = _down(read.begin), _down(read.end + ALIGNMENT - 1)
        into = memoryview(cast(bytearray, buffer.numpy()))[: end - at]
        done = 0
        while at + done < read.end:
            most = done + _CACHED_BYTES if self.cached else into.nbytes
            count = os.preadv(descriptor, [into[done:most]], at + done)
            if not count:
                raise DamagedCheckpointError(
                    f"{self.files.directory / read.file} ends early.",
                    got=f"{at + done} bytes",
                    why="it was whole when its header was read: something else writes it",
                )
            done += count

    def _empty(self, one: tuple[_Read, Tensor, Future[None]]) -> None:
        read, buffer, filled = one
        filled.result()
        for begin, move in read.moves:
            dtype = self.files.tensors[move.source].dtype
            first = begin - _down(read.begin)
            elements = buffer[first : first + move.span * dtype.itemsize]
            if first % dtype.itemsize:  # the format does not guarantee alignment
                elements = elements.clone()
            move.take(elements.view(dtype))


def _buffer(*, pinned: bool) -> Tensor:
    """Returns a page-aligned buffer of BUFFER_BYTES and one more block, pinned on request."""
    size = BUFFER_BYTES + ALIGNMENT
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _down(offset: int) -> int:
    """Rounds an offset in a file down to a multiple of ALIGNMENT."""
    return offset - offset % ALIGNMENT
