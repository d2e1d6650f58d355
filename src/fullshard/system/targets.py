"""Checks before a command writes: no checkpoint, no record of a run, no unrelated file; errors of writing."""

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from fullshard.errors import FullshardError, SpecError
from fullshard.quantities import join_names

IsKind = Callable[[Path], bool]

_STEP = re.compile(r"step-[0-9]{8,}")
_DATA = "*.distcp"
# Files that a run writes into its directory, and those that identify a directory as a run's.
_RECORDS = {"launch.json", "metrics.jsonl", "events.jsonl", "measurement.json", "plan.json", ".lock"}
_SIGNS = ("launch.json", "metrics.jsonl")
# No file of fullshard's that a command replaces is larger than this, so larger ones are not read.
_LARGEST_BYTES = 64 << 20


def check_output_file(path: Path, *, is_kind: IsKind | None, force: bool, streams: bool = False) -> None:
    """Raises SpecError if a command may not write the file `path`.

    is_kind: returns True for an existing file of the kind that the command writes, which may be replaced;
        None if no existing file may be replaced
    force: True allows replacing any regular file
    streams: True allows writing to a pipe or a device
    """
    check_not_checkpoint_or_run_record(path)
    if os.path.isdir(path):
        raise SpecError(f"{path} cannot be written.", got="a directory", fix=f"a file in it: {path}/…")
    if os.path.islink(path) and not os.path.exists(path) and not force:
        fix = "another path, or --force, which replaces it"
        raise SpecError(f"{path} exists already.", got="a link to nothing", fix=fix)
    is_file = os.path.isfile(path)
    if not os.path.exists(path) or (streams and not is_file):
        return
    if not is_file:
        raise SpecError(f"{path} cannot be written.", got="a pipe or a device", fix="a file")
    if not force and not (is_kind is not None and is_kind(path)):
        raise SpecError(
            f"{path} exists already.",
            got=None if is_kind is None else "a file of another kind than would replace it",
            fix="another path, or --force, which replaces it",
        )


def check_output_directory(path: Path, *, is_kind: IsKind, force: bool) -> None:
    """Raises SpecError if a command may not write files into the directory `path`.

    The directory may be missing, empty, or contain only files for which `is_kind` returns True. With `force`,
    it may contain other files too, except checkpoints.
    """
    check_not_checkpoint_or_run_record(path)
    if not os.path.exists(path):
        return
    entries = _list_directory(path)
    for within in (path, path / "checkpoints"):
        if os.path.isdir(within) and any(_STEP.fullmatch(one.name) for one in _list_directory(within)):
            raise SpecError(
                f"{path} cannot be written.", got=f"checkpoints in {within}", fix="a directory of its own"
            )
    others = [one.name for one in entries if not (one.is_file() and is_kind(one))]
    if others and not force:
        raise SpecError(
            f"{path} is not empty.",
            got=join_names(others, most=3),
            why="files of the same names would be replaced",
            fix="another directory, or --force, which replaces them",
        )


def check_not_checkpoint_or_run_record(path: Path) -> None:
    """Raises SpecError if `path` is in a checkpoint, or is a record of a run (launch.json, plan.json, …)."""
    place = Path(os.path.realpath(path))
    for depth, directory in enumerate((place, *place.parents)):
        # Checkpoints are flat, so farther parents are checked only if their names are those of steps.
        near = depth < 2 or _STEP.fullmatch(directory.name)
        if near and os.path.isdir(directory) and (data := next(directory.glob(_DATA), None)):
            raise SpecError(
                f"{path} cannot be written.",
                got=f"a path in {directory}, which holds {data.name} and so is taken for a checkpoint",
                why="a checkpoint with a file too many, or another one, is damaged",
                fix="a path elsewhere",
            )
    if place.name in _RECORDS and any(os.path.exists(place.parent / sign) for sign in _SIGNS):
        raise SpecError(
            f"{path} cannot be written.", got=f"a record of the run in {place.parent}", fix="a path elsewhere"
        )


@contextmanager
def convert_write_errors(path: Path, *, fix: str = "another path") -> Generator[None]:
    """Context that writes `path`, and raises SpecError for an OSError."""
    try:
        yield
    except OSError as error:
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix=fix) from error


def make_load_predicate(load: Callable[[Path], object], *, most_bytes: int | None = _LARGEST_BYTES) -> IsKind:
    """Returns a predicate that is True for files of at most `most_bytes` that `load` reads without error."""

    def loads_without_error(path: Path) -> bool:
        if most_bytes is not None and path.stat().st_size > most_bytes:
            return False
        try:
            load(path)
        except (FullshardError, OSError):
            return False
        return True

    return loads_without_error


def _list_directory(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError as error:
        raise SpecError(f"{path} cannot be read.", got=error.strerror, fix="another directory") from error
