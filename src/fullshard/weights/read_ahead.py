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
from fullshard.system.direct_io import ALIGNMENT, has_o_direct_flag, open_direct
from fullshard.weights.files import PretrainedFiles
from fullshard.weights.strided import GAP_BYTES, StridedCopy, split_copy

BUFFER_BYTES = 8 << 20
_THREADS = 2  # threads that wait for the disk
_BUFFERS = _THREADS + 2  # one per thread, one being emptied, and one full, so that no thread waits
# Bytes per read through the page cache: data in the processor's own cache is copied faster.
_CACHED_BYTES = 1 << 20


@dataclass
class _FileRead:
    """A read of bytes `begin` to `end` of a file.

    moves: (first byte in the file, copy) of each copy out of the range
    """

    file: str
    begin: int
    end: int
    moves: list[tuple[int, StridedCopy]] = field(default_factory=list[tuple[int, StridedCopy]])


def copy_from_files(moves: Iterable[StridedCopy], files: PretrainedFiles, *, cached: bool) -> int:
    """Fills the targets of `moves` from `files`. Returns the number of bytes read.

    `cached` reads through the page cache, for bytes that other ranks read too. Uses four buffers of 8 MiB.
    Raises DamagedCheckpointError for a file that ends early; OSError.
    """
    moves = list(moves)
    reads = _merge_copies_into_reads(moves, files)
    pinned = any(move.target.is_cuda for move in moves)
    with _ReadAheadReader(files, cached=cached, pinned=pinned) as reader, torch.no_grad():
        reader.run_reads(reads)
    return sum(read.end - read.begin for read in reads)


def _merge_copies_into_reads(moves: Iterable[StridedCopy], files: PretrainedFiles) -> list[_FileRead]:
    """Returns the reads for `moves`, in order of file and byte. Neighbouring copies share one read."""
    placed: list[tuple[str, int, int, StridedCopy]] = []
    for move in moves:
        tensor = files.tensors[move.source]
        itemsize = tensor.dtype.itemsize
        for piece in split_copy(move, most=(BUFFER_BYTES - ALIGNMENT) // itemsize, itemsize=itemsize):
            begin = tensor.begin + piece.begin * itemsize
            placed.append((tensor.file, begin, begin + piece.span_length * itemsize, piece))
    placed.sort(key=lambda one: one[:3])
    reads: list[_FileRead] = []
    for file, begin, end, move in placed:
        if not reads or not _can_join_read(reads[-1], file, begin=begin, end=end):
            reads.append(_FileRead(file, begin, end))
        reads[-1].end = max(reads[-1].end, end)
        reads[-1].moves.append((begin, move))
    return reads


def _can_join_read(read: _FileRead, file: str, *, begin: int, end: int) -> bool:
    """Returns True if `read` can include bytes `begin` to `end` of `file`: near enough, within one buffer."""
    fits = max(end, read.end) - _round_down_to_alignment(read.begin) <= BUFFER_BYTES
    return read.file == file and fits and begin - read.end <= GAP_BYTES


class _ReadAheadReader:
    """Runs reads on threads, with the open files and the buffers that the threads fill."""

    def __init__(self, files: PretrainedFiles, *, cached: bool, pinned: bool) -> None:
        self.files = files
        self.cached = cached
        self.open: dict[str, int] = {}
        self.buffers = [_allocate_buffer(pinned=pinned) for _ in range(_BUFFERS)]
        self.threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="read")

    def __enter__(self) -> "_ReadAheadReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        for descriptor in self.open.values():
            os.close(descriptor)

    def run_reads(self, reads: Iterable[_FileRead]) -> None:
        waiting: deque[tuple[_FileRead, Tensor, Future[None]]] = deque()
        for turn, read in enumerate(reads):
            if len(waiting) == _BUFFERS:
                self._copy_out_of_buffer(waiting.popleft())
            buffer = self.buffers[turn % _BUFFERS]
            descriptor = self._open_descriptor(read.file)
            if hasattr(os, "posix_fadvise") and self.cached:  # not on macOS
                os.posix_fadvise(descriptor, read.begin, read.end - read.begin, os.POSIX_FADV_WILLNEED)
            filled = self.threads.submit(self._fill_buffer, read, buffer, descriptor=descriptor)
            waiting.append((read, buffer, filled))
        while waiting:
            self._copy_out_of_buffer(waiting.popleft())

    def _open_descriptor(self, file: str) -> int:
        if file not in self.open:
            path = self.files.directory / file
            opener = os.open if self.cached else open_direct
            self.open[file] = opener(path, os.O_RDONLY | os.O_CLOEXEC)
            self.cached = self.cached or not has_o_direct_flag(self.open[file])
        return self.open[file]

    def _fill_buffer(self, read: _FileRead, buffer: Tensor, *, descriptor: int) -> None:
        """Reads the aligned blocks that contain the bytes of `read` into `buffer`."""
        at, end = _round_down_to_alignment(read.begin), _round_down_to_alignment(read.end + ALIGNMENT - 1)
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

    def _copy_out_of_buffer(self, one: tuple[_FileRead, Tensor, Future[None]]) -> None:
        read, buffer, filled = one
        filled.result()
        for begin, move in read.moves:
            dtype = self.files.tensors[move.source].dtype
            first = begin - _round_down_to_alignment(read.begin)
            elements = buffer[first : first + move.span_length * dtype.itemsize]
            if first % dtype.itemsize:  # the format does not guarantee alignment
                elements = elements.clone()
            move.fill_target(elements.view(dtype))


def _allocate_buffer(*, pinned: bool) -> Tensor:
    """Returns a page-aligned buffer of BUFFER_BYTES and one more block, pinned on request."""
    size = BUFFER_BYTES + ALIGNMENT
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def _round_down_to_alignment(offset: int) -> int:
    """Rounds an offset in a file down to a multiple of ALIGNMENT."""
    return offset - offset % ALIGNMENT
