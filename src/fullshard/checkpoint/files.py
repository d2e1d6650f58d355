"""Files of one checkpoint, on any kind of storage."""

import errno
import json
import os
import socket
import stat
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from fullshard.quantities import format_bytes
from fullshard.system.direct_io import DirectFileWriter
from fullshard.system.files import open_regular_file
from fullshard.system.object_store import ObjectStore, open_object
from fullshard.system.small_files import VALUE_BYTES, parse_json

MANIFEST = "manifest.json"
WRITER = "writer.json"  # the first file of a draft
# S3 accepts 10,000 parts, so a file of one rank may have up to 625 GiB.
PART_BYTES = 64 << 20
SMALL_BYTES = 1 << 30  # limit for tables and indexes of shards; those of format 2 may have some hundred MB
_READ_BYTES, _AHEAD_BYTES = 1 << 20, 16 << 20


class CheckpointFiles(Protocol):
    """Files of one checkpoint, complete or being written. Every method may raise OSError.

    The value is pickled and sent to other ranks. `str()` gives a path or URL that users can pass back.
    """

    @property
    def name(self) -> str:
        """Last part of the checkpoint's path or URL."""
        ...

    def file_sizes_bytes(self) -> dict[str, int]:
        """Returns the size in bytes of each regular file by name."""
        ...

    def read_file(self, name: str, *, begin: int = 0) -> bytes:
        """Returns all bytes of a small file, or those of any file from `begin` on."""
        ...

    def open_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a file for reading, with `seek` and `readinto`."""
        ...

    def create_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a new file for writing. Its bytes are on the disk once the context ends without error.

        On a file system, its name is once the directory is flushed, as a commit does for all files at once.
        """
        ...


class _KernelReadAheadFile(FileIO):
    """A file read sequentially and unbuffered, in large parts, while the disk fetches the following ones."""

    def readinto(self, buffer: memoryview) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if hasattr(os, "posix_fadvise"):  # not on macOS
            behind = self.tell() + buffer.nbytes
            os.posix_fadvise(self.fileno(), behind, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return super().readinto(buffer[:_READ_BYTES])  # callers read until they have all bytes


@dataclass(frozen=True)
class LocalFiles:
    """A directory on a file system."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def file_sizes_bytes(self) -> dict[str, int]:
        if not self.path.is_dir():
            return {}
        found: dict[str, int] = {}
        for path in sorted(self.path.iterdir()):
            with suppress(FileNotFoundError):  # a live writer removed it after it was listed
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    found[path.name] = status.st_size
        return found

    def read_file(self, name: str, *, begin: int = 0) -> bytes:
        with self.open_file(name) as file:
            size = os.fstat(file.fileno()).st_size - file.seek(begin)
            if size > (most := VALUE_BYTES if name == MANIFEST else SMALL_BYTES):
                what = f"it has {format_bytes(size)}, more than {format_bytes(most)}"
                raise OSError(errno.EFBIG, what, str(self.path / name))
            return file.read(size)

    def open_file(self, name: str) -> BinaryIO:
        return cast(BinaryIO, _KernelReadAheadFile(self.path / name, opener=open_regular_file))

    def create_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        return cast(AbstractContextManager[BinaryIO], DirectFileWriter(self.path / name))


@dataclass(frozen=True)
class ObjectFiles:
    """Files of a checkpoint in an object store, or of one attempt to save it. Layout: see `objects`.

    The store's library sends an object in parts, with the checksums that the store compares.

    url: prefix of the step
    attempt: id of the attempt; None for the committed checkpoint
    part_bytes: bytes sent per request; a part and a copy of it are in memory while a file is written
    """

    url: str
    attempt: str | None = None
    part_bytes: int = PART_BYTES

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url if self.attempt is None else f"{self.url}/{self.attempt}"

    def file_sizes_bytes(self) -> dict[str, int]:
        if self.attempt is not None:
            return self.store.list_prefix(self._attempt_prefix_url).object_sizes_bytes
        own = self.store.list_prefix(self.url).object_sizes_bytes
        if MANIFEST not in own or self._attempt_prefix_url == self.url:
            return own
        below = self.store.list_prefix(self._attempt_prefix_url).object_sizes_bytes
        return {**below, MANIFEST: own[MANIFEST]}

    def read_file(self, name: str, *, begin: int = 0) -> bytes:
        return self.store.read_object(self._file_url(name), begin=begin or None)

    def open_file(self, name: str) -> BinaryIO:
        return open_object(self.store, self._file_url(name))

    def create_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        return self.store.open_for_writing(self._file_url(name), part_bytes=self.part_bytes)

    @property
    def store(self) -> ObjectStore:
        return ObjectStore(self.url)

    def _file_url(self, name: str) -> str:
        committed = name == MANIFEST and self.attempt is None
        return f"{self.url if committed else self._attempt_prefix_url}/{name}"

    @cached_property
    def _attempt_prefix_url(self) -> str:
        """URL of the prefix of the attempt's files: `url` itself if they were copied from a file system."""
        attempt = self.attempt or attempt_id_in_manifest(self.read_file(MANIFEST))
        below = self.attempt is not None or attempt in self.store.list_prefix(self.url).prefixes
        return f"{self.url}/{attempt}" if below else self.url


def attempt_id_in_manifest(manifest: bytes) -> str | None:
    """Returns the attempt id in the bytes of a manifest, or None if the files are beside the manifest.

    Returns "unknown", which is not the id of any attempt, for a damaged manifest.
    """
    try:
        attempt: Any = parse_json(manifest).get("attempt")
    except (ValueError, AttributeError):
        return "unknown"
    return attempt if isinstance(attempt, str | None) else "unknown"


def write_process_name(draft: CheckpointFiles) -> bytes:
    """Writes the first file of a draft, which names the process that saves it. Returns its bytes."""
    data = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    write_file(draft, WRITER, data=data)
    return data


def write_file(files: CheckpointFiles, name: str, *, data: bytes) -> None:
    """Writes a new file, and flushes its bytes to the disk."""
    with files.create_file(name) as file:
        file.write(data)
