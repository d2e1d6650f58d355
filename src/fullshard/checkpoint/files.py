"""Files of one checkpoint, on any kind of storage."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol, Self, TypeVar, cast

from fullshard.checkpoint.digests import KeyFile
from fullshard.distributed.agreement import Group, agreed, gathered, on_rank_zero, rank
from fullshard.quantities import format_bytes
from fullshard.spec.value import FrozenModel
from fullshard.system.direct_io import StreamedFile
from fullshard.system.files import flush, open_regular
from fullshard.system.process import boot_id, is_running, pid_namespace

T = TypeVar("T")

MANIFEST = "manifest.json"
WRITER = "writer.json"
SMALL_BYTES = 1 << 30
"""Largest size of a file that describes others: some hundred megabytes for ten thousand ranks."""

_READ_BYTES, _AHEAD_BYTES = 1 << 20, 16 << 20


class Files(Protocol):
    """Files of one checkpoint, complete or being written. Every method may raise OSError.

    The value is pickled and sent to other ranks. `str()` gives a path or URL that users can pass back.
    """

    @property
    def name(self) -> str:
        """Last part of the checkpoint's path or URL."""
        ...

    @property
    def key(self) -> KeyFile | None:
        """Key that signs a saved manifest and must have signed a loaded one, or None for no signatures."""
        ...

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each regular file by name."""
        ...

    def read(self, name: str) -> bytes:
        """Returns all bytes of a small file."""
        ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a file for reading, with `seek` and `readinto`."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a new file for writing. It is on the disk once the context ends without error."""
        ...


class _ReadAhead(FileIO):
    """A file read sequentially and unbuffered, in large parts, while the disk fetches the following ones."""

    def readinto(self, buffer: memoryview) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if hasattr(os, "posix_fadvise"):  # not on macOS
            behind = self.tell() + buffer.nbytes
            os.posix_fadvise(self.fileno(), behind, _AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return super().readinto(buffer[:_READ_BYTES])  # callers read until they have all bytes


class WriterProcess(FrozenModel):
    """Identity of the process that writes a checkpoint, for checking later if it still runs.

    A pid is valid only until the machine is booted again (`boot`), and in one pid namespace.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int

    @classmethod
    def this(cls) -> Self:
        return cls(host=socket.gethostname(), boot=boot_id(), pid_namespace=pid_namespace(), pid=os.getpid())

    def is_dead(self) -> bool:
        """Returns True if the process is certainly dead; False if it runs, or if this machine cannot know."""
        here = self == WriterProcess.this().model_copy(update={"pid": self.pid})
        return here and not is_running(self.pid)


@dataclass(frozen=True)
class DiskGroup:
    """The ranks that save to the same disk or store as this rank; by default all ranks.

    leader: rank that does what is done once per disk
    node: index of the disk; None for a location that all ranks share
    nodes: number of disks
    attempt: id for the next save, which several disks commit together; None for a shared location
    complete_steps: steps that are on all disks; None for a location that all ranks share
    """

    leader: int = 0
    node: int | None = None
    nodes: int = 1
    attempt: str | None = None
    complete_steps: frozenset[int] | None = None

    @property
    def is_leader(self) -> bool:
        return self.leader == rank()

    def on_leader(self, act: Callable[[], T], *, doing: str, group: Group = None) -> T:
        """Runs `act()` on the leader of every disk, and returns the leader's result on each rank of the disk.

        Collective. The result is pickled. Raises CheckpointError on all ranks if a leader failed.
        """
        if self.nodes == 1:
            return on_rank_zero(act, doing=doing, group=group)
        with agreed(doing, group=group):
            results = [act()] if self.is_leader else []
        return gathered(results, group=group)[self.leader][0]


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
        with StreamedFile(self.path / name) as file:
            yield cast(BinaryIO, file)
        flush(self.path)


def write_file(files: Files, name: str, *, data: bytes) -> None:
    """Writes a new file, and flushes it to the disk."""
    with files.create(name) as file:
        file.write(data)


def is_remote(directory: str) -> bool:
    """Returns whether `directory` is a URL, except a `file://` URL."""
    return "://" in directory and not directory.startswith("file://")


def is_lost(error: OSError) -> bool:
    """Returns whether an error shows that a file's bytes are lost, or that it is a link, directory or device.

    A missing file does not count: other ranks may find it.
    """
    return error.errno in (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENXIO)
