"""Loading and verifying the newest complete checkpoint, with any number of ranks and any strategy.

[Note: a reader beside a writer] A run may commit a checkpoint and remove an old one while another process,
such as an evaluation, reads the old one. So if a read fails and the checkpoint no longer exists, the reader
starts again with the newest checkpoint.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from fullshard.checkpoint import storage
from fullshard.checkpoint.checkpointable import Checkpointable, PartitionedState
from fullshard.checkpoint.files import DiskGroup, Files
from fullshard.checkpoint.location import CheckpointLocation, is_listed, location_of, valid_checkpoints
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    compare_names,
    read_manifest,
    require_files,
    step_name,
)
from fullshard.checkpoint.storage import GATHER
from fullshard.distributed.agreement import agreed, on_all_ranks, on_rank_zero, rank
from fullshard.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")

_TRIES = 10  # attempts to read a checkpoint faster than it is removed

logger = logging.getLogger("fullshard")


def load(
    state: Checkpointable,
    directory: str | Path | CheckpointLocation,
    *,
    missing_ok: bool = False,
) -> bool:
    """Loads the newest complete checkpoint of `directory` into `state`, and returns True.

    Collective: every rank calls it, and rank 0 chooses the checkpoint. `directory` may also be a checkpoint.
    The ranks and the sharding may be others than at the save. Every rank reads only the bytes that its shards
    need, and checks every block against its digest. A damaged checkpoint is renamed to `.bad-…`, with a
    warning, and the next older one is loaded.

    If there is no checkpoint, returns False if `missing_ok`, else raises CheckpointError. Also raises
    CheckpointError if none of the checkpoints is complete, or if the checkpoint is of another model. After an
    error the content of `state` is undefined.
    """
    place = location_of(directory)
    refused: dict[str, str] = {}
    for attempt in itertools.count(1):
        disk = place.join()
        missing = missing_ok and attempt == 1
        # With a disk per node, every rank finds its own disk's manifest.
        run = on_rank_zero if disk.nodes == 1 else on_all_ranks
        found = run(
            lambda disk=disk, missing=missing: _find(place, disk, missing_ok=missing, refused=refused),
            doing=f"looking for a checkpoint in {directory}",
        )
        if found is None:
            return False
        files, manifest = found
        try:
            _load(state, files, manifest=manifest)
        except CheckpointError as error:
            gone = on_rank_zero(
                lambda files=files, manifest=manifest: _is_gone(place, files, manifest=manifest),
                doing=f"looking for {files} again",
            )
            if gone:
                _require_tries_left(attempt, place)
                continue  # see [Note: a reader beside a writer]
            if not isinstance(error, DamagedCheckpointError) or files.name == place.as_checkpoint().name:
                raise  # no other checkpoint helps, or this one was requested by name
            refused[files.name] = f"{files.name}: {error.got or error.what}"
            with agreed(f"setting {files} aside"):
                if disk.is_leader:
                    aside = _set_aside(place, files)
                    logger.warning("%s\n  %s: an older checkpoint is taken instead", error, aside)
        else:
            logger.info("loaded step %d from %s", manifest.step, files)
            if refused and rank() == 0:
                logger.warning("went back to %s, since %s cannot be used", files, ", ".join(refused))
            return True
    raise AssertionError("the loop ends by itself")


def _require_tries_left(attempt: int, place: CheckpointLocation) -> None:
    if attempt == _TRIES:
        raise CheckpointError(
            f"{place} changes faster than it can be read.",
            got=f"{attempt} checkpoints, each removed while it was read",
            fix="let the run that saves there keep more checkpoints (checkpoint.keep)",
        )


def _is_gone(place: CheckpointLocation, files: Files, *, manifest: Manifest) -> bool:
    """Returns whether a checkpoint that was found in `place` was removed or replaced since.

    A checkpoint that is `place` itself never counts as removed.
    """
    if files.name == place.as_checkpoint().name:
        return False
    try:
        return not is_listed(place, files) or read_manifest(files) != manifest
    except CheckpointError:
        return not is_listed(place, files)


def find(directory: str | Path | CheckpointLocation) -> tuple[Files, Manifest]:
    """Returns the checkpoint `directory`, or the newest complete one in it, or raises CheckpointError."""
    found = _find(location_of(directory), DiskGroup(), missing_ok=False, refused={})
    assert found is not None, "missing_ok is False"
    return found


def with_newest(directory: str | Path | CheckpointLocation, act: Callable[[Files, Manifest], T]) -> T:
    """Returns `act(files, manifest)` of the checkpoint that `find` returns.

    Repeats this if the checkpoint is removed meanwhile. See [Note: a reader beside a writer].
    """
    place = location_of(directory)
    for attempt in itertools.count(1):
        files, manifest = find(place)
        try:
            return act(files, manifest)
        except CheckpointError:
            if not _is_gone(place, files, manifest=manifest):
                raise
            _require_tries_left(attempt, place)
    raise AssertionError("the loop ends by itself")


def _load(state: Checkpointable, files: Files, *, manifest: Manifest) -> None:
    doing = f"loading {files}"
    with agreed(doing):
        if manifest.layout == "ranks":
            storage.require_same_ranks(files, manifest)
        receivers = state.load_targets(manifest.tensors)
        # DCP would silently fill tensors of another dtype.
        compare_names(
            receivers, {name: manifest.tensors[name] for name in receivers if name in manifest.tensors}
        )
    with agreed(doing):
        reader = storage.opened(files, manifest)
    read = storage.read_own if manifest.layout == "ranks" else storage.read
    with agreed(doing):
        read(receivers, reader)
    if isinstance(state, PartitionedState):
        portions = state.partitions(manifest.tensors)
        while (portion := on_all_ranks(lambda: next(portions, None), doing=doing)) is not None:
            with agreed(doing):
                read(portion, reader)
    with agreed(doing):
        state.load_values(manifest.values, receivers)


def _set_aside(place: CheckpointLocation, files: Files) -> str:
    try:
        return f"renamed to {place.set_aside(files)}"
    except OSError as error:  # a read-only location
        return f"it could not be renamed ({error.strerror})"


def _find(
    place: CheckpointLocation, disk: DiskGroup, *, missing_ok: bool, refused: Mapping[str, str]
) -> tuple[Files, Manifest] | None:
    complete, newest = disk.complete_steps, None
    # A directory that contains steps is not a checkpoint itself, whatever other files it contains.
    if complete is None and place.exists() and not place.steps():
        files = place.as_checkpoint()
        manifest = _lone_manifest(files, strays_ok=missing_ok)
        if manifest is not None:
            return files, manifest
    if complete is not None:  # all disks load the same step
        newest = max((step for step in complete if step_name(step) not in refused), default=-1)
    for files, manifest in valid_checkpoints(place):
        if files.name not in refused and newest in (None, manifest.step):
            return files, manifest
    broken = [*refused.values(), *(files.name for _, files in place.steps() if files.name not in refused)]
    broken = broken or place.quarantined()
    if broken:
        raise CheckpointError(
            f"none of the checkpoints in {place} is whole{'' if complete is None else ' on all of them'}.",
            got=", ".join(broken),
            why="training again from the start is not for us to decide",
            fix="another copy of them; or another directory, to start over"
            if complete is None
            else f"the same nodes; or {GATHER}",
        )
    if missing_ok:
        return None
    raise CheckpointError(
        f"no checkpoint in {place}.",
        got="an empty directory" if place.exists() else "no such directory",
        fix="the directory that holds the step-… directories, or one of these",
    )


def _lone_manifest(files: Files, *, strays_ok: bool) -> Manifest | None:
    """Returns the manifest if `files` are those of one checkpoint, else None.

    Raises CheckpointError if the checkpoint is damaged. If `strays_ok`, and there are no shards, a damaged
    manifest counts as an unrelated file of the same name.
    """
    names = files.sizes()
    if MANIFEST not in names and METADATA not in names:
        return None
    try:
        manifest = read_manifest(files)
    except DamagedCheckpointError:
        if strays_ok and not any(name.endswith(".distcp") for name in names):
            return None
        raise
    require_files(files, manifest)
    return manifest
