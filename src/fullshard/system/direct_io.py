"""Writing new files with direct I/O, which is fast and uses little processor time.

[Note: past the page cache] Bytes go to the disk directly (O_DIRECT). Large data whose memory pages align with
pages of the file is written in place. Other data is copied into aligned blocks, one of which is filled while
the other is written. The kernel's page cache would copy all bytes once more, and write them back in threads
that compete with training. That cost ten times the processor time per gigabyte, and slowed steps during a
save by half (bench/results/2026-11-20-checkpoints.md). If the file system rejects direct I/O, data goes
through the page cache in small calls, because large calls took three times as long. Its writeback starts
after each call; otherwise the flush at the end would wait for all of it.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from fullshard.system.files import atomic_replace_context, fsync_path

BLOCK_BYTES = 16 << 20
LARGE_BYTES = 1 << 20  # smallest size that gets a write, and an aligned layout, of its own
ALIGNMENT = 4096  # of addresses, offsets and lengths: a multiple of every disk's logical block
_CACHED_WRITE_BYTES = 256 << 10
DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
_BLOCKS = 2  # one is written while the other is filled


class DirectFileWriter(AbstractContextManager["DirectFileWriter"]):
    """Writes bytes in order into the new file `path`, through two blocks of memory of 16 MiB.

    Once the context ends without error, all bytes are on the disk. Raises FileExistsError if the file exists.
    Every method may raise OSError, also for bytes of an earlier write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        self._blocks: list[mmap.mmap] = []
        self._filled = self._turn = 0
        self._offset = 0  # of the block that is being filled
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush_to_disk()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            os.close(self._file)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes or copies all of `data`, which the caller may then change. Returns its size in bytes."""
        left = memoryview(data).cast("B")
        count = left.nbytes
        while left.nbytes:
            left = left[self._write_without_copy(left) or self._copy_into_block(left) :]
        return count

    def flush_to_disk(self) -> None:
        """Writes the copied bytes that are not written yet, and flushes the file to the disk."""
        self._wait_for_block_write()
        self._pwrite_buffers(self._unwritten_block_part(), self._offset)
        self._offset, self._filled = self._offset + self._filled, 0
        os.fsync(self._file)

    def _write_without_copy(self, data: memoryview) -> int:
        """Writes the start of `data` without a copy, if large and aligned. Returns the bytes written."""
        whole = min(_count_aligned_bytes(data), BLOCK_BYTES)
        aligned = (self._offset + self._filled) % ALIGNMENT == 0 and memory_address(data) % ALIGNMENT == 0
        if not (aligned and whole >= LARGE_BYTES and has_o_direct_flag(self._file)):
            return 0
        self._wait_for_block_write()
        # Bytes copied earlier go in the same call: another call costs the disk as much as a megabyte.
        self._pwrite_buffers([*self._unwritten_block_part(), data[:whole]], self._offset)
        self._offset, self._filled = self._offset + self._filled + whole, 0
        return whole

    def _copy_into_block(self, data: memoryview) -> int:
        """Copies as much of `data` as fits into the block. Returns the number of bytes copied."""
        part = data[: BLOCK_BYTES - self._filled]
        block = np.frombuffer(self._current_block(), dtype=np.uint8)
        # NumPy lets other threads run while it copies.
        np.copyto(block[self._filled : self._filled + part.nbytes], np.frombuffer(part, dtype=np.uint8))
        self._filled += part.nbytes
        if self._filled == BLOCK_BYTES:
            self._start_block_write()
        return part.nbytes

    def _current_block(self) -> mmap.mmap:
        if self._turn == len(self._blocks):
            self._blocks.append(allocate_aligned_memory(BLOCK_BYTES))
        return self._blocks[self._turn]

    def _unwritten_block_part(self) -> list[memoryview]:
        """Returns the copied bytes whose write has not started."""
        return [memoryview(self._current_block())[: self._filled]] if self._filled else []

    def _start_block_write(self) -> None:
        """Starts writing the block, once the write of the block before has ended."""
        self._wait_for_block_write()
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="write")
        self._writing = self._thread.submit(self._pwrite_buffers, self._unwritten_block_part(), self._offset)
        self._offset, self._filled = self._offset + self._filled, 0
        self._turn = (self._turn + 1) % _BLOCKS

    def _wait_for_block_write(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _pwrite_buffers(self, parts: list[memoryview], offset: int) -> None:
        """Writes `parts` in order from `offset` on. All except the last must consist of aligned blocks."""
        begin = offset
        while parts:
            enabled = has_o_direct_flag(self._file)
            direct = enabled and offset % ALIGNMENT == 0 and parts[0].nbytes >= ALIGNMENT
            if enabled and not direct:  # the end of a file, or a block that a full disk took in part
                clear_o_direct_flag(self._file)
            whole_blocks = [part[: _count_aligned_bytes(part)] for part in parts]
            given = whole_blocks if direct else [parts[0][:_CACHED_WRITE_BYTES]]
            try:
                count = os.pwritev(self._file, given, offset)
            except OSError as error:
                # EFAULT: memory that a device cannot read, such as another device's.
                if not direct or error.errno not in (errno.EINVAL, errno.EFAULT):
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                clear_o_direct_flag(self._file)
                continue
            if not count:
                raise OSError(errno.EIO, "the disk took nothing", str(self.path))
            parts, offset = _drop_leading_bytes(parts, count), offset + count
        if not has_o_direct_flag(self._file) and hasattr(os, "posix_fadvise"):
            # On Linux this advice starts their writeback, and frees the memory for others.
            os.posix_fadvise(self._file, begin, offset - begin, os.POSIX_FADV_DONTNEED)


@contextmanager
def open_atomic_replacement(path: Path) -> Generator[DirectFileWriter]:
    """Opens a new file that atomically replaces `path` when the block succeeds, flushed to the disk."""
    with atomic_replace_context(path) as draft, DirectFileWriter(draft) as file:
        yield file
    fsync_path(path.parent)


def open_direct(
    path: Path, flags: int, *, mode: int = 0o666, opener: Callable[[Path, int, int], int] | None = None
) -> int:
    """Opens a file with direct I/O if the file system supports it. Returns the descriptor."""
    opener = opener or os.open
    try:
        return opener(path, flags | DIRECT, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if flags & os.O_EXCL:  # the file may have been created, by this call: another's would not be EINVAL
        path.unlink(missing_ok=True)
    return opener(path, flags, mode)


def has_o_direct_flag(descriptor: int) -> bool:
    """Returns True if reads and writes of an open file bypass the page cache."""
    return bool(DIRECT and fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)


def clear_o_direct_flag(descriptor: int) -> None:
    """Makes later reads and writes of an open file use the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~DIRECT)


def allocate_aligned_memory(size_bytes: int) -> mmap.mmap:
    """Allocates zeroed memory that begins at a page boundary and is freed with its last reference.

    The memory uses huge pages if the system has them, because a disk's driver looks up each page.
    Forked processes do not inherit the memory: after a fork, each write would first copy a page.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # Linux
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return memory


def memory_address(data: bytes | bytearray | memoryview) -> int:
    """Returns the memory address of `data`, which must not be empty."""
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


def _count_aligned_bytes(data: memoryview) -> int:
    """Returns the size of `data` in bytes, rounded down to a multiple of ALIGNMENT."""
    return data.nbytes - data.nbytes % ALIGNMENT


def _drop_leading_bytes(parts: list[memoryview], count: int) -> list[memoryview]:
    """Returns `parts` without their first `count` bytes."""
    left: list[memoryview] = []
    for part in parts:
        if count < part.nbytes:
            left.append(part[count:])
        count = max(0, count - part.nbytes)
    return left
