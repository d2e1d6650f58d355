"""Locations of a run's checkpoints, where each checkpoint becomes visible complete or not at all.

[Note: the last good checkpoint] If the last steps before a save were skipped (loss or gradient norm not
finite, or spikes), the weights or the optimizer state may be what makes them fail. If the state holds a
number that no training can continue from (`find_unusable_number`), they will. Most saves are then postponed
or refused. Where one is made, so that nothing is lost (the end of a run, a signal), its manifest records why
it is avoided (`Manifest.why_avoided`). Such a checkpoint is loaded only if there is no other, and displaces
no other: it removes no older one, nor takes the place of one of its step. The next good one removes it.
"""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fullshard.checkpoint.files import WRITER, CheckpointFiles, LocalFiles, write_file, write_process_name
from fullshard.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    parse_step_name,
    read_manifest,
    read_manifest_and_check_sizes,
    step_name,
)
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.system.files import (
    check_disk_space,
    find_lock_holder,
    free_disk_bytes,
    fsync_path,
    hold_exclusive_file_lock,
    make_durable_directory,
    os_errors_as_checkpoint_errors,
)
from fullshard.system.object_store import ObjectStore, is_remote_url

_REMOVAL = re.compile(r"\.del-step-[0-9]{8,}-[0-9a-f]{8}")
_DRAFT = re.compile(r"\.tmp-[0-9]{8,}-[0-9a-f]{8}")
_CUT_URL = re.compile(r"([a-z][a-z0-9+.]+):/([^/].*)")
_LOCK = ".lock"

logger = logging.getLogger("fullshard")


class CheckpointLocation(Protocol):
    """A directory of checkpoints. Any method may raise OSError.

    Only rank 0 calls methods that change files.
    """

    def __str__(self) -> str: ...

    def exists(self) -> bool: ...

    def root_as_checkpoint(self) -> CheckpointFiles:
        """Returns the location itself as the files of one checkpoint."""
        ...

    def list_checkpoints(self) -> list[tuple[int, CheckpointFiles]]:
        """Returns (step, files) of every entry named like a checkpoint, highest step first."""
        ...

    def list_steps(self) -> list[int]:
        """Returns the steps that may have a checkpoint, by names alone, highest first."""
        ...

    def find_checkpoint(self, step: int) -> CheckpointFiles | None:
        """Returns the files of the entry that is named like the checkpoint of `step`; None without one."""
        ...

    def describe_drafts(self) -> list[str]:
        """Returns a line for each draft: its name, and whether its save is running, as far as is known."""
        ...

    def list_quarantined(self) -> list[str]:
        """Returns the names of the damaged checkpoints that `quarantine` renamed."""
        ...

    def lock_for_writing(self) -> AbstractContextManager[None]:
        """Locks the location against other writers. Raises CheckpointError if another process writes."""
        ...

    def clean_up_and_create_draft(self, step: int, *, needed_bytes: int) -> CheckpointFiles:
        """Removes drafts of dead saves, and creates one for the files of a step.

        Raises CheckpointError if a disk lacks `needed_bytes`.
        """
        ...

    def commit(self, draft: CheckpointFiles, manifest: Manifest) -> CheckpointFiles:
        """Makes a draft with its manifest the checkpoint of its step, and returns the checkpoint's files."""
        ...

    def discard_draft(self, draft: CheckpointFiles) -> None:
        """Removes a draft that `clean_up_and_create_draft` created, as far as possible."""

    def quarantine(self, checkpoint: CheckpointFiles) -> str:
        """Renames a damaged checkpoint, which is then neither loaded nor removed. Returns the new name."""
        ...

    def remove_checkpoint(self, checkpoint: CheckpointFiles) -> None:
        """Removes a checkpoint. If the removal is interrupted, the rest does not look like a checkpoint."""


@dataclass(frozen=True)
class LocalLocation:
    """A directory of a file system. A draft is a directory in it, and one rename commits it."""

    path: Path
    free_bytes: Callable[[Path], int] = free_disk_bytes

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a directory of checkpoints.", got="a file")
        return self.path.is_dir()

    def root_as_checkpoint(self) -> CheckpointFiles:
        return LocalFiles(self.path)

    def list_checkpoints(self) -> list[tuple[int, CheckpointFiles]]:
        return [(step, LocalFiles(self.path / step_name(step))) for step in self.list_steps()]

    def list_steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        with os.scandir(self.path) as entries:
            # Saves create directories only: a file or a link with the name of a step is not fullshard's.
            own = [one.name for one in entries if one.is_dir(follow_symlinks=False)]
        return sorted((step for step in map(parse_step_name, own) if step is not None), reverse=True)

    def find_checkpoint(self, step: int) -> CheckpointFiles | None:
        path = self.path / step_name(step)
        return LocalFiles(path) if path.is_dir() and not path.is_symlink() else None

    def describe_drafts(self) -> list[str]:
        drafts, holder = _list_directories(self.path, ".tmp-*"), None
        with suppress(OSError):  # a file system without locks
            holder = find_lock_holder(self.path / _LOCK) if drafts else None
        # A save holds the lock until it ends.
        state = f"{holder} is saving it now" if holder else "a save that was not finished"
        return [f"{path}: {state}" for path in drafts]

    def list_quarantined(self) -> list[str]:
        return [path.name for path in sorted(self.path.glob(".bad-*"))]

    @contextmanager
    def lock_for_writing(self) -> Generator[None]:
        make_durable_directory(self.path)
        with hold_exclusive_file_lock(self.path / _LOCK, held_error=self._lock_held_error):
            fsync_path(self.path)  # the rename of a process that was killed before it flushed it
            yield

    def _lock_held_error(self, holder: str) -> CheckpointError:
        return CheckpointError(
            f"another process is saving to {self.path}.",
            got=f"{holder} ({self.path / _LOCK})",
            why="two runs in one directory would take each other's checkpoints for their own",
            fix="one directory per run",
        )

    def clean_up_and_create_draft(self, step: int, *, needed_bytes: int) -> CheckpointFiles:
        """Creates a draft, removes those of dead saves, and sets aside an entry of the step's name."""
        target = self.path / step_name(step)
        if os.path.lexists(target):
            aside = self.quarantine(LocalFiles(target))
            logger.warning("%s is not a checkpoint; renamed to %s", target, aside)
        _remove_leftovers(self.path)
        check_disk_space(target, needed_bytes=needed_bytes, available_bytes=self.free_bytes(self.path))
        draft = LocalFiles(self.path / f".tmp-{step:08d}-{secrets.token_hex(4)}")
        draft.path.mkdir()
        try:
            write_process_name(draft)
            fsync_path(draft.path)  # a draft without this name would not be recognised as fullshard's
        except OSError:
            _rmtree_or_warn(draft.path)
            raise
        return draft

    def commit(self, draft: CheckpointFiles, manifest: Manifest) -> CheckpointFiles:
        write_file(draft, MANIFEST, data=manifest.encode())
        path, target = _path_of_local_files(draft), LocalFiles(self.path / step_name(manifest.step))
        fsync_path(path)  # the names of all ranks' files, whose bytes each rank has flushed
        path.rename(target.path)
        fsync_path(self.path)
        return target

    def discard_draft(self, draft: CheckpointFiles) -> None:
        _rmtree_or_warn(_path_of_local_files(draft))

    def quarantine(self, checkpoint: CheckpointFiles) -> str:
        path = _path_of_local_files(checkpoint)
        return str(path.rename(path.with_name(f".bad-{path.name}-{secrets.token_hex(4)}")))

    def remove_checkpoint(self, checkpoint: CheckpointFiles) -> None:
        """Removes a checkpoint. Leaves files in it that no save wrote, with a warning."""
        path = _path_of_local_files(checkpoint)
        own = {MANIFEST, WRITER, *read_manifest(checkpoint).files}
        if others := sorted({one.name for one in path.iterdir()} - own):
            for name in (MANIFEST, *sorted(own - {MANIFEST})):  # without a manifest, it is no checkpoint
                (path / name).unlink(missing_ok=True)
            logger.warning("%s was removed, except %s, which no save wrote", path, ", ".join(others[:5]))
            return
        condemned = path.with_name(f".del-{path.name}-{secrets.token_hex(4)}")
        path.rename(condemned)
        fsync_path(self.path)
        _rmtree_or_warn(condemned)


def location_of(directory: str | Path | CheckpointLocation) -> CheckpointLocation:
    """Returns the location that a path or a URL names; returns a location unchanged.

    Raises MissingExtraError for a URL whose package is not installed, and SpecError for an unusable URL.
    Raises CheckpointError for a path that was a URL before `Path` removed one of its slashes.

    >>> place = fs.location_of("checkpoints")
    >>> fs.save(state, place, plan=plan)
    PosixPath('checkpoints/step-00000003')
    """
    if not isinstance(directory, str | Path):
        return directory
    if cut := _CUT_URL.match(str(directory)):
        raise CheckpointError(
            f"{directory} is not a URL, and hardly a path.",
            got=f"one slash behind {cut[1]}:",
            fix=f"{cut[1]}://{cut[2]}, as text: pathlib.Path takes one of the slashes",
        )
    if isinstance(directory, str) and is_remote_url(directory):
        from fullshard.checkpoint.objects import ObjectLocation

        ObjectStore(directory).check_url_and_package()
        return ObjectLocation(directory.rstrip("/"))
    return LocalLocation(Path(str(directory).removeprefix("file://")))


def iterate_complete_checkpoints(place: CheckpointLocation) -> Iterator[tuple[CheckpointFiles, Manifest]]:
    """Yields files and manifest of each complete checkpoint (judged by file sizes), in the order of `load`.

    That is the highest step first, and after all others those of [Note: the last good checkpoint] to avoid.
    Skips damaged checkpoints and interrupted saves, with a warning. Raises CheckpointError for a checkpoint
    that may be complete but cannot be read, since an older one is no substitute for it.
    """
    last, seen = list[tuple[CheckpointFiles, Manifest]](), set[str]()
    with os_errors_as_checkpoint_errors(f"{place} cannot be read."):
        if not place.exists():
            return
        for draft in place.describe_drafts():
            logger.warning("passing over %s", draft)
        # List again each time: a run that saves there may have removed one checkpoint and added another.
        while unseen := [files for _, files in place.list_checkpoints() if files.name not in seen]:
            files = unseen[0]
            seen.add(files.name)
            try:
                manifest = read_manifest_and_check_sizes(files)
            except CheckpointError as error:
                if not is_checkpoint_listed(place, files):
                    continue  # removed since it was listed
                if not isinstance(error, DamagedCheckpointError):
                    raise
                logger.warning("passing over %s: %s", files, error.got or error.what)
            else:
                if manifest.why_avoided is None:
                    yield files, manifest
                    continue
                last.append((files, manifest))
                logger.warning("passing over %s, unless there is no other: %s", files, manifest.why_avoided)
    yield from last


def is_checkpoint_listed(place: CheckpointLocation, files: CheckpointFiles) -> bool:
    """Returns whether the checkpoint `files` is still in `place`."""
    return any(one.name == files.name for _, one in place.list_checkpoints())


def latest_checkpoint(directory: str | Path | CheckpointLocation) -> Path | str | None:
    """Returns the path or URL of the checkpoint in `directory` that `load` would try first; None without one.

    >>> fs.latest_checkpoint("checkpoints")
    PosixPath('checkpoints/step-00000003')
    """
    complete = iterate_complete_checkpoints(location_of(directory))
    return next((path_or_url_of(files) for files, _ in complete), None)


def newest_complete_step(directory: str | Path | CheckpointLocation) -> int | None:
    """Returns the step of the checkpoint that `latest_checkpoint` finds, or None."""
    return next((manifest.step for _, manifest in iterate_complete_checkpoints(location_of(directory))), None)


def path_or_url_of(files: CheckpointFiles) -> Path | str:
    """Returns the path of a checkpoint on a file system, or the URL of another."""
    return files.path if isinstance(files, LocalFiles) else str(files)


def _path_of_local_files(files: CheckpointFiles) -> Path:
    assert isinstance(files, LocalFiles), f"{files} lies elsewhere"
    return files.path


def _rmtree_or_warn(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be removed", path)


def _remove_leftovers(directory: Path) -> None:
    """Removes what interrupted removals (`.del-`) and saves (`.tmp-`) left.

    The location must be locked. A save holds the lock until it ends, so no draft belongs to a running one.
    """
    removals = [one for one in _list_directories(directory, ".del-*") if _REMOVAL.fullmatch(one.name)]
    drafts = [one for one in _list_directories(directory, ".tmp-*") if _DRAFT.fullmatch(one.name)]
    own = [one for one in drafts if not (names := {file.name for file in one.iterdir()}) or WRITER in names]
    for path in removals + own:
        logger.info("removing %s, which an interrupted save left", path)
        _rmtree_or_warn(path)


def _list_directories(directory: Path, pattern: str) -> list[Path]:
    """Returns the subdirectories whose name matches `pattern`, except links, which are not fullshard's."""
    return [path for path in sorted(directory.glob(pattern)) if path.is_dir() and not path.is_symlink()]
