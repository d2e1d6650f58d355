"""Leftovers of saves: the process that writes a directory, and the removal of abandoned directories."""

import logging
import os
import shutil
import socket
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from fullshard.checkpoint.files import LocalFiles
from fullshard.spec.value import FrozenModel
from fullshard.system.process import boot_id, is_running, pid_namespace

WRITER = "writer.json"

logger = logging.getLogger("fullshard")


class WriterProcess(FrozenModel):
    """Identity of the process that writes a checkpoint, by which its machine can check whether it still runs.

    A pid is valid only under one kernel (`boot`) and in one pid namespace.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int

    @classmethod
    def this(cls) -> Self:
        return cls(host=socket.gethostname(), boot=boot_id(), pid_namespace=pid_namespace(), pid=os.getpid())

    def is_dead(self) -> bool:
        """Returns True if the process is certainly dead; False also if that cannot be known from here."""
        here = self == WriterProcess.this().model_copy(update={"pid": self.pid})
        return here and not is_running(self.pid)


def remove(path: Path) -> None:
    """Removes a directory of fullshard's as far as possible, and warns if some of it remains."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed", path)


def collect_leftovers(directory: Path) -> None:
    """Removes the leftovers of saves whose process is dead, and of interrupted removals.

    A `.tmp-` directory whose process may still run is kept, with a warning. The location must be locked, so
    that a directory in which nothing was written yet belongs to no running save.
    """
    for path in directories(directory, ".del-*"):
        remove(path)
    for path in directories(directory, ".tmp-*"):
        try:
            writer = WriterProcess.model_validate_json(LocalFiles(path).read(WRITER))
        except (OSError, ValidationError):
            writer = None
        if writer is not None and writer.is_dead():
            logger.info("removing %s: its process %d is dead", path, writer.pid)
            remove(path)
        elif writer is None and _is_bare(path):
            logger.info("removing %s: nothing was written there", path)
            remove(path)
        else:
            who = f"process {writer.pid} on {writer.host}" if writer else "an unknown process"
            logger.warning("leaving %s alone: %s may still be writing it", path, who)


def directories(directory: Path, pattern: str) -> list[Path]:
    """Returns the directories that match `pattern`, except links, which are not fullshard's."""
    return [path for path in sorted(directory.glob(pattern)) if path.is_dir() and not path.is_symlink()]


def _is_bare(path: Path) -> bool:
    """Returns whether the writer died before it recorded its identity, and so before it wrote any shard."""
    return {one.name for one in path.iterdir()} <= {WRITER}
