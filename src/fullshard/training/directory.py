"""The directory of a run: its log, checkpoints and measurement, and who may write there."""

import fcntl
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullshard.errors import CheckpointError, TrainError


@dataclass(frozen=True)
class RunDirectory:
    """What lies where in a run's directory."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def measurement(self) -> Path:
        return self.root / "measurement.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def export(self) -> Path:
        return self.root / "model.safetensors"


@contextmanager
def opened(root: Path, *, resume: bool) -> Generator[tuple[RunDirectory, Path | None]]:
    """The directory for one run to write, locked against a second; and where an earlier run was set aside to.

    A new run in a directory that holds one takes its name; the earlier becomes `<name>.1`, or `.2`.
    Only rank 0 calls this. Raises TrainError if the directory is in use or cannot be made, CheckpointError if
    there is nothing to resume.
    """
    directory = RunDirectory(root)
    if resume and not directory.checkpoints.is_dir():
        raise CheckpointError(
            f"{root} holds no run to go on with.",
            got="--resume",
            fix="leave --resume out, or set run.dir to the directory of the run",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root):
            aside = None if resume else _set_aside(directory)
        # The lock went with what was set aside.
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root):
            yield directory, aside
    except OSError as error:
        if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(root):
            raise
        raise TrainError(
            f"the run's directory {root} cannot be written.", got=error.strerror, fix="another run.dir"
        ) from error


@contextmanager
def _lock(root: Path) -> Generator[None]:
    """Holds `<root>/.lock`. The kernel lets it go with the process: a killed run leaves nothing to clean."""
    with (root / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise TrainError(
                f"another run is writing {root}.",
                got=file.read().strip() or "a lock that is held",
                fix="wait for it, or --set run.dir=<another directory>",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _set_aside(directory: RunDirectory) -> Path | None:
    root = directory.root
    if not (directory.checkpoints.exists() or directory.metrics.exists()):
        return None
    number = 1
    while (target := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    root.rename(target)
    return target
