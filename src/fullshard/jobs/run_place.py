"""Rules for a run's directory: which paths are allowed, and how an earlier run is set aside.

[Note: whole or not at all]
An earlier run is set aside by one rename of its directory, which is complete before and after. So that
nothing else moves with it, a directory is renamed only if it holds a run's own record, and no directory,
program or settings that a run does not write: these belong to a user's project, or to other runs.
"""

import os
from pathlib import Path

from fullshard.errors import SpecError
from fullshard.jobs.launch_record import LaunchRecord
from fullshard.spec.plan import Plan

CHECKPOINTS, LAUNCH, PLAN = "checkpoints", "launch.json", "plan.json"
METRICS, MEASUREMENT, EXPORT = "metrics.jsonl", "measurement.json", "model.safetensors"
_WRITTEN = {CHECKPOINTS, LAUNCH, PLAN, METRICS, MEASUREMENT, EXPORT}
# A run's own directories, including those of trackers and schedulers.
_DIRECTORIES = {CHECKPOINTS, "tensorboard", "wandb", "mlruns", "logs"}
_REPOSITORY = {".git", ".hg", ".svn", "pyproject.toml"}  # .git is a file in a worktree
# Programs, settings and texts that people write.
_OF_PEOPLE = {".py", ".ipynb", ".sh", ".sbatch", ".slurm", ".toml", ".yaml", ".yml", ".tex"}
_ANOTHER = "run.dir = a directory of its own, such as runs/1"


def require_name(name: str) -> Path:
    """Returns the directory that `run.dir` names.

    Raises SpecError for a directory that is not a run's alone (the working directory, the home directory, and
    any directory that contains one of these), and for a name that is not a path.
    """
    if not name.strip() or "://" in name:
        raise SpecError("run.dir does not name a directory.", got=f"run.dir = {name!r}", fix=_ANOTHER)
    if name.startswith("~"):
        fix = f'run.dir = "{Path(os.path.expanduser(name))}"'
        raise SpecError(f"run.dir = {name!r} would be a directory called ~ here.", fix=fix)
    place = Path(os.path.realpath(name))
    for what, other in (("the working directory", os.getcwd()), ("the home directory", _home())):
        if Path(os.path.realpath(other)).is_relative_to(place):
            raise SpecError(
                f"run.dir = {name!r} is not a run's alone.",
                got=f"{place}, which is or holds {what}",
                why="a later run renames the directory, with all that is in it",
                fix=_ANOTHER,
            )
    return Path(name)


def require_free(root: Path, *, offload_path: str = "offload") -> None:
    """Raises SpecError if a new run may neither write into `root` nor set aside its contents."""
    entries = _entries(root)
    own = _DIRECTORIES | {Path(offload_path).parts[0] if Path(offload_path).parts else ""}
    if not _holds_run(root):
        taken = [one.name for one in entries if one.name in _WRITTEN and not _is_empty(one)]
        if taken:
            raise SpecError(
                f"{root} holds {', '.join(taken)}, and is not the directory of a run.",
                got=f"neither a {LAUNCH} nor a {PLAN} that a run has written",
                why="a run would write over them",
                fix=f"{_ANOTHER}; or --resume, to continue from the checkpoints that are there",
            )
        others = [one.name for one in entries if _is_not_of_a_new_run(one, own=own)]
        if others:
            raise SpecError(
                f"{root} holds other things than a run.",
                got=", ".join(others[:5]),
                why="a run would write its files among them",
                fix=f"{_ANOTHER}; loose files, logs/ and empty directories may lie there",
            )
        return
    others = [one.name for one in entries if _is_not_a_runs(one, own=own)]
    if others:
        raise SpecError(
            f"{root} holds an earlier run, and more.",
            got=", ".join(others[:5]),
            why="the earlier run is set aside by renaming the directory, and these would move with it",
            fix=f"{_ANOTHER}; --resume, to continue the earlier run; or move these elsewhere",
        )


def set_aside(root: Path, *, offload_path: str = "offload") -> Path | None:
    """Renames the directory of an earlier run to `<name>.1`, or `.2`, and returns it; None if there is none.

    Raises the errors of `require_free`.
    """
    require_free(root, offload_path=offload_path)
    if not _holds_run(root):
        return None
    place = Path(os.path.realpath(root)) if root.is_symlink() else root  # the link stays
    number = 1
    while (target := place.with_name(f"{place.name}.{number}")).exists():
        number += 1
    place.rename(target)
    return target


def _holds_run(root: Path) -> bool:
    """Returns whether a run left its own record there. A file called launch.json alone proves nothing."""
    if LaunchRecord.load(root / LAUNCH) is not None:
        return True
    try:
        Plan.load(root / PLAN)
    except SpecError:
        return False
    return True


def _is_not_a_runs(entry: Path, *, own: set[str]) -> bool:
    if entry.name in _REPOSITORY:
        return True
    return entry.name not in own if entry.is_dir() else entry.suffix in _OF_PEOPLE


def _is_not_of_a_new_run(entry: Path, *, own: set[str]) -> bool:
    if entry.name in _REPOSITORY:
        return True
    return (
        entry.is_dir() and not entry.name.startswith(".") and entry.name not in own and not _is_empty(entry)
    )


def _is_empty(entry: Path) -> bool:
    return entry.is_dir() and not any(entry.iterdir())


def _entries(root: Path) -> list[Path]:
    if not os.path.exists(root):
        return []
    try:
        return sorted(root.iterdir())
    except OSError as error:
        raise SpecError(
            f"run.dir = {str(root)!r} cannot be a run's directory.", got=error.strerror, fix=_ANOTHER
        ) from error


def _home() -> str:
    """Returns the user's home directory, or the root if there is none, which is refused in any case."""
    home = os.path.expanduser("~")
    return home if os.path.isabs(home) else os.sep
