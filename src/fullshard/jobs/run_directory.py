"""The directory of a run: its paths, the rules for writing there, and how an earlier run is set aside.

An earlier run is set aside by one rename of its directory. So that nothing else moves with it, a directory is
renamed only if it holds a run's own record, and no directory, program or settings that a run does not write:
these belong to a user's project, or to other runs.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fullshard.errors import CheckpointError, SpecError
from fullshard.jobs.launch_record import LaunchId, LaunchRecord
from fullshard.jobs.run_lock import convert_os_errors, hold_run_lock, make_run_directory
from fullshard.spec.plan import Plan
from fullshard.spec.records.run_files import (
    CHECKPOINTS,
    EVENTS,
    EXPORT,
    LAUNCH,
    LIVE,
    MEASUREMENT,
    METRICS,
    OUT_OF_MEMORY,
    PLAN,
    PROFILES,
    SPANS,
    TRACKERS,
)

_RECORDS = {LAUNCH, PLAN, METRICS, EVENTS, LIVE, MEASUREMENT, EXPORT, TRACKERS}
_WRITTEN = {CHECKPOINTS, SPANS, PROFILES, OUT_OF_MEMORY, *_RECORDS}
# A run's own directories, including those of trackers and schedulers.
_TOOLS = {"tensorboard", "wandb", "mlruns", "trackers", "logs"}
_DIRECTORIES = {CHECKPOINTS, SPANS, PROFILES, OUT_OF_MEMORY, *_TOOLS}
_REPOSITORY = {".git", ".hg", ".svn", "pyproject.toml"}  # .git is a file in a worktree
# Programs, settings and texts that people write.
_USER_SUFFIXES = {".py", ".ipynb", ".sh", ".sbatch", ".slurm", ".toml", ".yaml", ".yml", ".tex"}
_ANOTHER = "run.dir = a directory of its own, such as runs/1"

# Time that a restarted run waits for the lock: a killed rank may take a moment to exit.
_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, locked for writing.

    checkpoints: directory or URL of its checkpoints
    previous_run: directory that an earlier run was moved to, if there was one
    previous_attempt: record of the earlier attempt of this launch that is resumed, if there was one
    """

    root: Path
    checkpoints: Path | str
    previous_run: Path | None = None
    previous_attempt: LaunchRecord | None = None

    def record_run_end(self, *, interrupted: bool) -> None:
        """Writes into launch.json whether the run was interrupted or is finished, and so never resumed."""
        record = LaunchRecord.load(self.root / LAUNCH)
        if record is not None:
            ended = "interrupted" if interrupted else "finished"
            record.model_copy(update={"ended": ended}).save(self.root / LAUNCH)


@contextmanager
def open_run_directory(
    root: Path,
    *,
    resume: bool,
    launch: LaunchId | None = None,
    saved_to: str | None = None,
    kept: bool = False,
    offload_path: str = "offload",
) -> Generator[RunDirectory]:
    """Context in which the directory `root` is created, locked, and ready for one run. Only on rank 0.

    If the directory holds an earlier run, a new run renames it to `<name>.1`, or `.2`. If an earlier attempt
    of the same `launch` used the directory, the run resumes that attempt instead (see `LaunchId`).

    saved_to: directory or URL of the checkpoints, if they are elsewhere
    kept: a run may have left offloaded state to resume from, without a checkpoint

    Raises TrainError if the directory is locked or cannot be created; CheckpointError if there is nothing to
    resume, or if an earlier run has saved to the `saved_to` of a new run; SpecError if the directory holds
    other files than a run's.
    """
    parse_run_directory(str(root))
    there = (root / LAUNCH).exists() if kept else (root / CHECKPOINTS).is_dir()
    if resume and not saved_to and not there:
        raise CheckpointError(
            f"{root} holds no run to resume.",
            got="--resume",
            fix="leave --resume out, or set run.dir to the directory of the run",
        )
    launch = launch or LaunchId()
    before = launch.find_earlier_attempt(root / LAUNCH)
    if not (resume or before):
        check_directory_is_free(root, offload_path=offload_path)  # a refused directory stays unchanged
    with convert_os_errors(root):
        make_run_directory(root)
        with hold_run_lock(root, patience_seconds=_PATIENCE_SECONDS if before else 0.0):
            if saved_to and not (resume or before):
                _check_no_foreign_checkpoints(saved_to)
            aside = None if resume or before else set_aside_earlier_run(root, offload_path=offload_path)
        make_run_directory(root)  # the lock moved with the directory that was set aside
        with hold_run_lock(root):
            launch.make_record().save(root / LAUNCH)
            yield RunDirectory(root, saved_to or root / CHECKPOINTS, aside, before)


def parse_run_directory(name: str) -> Path:
    """Returns `name`, the value of `run.dir`, as a Path.

    Raises SpecError for a name that is not a path, and for the working directory, the home directory, and any
    directory that contains one of these.
    """
    if not name.strip() or "://" in name:
        raise SpecError("run.dir does not name a directory.", got=f"run.dir = {name!r}", fix=_ANOTHER)
    if name.startswith("~"):
        fix = f'run.dir = "{Path(os.path.expanduser(name))}"'
        raise SpecError(f"run.dir = {name!r} would be a directory called ~ here.", fix=fix)
    place, home = Path(os.path.realpath(name)), os.path.expanduser("~")
    home = home if os.path.isabs(home) else os.sep  # a user without a home directory
    for what, other in (("the working directory", os.getcwd()), ("the home directory", home)):
        if Path(os.path.realpath(other)).is_relative_to(place):
            raise SpecError(
                f"run.dir = {name!r} is not a run's alone.",
                got=f"{place}, which is or holds {what}",
                why="a later run renames the directory, with all that is in it",
                fix=_ANOTHER,
            )
    return Path(name)


def check_directory_is_free(root: Path, *, offload_path: str = "offload") -> None:
    """Raises SpecError if `root` has contents that a new run may neither add to nor set aside."""
    entries = _list_entries(root)
    own = _DIRECTORIES | set(Path(offload_path).parts[:1])
    if not _has_run_record(root):
        taken = [one.name for one in entries if one.name in _WRITTEN and not _is_empty_directory(one)]
        if taken:
            raise SpecError(
                f"{root} holds {', '.join(taken)}, and is not the directory of a run.",
                got=f"neither a {LAUNCH} nor a {PLAN} that a run has written",
                why="a run would write over them",
                fix=f"{_ANOTHER}; or --resume, to continue from the checkpoints that are there",
            )
        others = [one.name for one in entries if not _can_lie_beside_run(one, own=own)]
        if others:
            raise SpecError(
                f"{root} holds other things than a run.",
                got=", ".join(others[:5]),
                why="a run would write its files among them",
                fix=f"{_ANOTHER}; loose files, logs/ and empty directories may lie there",
            )
        return
    others = [one.name for one in entries if not _can_move_with_run(one, own=own)]
    if others:
        raise SpecError(
            f"{root} holds an earlier run, and more.",
            got=", ".join(others[:5]),
            why="the earlier run is set aside by renaming the directory, and these would move with it",
            fix=f"{_ANOTHER}; --resume, to continue the earlier run; or move these elsewhere",
        )


def set_aside_earlier_run(root: Path, *, offload_path: str = "offload") -> Path | None:
    """Renames `root` to `<name>.1`, or `.2`, if it holds an earlier run. Returns the new path, or None."""
    check_directory_is_free(root, offload_path=offload_path)
    if not _has_run_record(root):
        return None
    place = Path(os.path.realpath(root)) if root.is_symlink() else root  # the link stays
    targets = (place.with_name(f"{place.name}.{number}") for number in count(1))
    return place.rename(next(target for target in targets if not target.exists()))


def _check_no_foreign_checkpoints(saved_to: str) -> None:
    """Raises CheckpointError if `saved_to` holds checkpoints, which a new run would mistake for its own."""
    from fullshard.checkpoint.location import location_of  # imports torch, which the launcher's checks avoid
    from fullshard.distributed.agreement import run_alone_or_raise

    place = location_of(saved_to)
    steps = run_alone_or_raise(place.list_checkpoints, doing=f"looking for checkpoints in {saved_to}")
    if steps:
        raise CheckpointError(
            f"{saved_to} holds the checkpoints of another run.",
            got=", ".join(files.name for _, files in steps[:3]),
            fix="--resume to resume it, or another checkpoint.dir",
        )


def _has_run_record(root: Path) -> bool:
    """Returns whether `root` holds a launch record or a plan. Other programs write a launch.json, too."""
    if LaunchRecord.load(root / LAUNCH) is not None:
        return True
    with suppress(SpecError):
        Plan.load(root / PLAN)
        return True
    return False


def _can_move_with_run(entry: Path, *, own: set[str]) -> bool:
    if entry.name in _REPOSITORY:
        return False
    return entry.name in own if entry.is_dir() else entry.suffix not in _USER_SUFFIXES


def _can_lie_beside_run(entry: Path, *, own: set[str]) -> bool:
    if entry.name in _REPOSITORY:
        return False
    return not entry.is_dir() or entry.name.startswith(".") or entry.name in own or _is_empty_directory(entry)


def _is_empty_directory(entry: Path) -> bool:
    return entry.is_dir() and not any(entry.iterdir())


def _list_entries(root: Path) -> list[Path]:
    if not os.path.exists(root):
        return []
    try:
        return sorted(root.iterdir())
    except OSError as error:
        what = f"run.dir = {str(root)!r} cannot be a run's directory."
        raise SpecError(what, got=error.strerror, fix=_ANOTHER) from error
