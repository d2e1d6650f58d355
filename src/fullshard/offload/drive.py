"""A file of fixed size on a drive, read and written in place, bypassing the page cache.

[Note: past the page cache] Bytes move directly between the drive and buffers of this process (O_DIRECT). The
kernel's page cache would copy them a second time, hold memory that training needs, and write back at its own
pace. So all transfers are of whole blocks of 4 KiB, in the file and in memory. On a file system without
direct I/O, small transfers go through the page cache, and its pages are released at once.
"""

import errno
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median_low
from typing import Self

from fullshard.errors import DamagedOffloadError, OffloadError
from fullshard.quantities import format_bytes
from fullshard.spec.records.measurement import DriveTrafficBytes
from fullshard.system import direct_io
from fullshard.system.files import atomic_replace_context, free_disk_bytes, os_error_why_and_fix

logger = logging.getLogger("fullshard")

_ZEROS_BYTES = 1 << 20
_CACHED_BYTES = 256 << 10
_COUNTED_STEPS = 1000
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
CHECK_DRIVE = "another drive for offload.path, and a look at the system's log"
_SETTING = "offload.path = a directory"
_START_AGAIN = "--resume, which skips damaged files and resumes from the newest complete step"
_UNREADABLE = (errno.EIO, errno.ENODATA)  # linux/block: errors of a transfer, and of the medium


Transfer = Callable[[int, Sequence[memoryview], int], int]  # as os.preadv and os.pwritev


def _posix_fallocate(descriptor: int, offset: int, length: int) -> None:  # signature: os.posix_fallocate
    if not hasattr(os, "posix_fallocate"):  # macOS
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    os.posix_fallocate(descriptor, offset, length)


@dataclass(frozen=True)
class DriveSystemCalls:
    """Operating system calls that access a drive. Tests replace some, to simulate a failing drive."""

    open: Callable[[Path, int, int], int] = os.open
    preadv: Transfer = os.preadv
    pwritev: Transfer = os.pwritev
    fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)
    fsync: Callable[[int], None] = os.fsync  # of directories
    posix_fallocate: Callable[[int, int, int], None] = _posix_fallocate
    free_bytes: Callable[[Path], int] = free_disk_bytes


SYSTEM = DriveSystemCalls()


class DriveCounters:
    """Counts the bytes read and written per step in files opened with `wrap_system_calls(system)`.

    steps: bytes of each of the last thousand steps, counted from the step's update to the next update
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: Counter[str] | None = None  # None: before the first update
        self.steps: deque[DriveTrafficBytes] = deque(maxlen=_COUNTED_STEPS)

    def wrap_system_calls(self, system: DriveSystemCalls) -> DriveSystemCalls:
        """Returns `system` with `preadv` and `pwritev` that count the bytes they transfer."""
        read = partial(self._transfer_and_count_bytes, system.preadv, "read")
        write = partial(self._transfer_and_count_bytes, system.pwritev, "written")
        return replace(system, preadv=read, pwritev=write)

    def mark_update_start(self) -> None:
        """Marks the start of an update. All reads and writes of the previous update must have finished."""
        with self._lock:
            if self._moved is not None:
                self.steps.append(DriveTrafficBytes(read=self._moved["read"], written=self._moved["written"]))
            self._moved = Counter()

    def median_step_bytes(self) -> DriveTrafficBytes | None:
        """Returns the medians of bytes read and written per step; None before the second update."""
        if not self.steps:
            return None
        read, written = (median_low(getattr(one, kind) for one in self.steps) for kind in ("read", "written"))
        return DriveTrafficBytes(read=read, written=written)

    def _transfer_and_count_bytes(  # signature: the system call's, after the bound arguments
        self, transfer: Transfer, kind: str, descriptor: int, buffers: Sequence[memoryview], offset: int
    ) -> int:
        count = transfer(descriptor, buffers, offset)
        with self._lock:
            if self._moved is not None:
                self._moved[kind] += count
        return count


def offload_error_from_os_error(
    what: str, error: OSError, *, where: str = "", kind: type[OffloadError] = OffloadError
) -> OffloadError:
    """Returns the OffloadError for an OSError: `what` failed, `where`, the reason, and the fix."""
    why, fix = os_error_why_and_fix(error, directory=_SETTING)
    if error.errno == errno.ENOENT:
        why, fix = "it is not there, and the file system does not make it", f"{_SETTING} that can be written"
    why, fix = why or "the operating system says no more", fix or CHECK_DRIVE
    name = errno.errorcode.get(error.errno or 0, "no errno")
    where = where or str(error.filename or "")
    return kind(what, got=f"{error.strerror or error} ({name}){where and f', {where}'}", why=why, fix=fix)


@contextmanager
def translate_os_errors(what: str, *, where: str = "") -> Generator[None]:
    """Raises the OffloadError of `offload_error_from_os_error` for an OSError in the context."""
    try:
        yield
    except OSError as error:
        raise offload_error_from_os_error(what, error, where=where) from error


class DriveFile(AbstractContextManager["DriveFile"]):
    """A file of a fixed size, `size_bytes`, which is a multiple of 4096. See [Note: past the page cache].

    `read` and `write` transfer all bytes or raise, and release the GIL. Several threads may access different
    blocks of 4 KiB at once. Address, offset and length of each transfer must be multiples of 4096.

    Every error is an OffloadError, and a DamagedOffloadError if the drive has lost written bytes.
    """

    def __init__(self, path: Path, size_bytes: int, *, descriptor: int, system: DriveSystemCalls) -> None:
        """Wraps an open descriptor. Use `open_or_create` or `open` instead."""
        self.path, self.size_bytes = path, size_bytes
        self._descriptor, self._system = descriptor, system
        self._leaving = threading.Lock()
        self.direct = direct_io.has_o_direct_flag(descriptor)
        if not self.direct:
            _warn_no_direct_io(path.parent)

    @classmethod
    def open_or_create(cls, path: Path, size_bytes: int, *, system: DriveSystemCalls = SYSTEM) -> Self:
        """Creates the file with all of its space allocated, so that a full drive fails here, not mid-run.

        An existing file of this size is opened and keeps its content. Raises OffloadError if an existing file
        has another size, or if there is no room; then no new file is left behind.
        """
        assert size_bytes > 0, "a file of no bytes holds nothing"
        assert size_bytes % direct_io.ALIGNMENT == 0, "the last block would be a part of one"
        where = f"{format_bytes(size_bytes)} to allocate"
        with translate_os_errors(f"{path} cannot be made.", where=where):
            if not os.path.lexists(path):
                allocate_file(path, size_bytes, system=system)
        return cls.open(path, size_bytes, system=system)

    @classmethod
    def open(cls, path: Path, size_bytes: int, *, system: DriveSystemCalls = SYSTEM) -> Self:
        """Opens an existing file. Raises DamagedOffloadError if it is missing or of another size."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        with translate_os_errors(f"{path} cannot be opened."):
            try:
                descriptor = direct_io.open_direct(path, flags, mode=0o600, opener=system.open)
            except FileNotFoundError as error:
                why = "something else removed it"
                raise DamagedOffloadError(f"{path} is missing.", why=why, fix=_START_AGAIN) from error
        found = os.fstat(descriptor).st_size
        if found != size_bytes:
            os.close(descriptor)
            raise _wrong_size_error(path, found=found, expected=size_bytes)
        return cls(path, size_bytes, descriptor=descriptor, system=system)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file without flushing. No thread may still use it. Later calls do nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def flush(self) -> None:
        """Flushes all earlier writes to the drive. After an error, none of these writes is certain."""
        with translate_os_errors(f"{self.path} cannot be flushed to its drive."):
            self._system.fdatasync(self._descriptor)

    def read(self, target: memoryview, offset: int) -> None:
        """Fills `target` with the bytes from `offset` on. Raises DamagedOffloadError if they are lost."""
        self._transfer_all(self._system.preadv, target, offset=offset, doing="read")

    def write(self, data: memoryview, offset: int) -> None:
        """Writes all of `data` at `offset`. `data` must not change until this returns."""
        self._transfer_all(self._system.pwritev, data, offset=offset, doing="written")

    def _transfer_all(self, transfer: Transfer, data: memoryview, *, offset: int, doing: str) -> None:
        """Transfers all of `data`, or raises OffloadError. Turns direct I/O off if the file refuses it."""
        self._check_range(data, offset=offset, doing=doing)
        begin, left = offset, data.cast("B")
        while left.nbytes:
            direct = self.direct
            try:
                count = transfer(self._descriptor, [left if direct else left[:_CACHED_BYTES]], offset)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # the file system takes O_DIRECT only at `open`
                    self._disable_direct_io()
                    continue
                lost = doing == "read" and error.errno in _UNREADABLE
                raise offload_error_from_os_error(
                    f"{self.path} cannot be {doing}.",
                    error,
                    where=f"{format_bytes(left.nbytes)} at offset {offset}",
                    kind=DamagedOffloadError if lost else OffloadError,
                ) from error
            if not count:
                raise self._no_progress_error(doing, offset=offset)
            if direct and count % direct_io.ALIGNMENT:  # the file system ended a transfer within a block
                count -= count % direct_io.ALIGNMENT
                if not count:
                    self._disable_direct_io()
            left, offset = left[count:], offset + count
        if not self.direct and hasattr(os, "posix_fadvise"):  # releases the pages, and starts their writeback
            os.posix_fadvise(self._descriptor, begin, data.nbytes, os.POSIX_FADV_DONTNEED)

    def _check_range(self, data: memoryview, *, offset: int, doing: str) -> None:
        if offset < 0 or offset + data.nbytes > self.size_bytes:
            raise OffloadError(
                f"bytes past the end of {self.path} were to be {doing}.",
                got=f"{data.nbytes} bytes at offset {offset} of {self.size_bytes}",
                why="the file has the size that was planned, and never another",
            )
        is_aligned = not (
            offset % direct_io.ALIGNMENT
            or data.nbytes % direct_io.ALIGNMENT
            or direct_io.memory_address(data) % direct_io.ALIGNMENT
        )
        assert is_aligned, "transfers are of whole blocks, from memory that begins at a page"

    def _no_progress_error(self, doing: str, *, offset: int) -> OffloadError:
        found = os.fstat(self._descriptor).st_size
        if doing == "read" or found != self.size_bytes:
            return _wrong_size_error(self.path, found=found, expected=self.size_bytes, offset=offset)
        nothing = OSError(errno.EIO, "the drive took nothing")
        return offload_error_from_os_error(f"{self.path} cannot be written.", nothing)

    def _disable_direct_io(self) -> None:
        with self._leaving:
            direct_io.clear_o_direct_flag(self._descriptor)
            self.direct = False
        _warn_no_direct_io(self.path.parent)


def allocate_file(path: Path, size_bytes: int, *, system: DriveSystemCalls) -> None:
    """Creates a file of zeros with all of its space allocated on the drive. Raises OSError.

    It is allocated under a temporary name and renamed at the end, so that a crash leaves no partial file.
    """
    with atomic_replace_context(path, draft=path.with_name(f".{path.name}.tmp")) as draft:
        # Not direct: where the C library allocates by writing single bytes, those are not aligned.
        descriptor = system.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _fallocate_or_write_zeros(descriptor, size_bytes, system=system)
            system.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def _fallocate_or_write_zeros(descriptor: int, size_bytes: int, *, system: DriveSystemCalls) -> None:
    try:
        system.posix_fallocate(descriptor, 0, size_bytes)
        return
    except OSError as error:
        if error.errno not in _NO_ALLOCATION:
            raise
    zeros = memoryview(bytes(_ZEROS_BYTES))
    for offset in range(0, size_bytes, _ZEROS_BYTES):
        write_all(descriptor, zeros[: size_bytes - offset], offset=offset, system=system)


def write_all(descriptor: int, data: memoryview, *, offset: int, system: DriveSystemCalls) -> None:
    """Writes all of `data` at `offset`. Raises OSError. Python repeats a call that a signal interrupts."""
    while data.nbytes:
        if not (count := system.pwritev(descriptor, [data], offset)):
            raise OSError(errno.EIO, "the drive took nothing")
        data, offset = data[count:], offset + count


@cache  # once per directory
def _warn_no_direct_io(directory: Path) -> None:
    logger.warning(
        "%s has no direct I/O: offloaded state passes through the page cache, which costs processor "
        "time and memory. A local ext4 or XFS file system has it",
        directory,
    )


def _wrong_size_error(path: Path, *, found: int, expected: int, offset: int | None = None) -> OffloadError:
    where = "" if offset is None else f"; bytes at offset {offset} were asked for"
    return DamagedOffloadError(
        f"{path} is truncated." if found < expected else f"{path} is not of the size that was planned.",
        got=f"{found} bytes, {expected} expected{where}",
        why="its size never changes: something else wrote it, or its file system was damaged",
        fix=_START_AGAIN,
    )
