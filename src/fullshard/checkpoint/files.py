"""The files of one checkpoint, wherever they lie."""

import errno
import os
import stat
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from fullshard.checkpoint.digests import KeyFile
from fullshard.quantities import format_bytes
from fullshard.system import disk
from fullshard.system.files import open_regular

MANIFEST = "manifest.json"
SMALL_BYTES = 1 << 30
"""What a file that describes others has at most: of ten thousand ranks, some hundred megabytes."""

_READ_BYTES, _AHEAD_BYTES = 1 << 20, 16 << 20


class Files(Protocol):
    """The files of one checkpoint, whole or being written. Every method may raise OSError.

    A value that can be sent to other ranks (pickled). `str()` is what people are shown and can give back.
    """

    @property
    def name(self) -> str:
        """The last part of the path."""
        ...

    @property
    def key(self) -> KeyFile | None:
        """The key that the checkpoint is signed with, or has to be."""
        ...

    def sizes(self) -> dict[str, int]:
        """File name -> bytes; empty where there is nothing. Lists regular files alone."""
        ...

    def read(self, name: str) -> bytes:
        """All of a small file."""
        ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file to read from: `seek` and `readinto`."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A file that must not be there yet; it is down to the disk when the block ends well."""
        ...


class _ReadAhead(FileIO):
    """A file that is read in large parts, one after the other: meanwhile the disk fetches the next.

    Unbuffered, since what reads asks for whole blocks.
    """

    def readinto(self, buffer: memoryview) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if hasattr(os, "posix_fadvise"):  # not on macOS
            behind = self.tell() + buffer.nbytes
            os.posix_fadvise(self.fileno(), behind, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return super().readinto(buffer[:_READ_BYTES])  # who asks goes on until it has all


@dataclass(frozen=True)
class LocalFiles:
    """A directory on a file system."""

    path: Path
    key: KeyFile | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        if not self.path.is_dir():
            return {}
        found = {path.name: path.lstat() for path in sorted(self.path.iterdir())}
        return {name: status.st_size for name, status in found.items() if stat.S_ISREG(status.st_mode)}

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > SMALL_BYTES:
                what = f"it has {format_bytes(size)}, more than {format_bytes(SMALL_BYTES)}"
                raise OSError(errno.EFBIG, what, str(self.path / name))
            return file.read(size)

    @contextmanager
    def open(self, name: str) -> Generator[BinaryIO]:
        with _ReadAhead(self.path / name, opener=open_regular) as file:
            yield cast(BinaryIO, file)

    @contextmanager
    def create(self, name: str) -> Generator[BinaryIO]:
        path = self.path / name
        with disk.create_durable(path) as file:
            yield cast(BinaryIO, file)
        disk.flush(self.path)


def write_file(files: Files, name: str, *, data: bytes) -> None:
    """Writes a new file, down to the disk."""
    with files.create(name) as file:
        file.write(data)


def is_remote(directory: str) -> bool:
    """Whether it is a URL, of anything but the local file system."""
    return "://" in directory and not directory.startswith("file://")


def is_lost(error: OSError) -> bool:
    """Whether the bytes are gone for good: the disk says so, or something else is there, such as a link.

    A file that one rank cannot find, others may.
    """
    return error.errno in (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENXIO)
