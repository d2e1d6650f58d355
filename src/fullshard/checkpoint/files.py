"""Files of one checkpoint, on any kind of storage."""

import errno
import os
import socket
import stat
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Protocol, Self, TypeVar, cast

from fullshard.distributed.agreement import (
    Group,
    all_gather_object,
    raise_on_all_ranks,
    rank,
    run_on_rank_zero,
)
from fullshard.quantities import format_bytes
from fullshard.spec.value import FrozenModel
from fullshard.system.direct_io import DirectFileWriter
from fullshard.system.files import fsync_path, open_regular_file
from fullshard.system.process import boot_id, is_process_running, pid_namespace

T = TypeVar("T")

MANIFEST = "manifest.json"
WRITER = "writer.json"
_SMALL_BYTES = 1 << 30  # limit for a file that describes others: some hundred MB for ten thousand ranks
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

    def read_file(self, name: str) -> bytes:
        """Returns all bytes of a small file."""
        ...

    def open_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a file for reading, with `seek` and `readinto`."""
        ...

    def create_file(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Opens a new file for writing. It is on the disk once the context ends without error."""
        ...


class _KernelReadAheadFile(FileIO):
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
    def current(cls) -> Self:
        return cls(host=socket.gethostname(), boot=boot_id(), pid_namespace=pid_namespace(), pid=os.getpid())

    def is_certainly_dead(self) -> bool:
        """Returns True if the process is certainly dead; False if it runs, or if this machine cannot know."""
        here = self == WriterProcess.current().model_copy(update={"pid": self.pid})
        return here and not is_process_running(self.pid)


@dataclass(frozen=True)
class RanksSharingDisk:
    """The ranks that save to the same disk or store as this rank; by default all ranks.

    leader: rank that does what is done once per disk
    node: index of the disk; None for a location that all ranks share
    nodes: number of disks
    attempt: id for the next save, which several disks commit together; None for a shared location
    complete_steps: steps that are on all disks, in the order in which `load` tries them; None for a location
        that all ranks share
    """

    leader: int = 0
    node: int | None = None
    nodes: int = 1
    attempt: str | None = None
    complete_steps: tuple[int, ...] | None = None

    @property
    def is_leader(self) -> bool:
        return self.leader == rank()

    def run_on_leader(self, act: Callable[[], T], *, doing: str, group: Group = None) -> T:
        """Runs `act()` on the leader of every disk, and returns the leader's result on each rank of the disk.

        Collective. The result is pickled. Raises CheckpointError on all ranks if a leader failed.
        """
        if self.nodes == 1:
            return run_on_rank_zero(act, doing=doing, group=group)
        with raise_on_all_ranks(doing, group=group):
            results = [act()] if self.is_leader else []
        return all_gather_object(results, group=group)[self.leader][0]


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

    def read_file(self, name: str) -> bytes:
        with self.open_file(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _SMALL_BYTES:
                what = f"it has {format_bytes(size)}, more than {format_bytes(_SMALL_BYTES)}"
                raise OSError(errno.EFBIG, what, str(self.path / name))
            return file.read(size)

    @contextmanager
    def open_file(self, name: str) -> Generator[BinaryIO]:
        with _KernelReadAheadFile(self.path / name, opener=open_regular_file) as file:
            yield cast(BinaryIO, file)

    @contextmanager
    def create_file(self, name: str) -> Generator[BinaryIO]:
        with DirectFileWriter(self.path / name) as file:
            yield cast(BinaryIO, file)
        fsync_path(self.path)


def write_file(files: CheckpointFiles, name: str, *, data: bytes) -> None:
    """Writes a new file, and flushes it to the disk."""
    with files.create_file(name) as file:
        file.write(data)


def is_data_loss_error(error: OSError) -> bool:
    """Returns whether an error shows that a file's bytes are lost, or that it is a link, directory or device.

    A missing file does not count: other ranks may find it.
    """
    return error.errno in (errno.EIO, errno.ENODATA, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENXIO)
