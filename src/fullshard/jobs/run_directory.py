"""The directory of a run: its lock, the record of its launch, and how an earlier run is set aside. No torch.

An earlier run is set aside by one rename of its directory. So that nothing else moves with it, a directory is
renamed only if it holds a run's own record, and no directory, program or settings that a run does not write:
these belong to a user's project, or to other runs.
"""

import errno
import os
import socket
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal, Self

from fullshard.errors import CheckpointError, SpecError, TrainError
from fullshard.spec.plan import Plan
from fullshard.spec.records import run_files
from fullshard.spec.value import FrozenModel
from fullshard.system.files import (
    find_lock_holder,
    hold_exclusive_file_lock,
    os_errors_as_checkpoint_errors,
    write_file_atomically,
)
from fullshard.system.process import read_stat_fields_after_comm

# Names that torchrun gives to a launch without a name.
_NAMELESS = ("", "none")
_LOCK = ".lock"

_RECORDS = {
    run_files.LAUNCH,
    run_files.PLAN,
    run_files.METRICS,
    run_files.EVENTS,
    run_files.MEASUREMENT,
    run_files.TRACKERS,
}
_WRITTEN = {run_files.CHECKPOINTS, run_files.PROFILES, run_files.OUT_OF_MEMORY, *_RECORDS}
# A run's own directories, including those of trackers and schedulers.
_TOOLS = {"tensorboard", "wandb", "mlruns", "trackers", "logs"}
_DIRECTORIES = {run_files.CHECKPOINTS, run_files.PROFILES, run_files.OUT_OF_MEMORY, *_TOOLS}
_REPOSITORY = {".git", ".hg", ".svn", "pyproject.toml"}  # .git is a file in a worktree
# Programs, settings and texts that people write.
_USER_SUFFIXES = {".py", ".ipynb", ".sh", ".sbatch", ".slurm", ".toml", ".yaml", ".yml", ".tex"}
_ANOTHER = "run.dir = a directory of its own, such as runs/1"

# Time that a restarted run waits for the lock: a killed rank may take a moment to exit.
_PATIENCE_SECONDS = 20.0


class LastAttemptRecord(FrozenModel):
    """The file launch.json: the last attempt to train in a run's directory. See `LaunchId` for the fields.

    ended: how the attempt ended; None while it runs, and if it was killed
    """

    agents: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    world_size: int = 1
    ended: Literal["finished", "interrupted"] | None = None

    def save(self, path: Path) -> None:
        """Writes the record atomically. Without the record, the directory is not recognised as a run's."""
        write_file_atomically(path, self.model_dump_json() + "\n")

    def resume_message(self, world_size: int, *, step: int, steps: int) -> str:
        """Returns the message that an attempt on `world_size` ranks, after this one, resumes after `step`."""
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        if world_size != self.world_size:
            ranks += f" ({self.world_size} before)"
        if step == 0:
            return f"restarted on {ranks}: nothing was saved, so it starts again at step 1 of {steps}"
        return f"restarted on {ranks}: resumes after step {step} of {steps}"

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Reads the record; returns None if the file does not exist or another program wrote it."""
        try:
            record = cls.read_json(path, what="the record of a launch")
        except SpecError:
            return None
        return record if record.model_fields_set >= {"jobs", "world_size"} else None


@dataclass(frozen=True)
class LaunchId:
    """The identity of a launch: one command, with all its attempts.

    agents: the processes that restart ranks, one per node: torchrun's agents, or fullshard's launcher. Two
        attempts of one launch share at least one agent, whichever nodes have left or joined.
    jobs: names that a person (torchrun's run id) or a scheduler (SLURM's job and restart count) gave it
    earlier_jobs: the `jobs` that earlier attempts of this launch recorded
    """

    agents: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    earlier_jobs: frozenset[str] = frozenset()
    world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Returns the launch as this rank sees it, from the variables of torchrun and SLURM."""
        name = environment.get("TORCHELASTIC_RUN_ID", "")
        jobs = {f"torchrun:{name}"} if name not in _NAMELESS else set[str]()
        earlier = jobs.copy()
        job, times = environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "0")
        if job is not None:
            # Two commands of one job are two launches, unless the job was requeued in between.
            count = int(times) if times.isdecimal() else 0
            jobs.add(f"slurm:{job}:{count}")
            earlier |= {f"slurm:{job}:{before}" for before in range(count)}
        agents = {f"{_restarting_agent_id()}:{name}"} if name else set[str]()
        return cls(agents=frozenset(agents), jobs=frozenset(jobs), earlier_jobs=frozenset(earlier))

    @classmethod
    def merge_ranks(cls, launches: Sequence[Self]) -> Self:
        """Combines the launch ids that all ranks have of one launch. Takes the names from rank 0."""
        agents = frozenset[str]().union(*(one.agents for one in launches))
        return replace(launches[0], agents=agents, world_size=len(launches))

    def find_earlier_attempt(self, path: Path) -> LastAttemptRecord | None:
        """Returns the record at `path` if an attempt of this launch wrote it, or else None.

        A name alone may belong to an older launch, so a finished run is never resumed by name.
        """
        record = LastAttemptRecord.load(path)
        if record is None:
            return None
        by_agent = not self.agents.isdisjoint(record.agents)
        by_name = record.ended != "finished" and not self.earlier_jobs.isdisjoint(record.jobs)
        return record if by_agent or by_name else None


def _restarting_agent_id() -> str:
    """Returns host, process id and start time of the process that starts and restarts this rank.

    torchelastic gives every rank its own session, which includes any process between the two (a shell).
    """
    leader = os.getsid(0)
    agent = os.getppid() if leader == os.getpid() else _process_parent_and_start(leader)[0]
    return f"{socket.gethostname()}:{agent}:{_process_parent_and_start(agent)[1]}"


def _process_parent_and_start(process: int) -> tuple[int, int]:
    """Returns (parent's id, start in clock ticks since boot), or (0, 0) without /proc. man proc_pid_stat."""
    fields = read_stat_fields_after_comm(process)
    return (int(fields[1]), int(fields[19])) if fields else (0, 0)


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
    previous_attempt: LastAttemptRecord | None = None

    def record_run_end(self, *, interrupted: bool) -> None:
        """Writes into launch.json whether the run was interrupted or is finished, and so never resumed."""
        record = LastAttemptRecord.load(self.root / run_files.LAUNCH)
        if record is not None:
            ended = "interrupted" if interrupted else "finished"
            record.model_copy(update={"ended": ended}).save(self.root / run_files.LAUNCH)


@contextmanager
def open_run_directory(
    root: Path,
    *,
    resume: bool,
    launch: LaunchId = LaunchId(),
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
    there = (root / run_files.LAUNCH).exists() if kept else (root / run_files.CHECKPOINTS).is_dir()
    if resume and not saved_to and not there:
        raise CheckpointError(
            f"{root} holds no run to resume.",
            got="--resume",
            fix="leave --resume out, or set run.dir to the directory of the run",
        )
    before = launch.find_earlier_attempt(root / run_files.LAUNCH)
    if not (resume or before):
        check_usable_by_new_run(root, offload_path=offload_path)  # a refused directory stays unchanged
    with convert_os_errors(root):
        make_run_directory(root)
        with hold_run_lock(root, patience_seconds=_PATIENCE_SECONDS if before else 0.0):
            if saved_to and not (resume or before):
                _check_no_foreign_checkpoints(saved_to)
            aside = None if resume or before else set_aside_earlier_run(root, offload_path=offload_path)
        make_run_directory(root)  # the lock moved with the directory that was set aside
        with hold_run_lock(root):
            agents, jobs = tuple(sorted(launch.agents)), tuple(sorted(launch.jobs))
            record = LastAttemptRecord(agents=agents, jobs=jobs, world_size=launch.world_size)
            record.save(root / run_files.LAUNCH)
            yield RunDirectory(root, saved_to or root / run_files.CHECKPOINTS, aside, before)


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


def check_usable_by_new_run(root: Path, *, offload_path: str = "offload") -> None:
    """Raises SpecError if `root` has contents that a new run may neither add to nor set aside."""
    entries = _list_entries(root)
    own, has_run = _DIRECTORIES | set(Path(offload_path).parts[:1]), _has_run_record(root)
    if not has_run:
        taken = [one.name for one in entries if one.name in _WRITTEN and not _is_empty_directory(one)]
        if taken:
            raise SpecError(
                f"{root} holds {', '.join(taken)}, and is not the directory of a run.",
                got=f"neither a {run_files.LAUNCH} nor a {run_files.PLAN} that a run has written",
                why="a run would write over them",
                fix=f"{_ANOTHER}; or --resume, to continue from the checkpoints that are there",
            )
    may_stay = _can_move_with_run if has_run else _can_lie_beside_run
    foreign = [one.name for one in entries if one.name in _REPOSITORY or not may_stay(one, own=own)]
    others = ", ".join(foreign[:5])
    if others and not has_run:
        raise SpecError(
            f"{root} holds other things than a run.",
            got=others,
            why="a run would write its files among them",
            fix=f"{_ANOTHER}; loose files, logs/ and empty directories may lie there",
        )
    if others:
        raise SpecError(
            f"{root} holds an earlier run, and more.",
            got=others,
            why="the earlier run is set aside by renaming the directory, and these would move with it",
            fix=f"{_ANOTHER}; --resume, to continue the earlier run; or move these elsewhere",
        )


def set_aside_earlier_run(root: Path, *, offload_path: str = "offload") -> Path | None:
    """Renames `root` to `<name>.1`, or the next free number, if it holds a run. Returns that path or None."""
    check_usable_by_new_run(root, offload_path=offload_path)
    if not _has_run_record(root):
        return None
    place = Path(os.path.realpath(root)) if root.is_symlink() else root  # the link stays
    targets = (place.with_name(f"{place.name}.{number}") for number in count(1))
    return place.rename(next(target for target in targets if not target.exists()))


def _check_no_foreign_checkpoints(saved_to: str) -> None:
    """Raises CheckpointError if `saved_to` holds checkpoints, which a new run would mistake for its own."""
    from fullshard.checkpoint.location import location_of  # imports torch, which the launcher's checks avoid

    with os_errors_as_checkpoint_errors(f"{saved_to} cannot be read."):
        steps = location_of(saved_to).list_checkpoints()
    if steps:
        raise CheckpointError(
            f"{saved_to} holds the checkpoints of another run.",
            got=", ".join(files.name for _, files in steps[:3]),
            fix="--resume to resume it, or another checkpoint.dir",
        )


def _has_run_record(root: Path) -> bool:
    """Returns whether `root` holds a launch record or a plan. Other programs write a launch.json, too."""
    if LastAttemptRecord.load(root / run_files.LAUNCH) is not None:
        return True
    with suppress(SpecError):
        Plan.load(root / run_files.PLAN)
        return True
    return False


def _can_move_with_run(entry: Path, *, own: set[str]) -> bool:
    return entry.name in own if entry.is_dir() else entry.suffix not in _USER_SUFFIXES


def _can_lie_beside_run(entry: Path, *, own: set[str]) -> bool:
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


def hold_run_lock(root: Path, *, patience_seconds: float = 0.0) -> AbstractContextManager[None]:
    """Context in which this process holds the lock of the run's directory `root`.

    The kernel releases the lock when the process ends, so a killed run leaves nothing to clean up.

    Raises TrainError if another process holds the lock for longer than `patience_seconds`, or OSError.
    """
    held_error = partial(_lock_held_error, root)
    return hold_exclusive_file_lock(root / _LOCK, held_error=held_error, patience_seconds=patience_seconds)


def check_unlocked(root: Path) -> None:
    """Raises TrainError if another process holds the lock of the directory `root`. Writes nothing."""
    with convert_os_errors(root):
        if holder := find_run_lock_holder(root):
            raise _lock_held_error(root, holder)


def find_run_lock_holder(root: Path) -> str | None:
    """Returns the process that trains in the directory `root`, or None. Writes nothing. Raises OSError."""
    return find_lock_holder(root / _LOCK)


def check_writable(root: Path) -> None:
    """Raises TrainError if `root` can be neither written nor created. Creates nothing that remains."""
    with convert_os_errors(root):
        place = Path(os.path.realpath(root))
        missing = [one for one in (place, *place.parents) if not one.exists()]
        try:
            make_run_directory(root)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "this user may not write there", str(place))
        finally:
            for one in missing:
                with suppress(OSError):  # it was not created, or another run uses it by now
                    one.rmdir()


def make_run_directory(root: Path) -> None:
    """Creates the directory `root`, or its target if `root` is a symbolic link, unless it exists."""
    Path(os.path.realpath(root)).mkdir(parents=True, exist_ok=True)


@contextmanager
def convert_os_errors(root: Path) -> Generator[None]:
    """Context that converts an OSError about a path in `root`, or above `root`, into a TrainError."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename is not None else None
        place = Path(os.path.realpath(root))
        if path is None or not (path in place.parents or any(map(path.is_relative_to, (root, place)))):
            raise
        raise TrainError(
            f"the run's directory {root} cannot be written.",
            got=f"{path}: {error.strerror}",
            fix="another run.dir",
        ) from error


def _lock_held_error(root: Path, holder: str) -> TrainError:
    return TrainError(
        f"another run is writing {root}.", got=holder, fix="wait for it, or --set run.dir=<another directory>"
    )
