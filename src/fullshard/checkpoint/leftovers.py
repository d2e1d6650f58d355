"""Which directories may go, and which process still writes one."""

import logging
import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from fullshard.checkpoint.files import LocalFiles
from fullshard.spec.value import FrozenModel

WRITER = "writer.json"

logger = logging.getLogger("fullshard")


class WriterProcess(FrozenModel):
    """Which process writes a checkpoint: enough to tell, on the same machine, whether it still runs.

    A pid means something only under the kernel (`boot`) and in the pid namespace where it was given.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int

    @classmethod
    def this(cls) -> Self:
        boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
        return cls(
            host=socket.gethostname(),
            boot=boot.read_text().strip() if boot.exists() else "",
            pid_namespace=os.readlink(namespace) if namespace.exists() else "",
            pid=os.getpid(),
        )

    def is_dead(self) -> bool:
        """True where it certainly is; False also where that cannot be known from here."""
        if self != WriterProcess.this().model_copy(update={"pid": self.pid}):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def remove(path: Path) -> None:
    """Removes a directory of ours, as far as it can; what stays is named in a warning."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed", path)


def collect_leftovers(directory: Path) -> None:
    """Removes what is left of saves whose process is dead, and of removals that were broken off.

    A `.tmp-` directory whose process may still run is left alone, and named in a warning. Call it with the
    place locked: then one that has no more than begun is nobody's.
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
    """Returns the directories that match `pattern`: a file or a link of such a name is somebody else's."""
    return [path for path in sorted(directory.glob(pattern)) if path.is_dir() and not path.is_symlink()]


def _is_bare(path: Path) -> bool:
    """Whether its process was ended before it had said who it is, and so before it wrote any shard."""
    return {one.name for one in path.iterdir()} <= {WRITER}


def set_aside(path: Path) -> Path:
    """Renames what looks like a checkpoint and is none, so that its name is free. It is never removed."""
    aside = path.with_name(f".bad-{path.name}-{secrets.token_hex(4)}")
    path.rename(aside)
    return aside
