"""Moves out of safetensors files, in the order of their bytes: read ahead by threads, converted in this one.

[Note: past the page cache] Blocks come from the disk into buffers of our own (O_DIRECT), two at a time, which
takes a fraction of the processor time of reads through the kernel's cache: that is left for converting. Where
several ranks of a node read the same bytes the cache serves all but the first, and is used; so it is where a
file system has nothing else.
"""

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from fullshard.errors import DamagedCheckpointError
from fullshard.system.direct_io import ALIGNMENT, DIRECT
from fullshard.weights.files import PretrainedFiles
from fullshard.weights.strided import GAP_BYTES, StridedCopy, split

BUFFER_BYTES = 8 << 20
_THREADS = 2  # that wait for the disk
_BUFFERS = _THREADS + 2  # besides theirs, one is emptied, and one is full, so that nobody waits
_CACHED_BYTES = 1 << 20  # read at once through the cache: what the processor's own holds is copied quicker


@dataclass
class _Read:
    """Bytes `begin` to `end` of a file, and what is done with them. `moves`: each with its first byte."""

    file: str
    begin: int
    end: int
    moves: list[tuple[int, StridedCopy]] = field(default_factory=list[tuple[int, StridedCopy]])


def carry_out(moves: Iterable[StridedCopy], files: PretrainedFiles, *, cached: bool) -> int:
    """Fills the targets of `moves` from `files`. Returns the bytes that were read.

    `cached`: through the kernel's cache, since others read the same. Memory: four buffers of 8 MiB. Raises
    DamagedCheckpointError for a file that ends early; OSError.
    """
    moves = list(moves)
    reads = list(_reads(moves, files))
    pinned = any(move.target.is_cuda for move in moves)
    with _Reader(files, cached=cached, pinned=pinned) as reader, torch.no_grad():
        reader.run(reads)
    return sum(read.end - read.begin for read in reads)


def _reads(moves: Iterable[StridedCopy], files: PretrainedFiles) -> Iterator[_Read]:
    """What to read, from the first byte of the first file to the last; neighbours together."""
    placed: list[tuple[str, int, int, StridedCopy]] = []
    for move in moves:
        tensor = files.tensors[move.source]
        itemsize = tensor.dtype.itemsize
        for piece in split(move, most=(BUFFER_BYTES - ALIGNMENT) // itemsize, itemsize=itemsize):
            begin = tensor.begin + piece.begin * itemsize
            placed.append((tensor.file, begin, begin + piece.span * itemsize, piece))
    placed.sort(key=lambda one: one[:3])
    last: _Read | None = None
    for file, begin, end, move in placed:
        if last is None or not _joins(last, file, begin=begin, end=end):
            yield from [last] if last else []
            last = _Read(file, begin, end)
        last.end = max(last.end, end)
        last.moves.append((begin, move))
    yield from [last] if last else []


def _joins(read: _Read, file: str, *, begin: int, end: int) -> bool:
    fits = max(end, read.end) - _down(read.begin) <= BUFFER_BYTES
    return read.file == file and fits and begin - read.end <= GAP_BYTES


class _Reader:
    """Open files, buffers, and the threads that fill them."""

    def __init__(self, files: PretrainedFiles, *, cached: bool, pinned: bool) -> None:
        self.files = files
        self.flags = os.O_RDONLY | os.O_CLOEXEC | (0 if cached else DIRECT)
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
            if hasattr(os, "posix_fadvise") and not self.flags & DIRECT:  # not on macOS
                os.posix_fadvise(descriptor, read.begin, read.end - read.begin, os.POSIX_FADV_WILLNEED)
            waiting.append(
                (read, buffer, self.threads.submit(self._fill, read, buffer, descriptor=descriptor))
            )
        while waiting:
            self._empty(waiting.popleft())

    def _descriptor(self, file: str) -> int:
        if file not in self.open:
            path = self.files.directory / file
            try:
                self.open[file] = os.open(path, self.flags)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.flags &= ~DIRECT
                self.open[file] = os.open(path, self.flags)
        return self.open[file]

    def _fill(self, read: _Read, buffer: Tensor, *, descriptor: int) -> None:
        """The first byte of `buffer` is the one of the aligned block that `read` begins in."""
        at, end = _down(read.begin), _down(read.end + ALIGNMENT - 1)
        into = memoryview(cast(bytearray, buffer.numpy()))[: end - at]
        done = 0
        while at + done < read.end:
            most = into.nbytes if self.flags & DIRECT else done + _CACHED_BYTES
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
            if first % dtype.itemsize:  # the format does not promise it
                elements = elements.clone()
            move.take(elements.view(dtype))


def _buffer(*, pinned: bool) -> Tensor:
    """A mapping is aligned to pages, and so is what is pinned for a GPU."""
    size = BUFFER_BYTES + ALIGNMENT
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _down(offset: int) -> int:
    """To the begin of its aligned block."""
    return offset - offset % ALIGNMENT
