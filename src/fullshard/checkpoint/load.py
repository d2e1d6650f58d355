"""Loading of the newest complete checkpoint, at any number of ranks and in any strategy, verified as it is
read.

[Note: a reader beside a writer] A run that keeps few checkpoints may remove one that another process, such as
an evaluation, is reading. It has committed a newer one before. So when a read fails and the checkpoint no
longer exists, the reader looks again and takes the newest.
"""

import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, cast

from torch import Tensor

from fullshard.checkpoint import per_node, per_rank_layout, storage
from fullshard.checkpoint.checkpointable import Checkpointable, PartitionedState
from fullshard.checkpoint.files import Files, LocalFiles
from fullshard.checkpoint.location import CheckpointLocation, is_listed, location_of, valid_checkpoints
from fullshard.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    Manifest,
    compare_names,
    read_manifest,
    step_name,
    verify,
)
from fullshard.checkpoint.per_node import NodeLocalDirectory
from fullshard.distributed.agreement import gathered, on_all_ranks, on_rank_zero, rank
from fullshard.errors import CheckpointError, DamagedCheckpointError

T = TypeVar("T")

_TRIES = 10  # attempts to read a checkpoint before it is removed

logger = logging.getLogger("fullshard")


def load(
    state: Checkpointable,
    directory: str | Path | CheckpointLocation | NodeLocalDirectory,
    *,
    missing_ok: bool = False,
) -> bool:
    """Loads the newest complete checkpoint of `directory` into `state`, and returns True if there was one.

    Collective: every rank calls it, and rank 0 chooses for all. `directory` may also be one checkpoint. Every
    rank reads only the bytes that its own shards need, whichever ranks and sharding saved them, and checks
    every block against its digest. A checkpoint that turns out damaged is renamed to `.bad-…` with a warning,
    and the next older complete one is taken.

    Raises CheckpointError if there is no checkpoint, unless `missing_ok` (then returns False); if there are
    checkpoints but none is complete, in any case; and if the checkpoint is of another model. After an error
    the content of `state` is undefined.
    """
    if isinstance(directory, NodeLocalDirectory):
        return _load_from_nodes(state, directory, missing_ok=missing_ok)
    place = location_of(directory)
    refused: dict[str, str] = {}
    for attempt in itertools.count(1):
        found = on_rank_zero(
            lambda attempt=attempt: _find(place, missing_ok=missing_ok and attempt == 1, refused=refused),
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
            aside = on_rank_zero(lambda files=files: _set_aside(place, files), doing=f"setting {files} aside")
            if rank() == 0:
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
    """Returns whether a checkpoint that was found in `place` has been removed or replaced since."""
    if files.name == place.as_checkpoint().name:
        return False  # this one was requested by name
    try:
        return not is_listed(place, files) or read_manifest(files) != manifest
    except CheckpointError:
        return not is_listed(place, files)


def _load_from_nodes(state: Checkpointable, disks: NodeLocalDirectory, *, missing_ok: bool) -> bool:
    """Loads the newest step that every node has; see `per_node`."""
    seat = per_node.find_seat(disks.path)
    refused: list[str] = []
    for step, _ in per_node.finish_commits(disks, seat):
        files = LocalFiles(disks.path / step_name(step), disks.key)
        manifest = on_all_ranks(lambda files=files: verify(files), doing=f"loading {files}")
        try:
            _load(state, files, manifest=manifest)
        except DamagedCheckpointError as error:
            refused.append(f"{files.name}: {error.got or error.what}")
            place = disks.own
            aside = on_all_ranks(
                lambda files=files, place=place: _set_aside(place, files) if seat.is_leader else None,
                doing=f"setting {files} aside",
            )
            if seat.is_leader:
                logger.warning("%s\n  %s: an older checkpoint is taken instead", error, aside)
        else:
            logger.info("loaded step %d from %s of each node", step, files)
            return True
    left = [path.name for pattern in ("step-*", ".bad-*") for path in sorted(disks.path.glob(pattern))]
    broken = refused or [name for names in gathered(left) for name in names]
    if not broken and missing_ok:
        return False
    raise CheckpointError(
        f"no checkpoint in {disks} is whole on all of them." if broken else f"no checkpoint in {disks}.",
        got=", ".join(dict.fromkeys(broken)) or "nothing",
        why="training again from the start is not for us to decide" if broken else None,
        fix="the same nodes; or fullshard ckpt gather <directory of each node>... --to OUT, then load OUT",
    )


def find(directory: str | Path | CheckpointLocation) -> tuple[Files, Manifest]:
    """Returns `directory` itself if it is a checkpoint, else its newest complete one; raises CheckpointError
    if none.
    """
    found = _find(location_of(directory), missing_ok=False, refused={})
    assert found is not None, "missing_ok is False"
    return found


def with_newest(directory: str | Path | CheckpointLocation, act: Callable[[Files, Manifest], T]) -> T:
    """Calls `act` with the checkpoint that `find` returns. See [Note: a reader beside a writer]."""
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
    if manifest.layout == "ranks":
        on_all_ranks(lambda: per_rank_layout.require_same_ranks(files, manifest), doing=doing)
    receivers = on_all_ranks(lambda: _receivers(state, manifest), doing=doing)
    reader = on_all_ranks(lambda: storage.opened(files, manifest), doing=doing)
    read = per_rank_layout.read if manifest.layout == "ranks" else storage.read
    on_all_ranks(lambda: read(receivers, reader), doing=doing)
    if hasattr(state, "partitions"):
        portions = cast(PartitionedState, state).partitions(manifest.tensors)
        while (portion := on_all_ranks(lambda: next(portions, None), doing=doing)) is not None:
            on_all_ranks(lambda portion=portion: read(portion, reader), doing=doing)
    on_all_ranks(lambda: state.load_values(manifest.values, receivers), doing=doing)


def _set_aside(place: CheckpointLocation, files: Files) -> str:
    try:
        return f"renamed to {place.set_aside(files)}"
    except OSError as error:  # a read-only location
        return f"it could not be renamed ({error.strerror})"


def _find(
    place: CheckpointLocation, *, missing_ok: bool, refused: Mapping[str, str]
) -> tuple[Files, Manifest] | None:
    # A directory that holds steps is not a checkpoint itself, whatever other files it holds.
    if place.exists() and not place.steps() and _is_checkpoint(place.as_checkpoint(), strays_ok=missing_ok):
        return place.as_checkpoint(), verify(place.as_checkpoint())
    for files, manifest in valid_checkpoints(place):
        if files.name not in refused:
            return files, manifest
    broken = [*refused.values(), *(files.name for _, files in place.steps() if files.name not in refused)]
    broken = broken or place.quarantined()
    if broken:
        raise CheckpointError(
            f"none of the checkpoints in {place} is whole.",
            got=", ".join(broken),
            why="training again from the start is not for us to decide",
            fix="another copy of them; or another directory, to start over",
        )
    if missing_ok:
        return None
    raise CheckpointError(
        f"no checkpoint in {place}.",
        got="an empty directory" if place.exists() else "no such directory",
        fix="the directory that holds the step-… directories, or one of these",
    )


def _is_checkpoint(files: Files, *, strays_ok: bool) -> bool:
    """Returns whether `files` are those of one checkpoint, possibly a damaged one.

    strays_ok: whether damaged files under a checkpoint's names, without any shard beside them, may be taken
        for unrelated files
    """
    names = files.sizes()
    if MANIFEST not in names and METADATA not in names:
        return False
    try:
        read_manifest(files)
    except DamagedCheckpointError:
        return not strays_ok or any(name.endswith(".distcp") for name in names)
    return True


def _receivers(state: Checkpointable, manifest: Manifest) -> dict[str, Tensor]:
    receivers = state.load_targets(manifest.tensors)
    # DCP would silently fill tensors of another dtype.
    compare_names(receivers, {name: manifest.tensors[name] for name in receivers if name in manifest.tensors})
    return receivers
