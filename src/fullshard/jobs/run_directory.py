"""The directory of a run (its log, checkpoints and measurement), and the rules for writing there."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.location import location_of
from fullshard.distributed.agreement import locally
from fullshard.errors import CheckpointError
from fullshard.jobs.launch_record import LaunchId, LaunchRecord
from fullshard.jobs.run_lock import explained, locked, make
from fullshard.jobs.run_place import (
    CHECKPOINTS,
    EXPORT,
    LAUNCH,
    MEASUREMENT,
    METRICS,
    PLAN,
    require_free,
    require_name,
    set_aside,
)

# Time that a restarted run waits for the lock: a killed rank may take a moment to exit.
_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run's directory.

    root: the directory
    saved_to: `checkpoint.dir`, if checkpoints are stored elsewhere
    """

    root: Path
    saved_to: str | None = None

    @property
    def checkpoints(self) -> Path | str:
        return self.saved_to or self.root / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.root / METRICS

    @property
    def measurement(self) -> Path:
        return self.root / MEASUREMENT

    @property
    def plan(self) -> Path:
        return self.root / PLAN

    @property
    def export(self) -> Path:
        return self.root / EXPORT

    @property
    def launch(self) -> Path:
        return self.root / LAUNCH

    def note_end(self, *, interrupted: bool) -> None:
        """Records how the run ended: batch scripts can read it, and a finished run is never resumed."""
        record = LaunchRecord.load(self.launch)
        if record is not None:
            ended = "interrupted" if interrupted else "finished"
            record.model_copy(update={"ended": ended}).save(self.launch)


@dataclass(frozen=True)
class OpenedRun:
    """A run's directory, ready to be written.

    previous_run: the place that an earlier run in this directory was moved to
    previous_attempt: the record of an earlier attempt of this launch, which is resumed; None for the first
        attempt
    """

    directory: RunDirectory
    previous_run: Path | None = None
    previous_attempt: LaunchRecord | None = None


@contextmanager
def opened(
    root: Path,
    *,
    resume: bool,
    launch: LaunchId | None = None,
    saved_to: str | None = None,
    kept: bool = False,
    offload_path: str = "offload",
) -> Generator[OpenedRun]:
    """Opens the directory for one run to write, and locks it.

    A new run takes the name of a directory that holds an earlier run, which becomes `<name>.1`, or `.2`. If
    an earlier attempt of the same `launch` used the directory, the run resumes it instead (see `LaunchId`).

    kept: a run may have left state to resume from elsewhere (`fullshard.training.offload_checkpoint`)

    Only rank 0 calls this. Raises TrainError if the directory is in use or cannot be made; CheckpointError if
    there is nothing to resume, or if a new run would save to `saved_to`, where an earlier run has saved;
    SpecError for a directory that is not a run's alone (`fullshard.jobs.run_place`).
    """
    require_name(str(root))
    directory = RunDirectory(root, saved_to)
    there = directory.launch.exists() if kept else Path(directory.checkpoints).is_dir()
    if resume and not saved_to and not there:
        raise CheckpointError(
            f"{root} holds no run to resume.",
            got="--resume",
            fix="leave --resume out, or set run.dir to the directory of the run",
        )
    launch = launch or LaunchId()
    before = launch.earlier_attempt(directory.launch)
    if not (resume or before):
        require_free(root, offload_path=offload_path)  # a refused directory stays unchanged
    with explained(root):
        make(root)
        with locked(root, patience_seconds=_PATIENCE_SECONDS if before else 0.0):
            if saved_to and not (resume or before):
                _require_no_checkpoint(saved_to)
            aside = None if resume or before else set_aside(root, offload_path=offload_path)
        make(root)  # the lock moved with the directory that was set aside
        with locked(root):
            launch.record().save(directory.launch)
            yield OpenedRun(directory, aside, before)


def _require_no_checkpoint(saved_to: str) -> None:
    """Raises CheckpointError if `saved_to` holds checkpoints, which a new run would mistake for its own.

    They are not ours to move.
    """
    place = location_of(saved_to)
    steps = locally(place.steps, doing=f"looking for checkpoints in {saved_to}")
    if steps:
        raise CheckpointError(
            f"{saved_to} holds the checkpoints of another run.",
            got=", ".join(files.name for _, files in steps[:3]),
            fix="--resume to resume it, or another checkpoint.dir",
        )
