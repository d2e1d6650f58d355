"""A new file, written as fast as its disk takes it and with little work for the processor.

[Note: past the page cache] Bytes go to the disk from aligned blocks of our own (O_DIRECT), while the next
block is filled. The kernel's cache would copy them a second time, in pages that it must find, and write them
back in threads that compete with training: a gigabyte cost ten times the processor time, and steps beside a
save were slowed by half. bench/results/2026-11-20-checkpoints.md has the figures. What a file system does
not take that way goes through its cache: in small writes, for large ones took three times as long, and
written back while the next are made, else the flush at the end waits for all that was gathered.
"""

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

BLOCK_BYTES = 16 << 20
ALIGNMENT = 4096  # of addresses, offsets and lengths: what every disk's logical block divides
_CACHED_WRITE_BYTES = 256 << 10
DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
_BLOCKS = 2  # one is written while the other is filled


class StreamedFile:
    """Bytes in order into a file that must not be there yet. Memory: two blocks of 16 MiB.

    `finish` returns when all are down to the disk; without it the file is no whole one. Every method may
    raise OSError, also for what was written before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _opened(path)
        self._blocks: list[mmap.mmap] = []
        self._filled = self._turn = 0
        self._offset = 0  # of the block that is being filled
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        os.close(self._file)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """All of `data`, which may be changed afterwards. Returns its bytes."""
        left = memoryview(data).cast("B")
        count = left.nbytes
        while left.nbytes:
            part = left[: BLOCK_BYTES - self._filled]
            left = left[part.nbytes :]
            block = np.frombuffer(self._block(), dtype=np.uint8)
            # NumPy lets other threads run while it copies.
            np.copyto(block[self._filled : self._filled + part.nbytes], np.frombuffer(part, dtype=np.uint8))
            self._filled += part.nbytes
            if self._filled == BLOCK_BYTES:
                self._send()
        return count

    def finish(self) -> None:
        """Writes what is left, and flushes all of it to the disk."""
        self._wait()
        if self._filled:
            self._put(memoryview(self._block())[: self._filled], self._offset)
            self._offset, self._filled = self._offset + self._filled, 0
        os.fsync(self._file)

    def _block(self) -> mmap.mmap:
        if self._turn == len(self._blocks):
            self._blocks.append(mmap.mmap(-1, BLOCK_BYTES))  # a mapping is aligned to pages
        return self._blocks[self._turn]

    def _send(self) -> None:
        """The full block to the disk, once the one before is there."""
        self._wait()
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="write")
        self._writing = self._thread.submit(self._put, memoryview(self._block()), self._offset)
        self._offset, self._filled = self._offset + BLOCK_BYTES, 0
        self._turn = (self._turn + 1) % _BLOCKS

    def _wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _put(self, data: memoryview, offset: int) -> None:
        """All of `data`, though one call may write less. See [Note: past the page cache]."""
        begin, length = offset, data.nbytes
        while data.nbytes:
            direct = self._is_direct and offset % ALIGNMENT == 0 and data.nbytes >= ALIGNMENT
            if self._is_direct and not direct:  # the end of a file, or what a full disk took of a block
                self._leave_direct()
            whole = data.nbytes - data.nbytes % ALIGNMENT if direct else _CACHED_WRITE_BYTES
            try:
                count = os.pwrite(self._file, data[:whole], offset)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise _named(error, self.path) from error
                self._leave_direct()
                continue
            data, offset = data[count:], offset + count
        if not self._is_direct and hasattr(os, "posix_fadvise"):
            # That they are not needed begins to write them back (Linux), and leaves memory to others.
            os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_DONTNEED)

    @property
    def _is_direct(self) -> bool:
        return bool(DIRECT and fcntl.fcntl(self._file, fcntl.F_GETFL) & DIRECT)

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~DIRECT)


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # The file system has no direct writing; it may have made the file, which nobody else did: O_EXCL.
    path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666)


def _named(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror, str(path))
