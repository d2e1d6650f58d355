"""Loading: the newest whole checkpoint, at any number of ranks, in any strategy."""

import logging
from pathlib import Path

from torch import Tensor

from fullshard.checkpoint import storage
from fullshard.checkpoint.agreement import everyone, first
from fullshard.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    compare_names,
    newest,
    read_manifest,
    step_directories,
    verify,
)
from fullshard.checkpoint.protocol import Checkpointable
from fullshard.errors import CheckpointError

logger = logging.getLogger("fullshard")


def load(state: Checkpointable, directory: str | Path, *, missing_ok: bool = False) -> bool:
    """Loads the newest whole checkpoint of `directory` into `state`; True where there was one.

    Collective: every rank calls it, and rank 0 chooses for all. `directory` may also be one checkpoint. Every
    rank reads only what its own shards need, whatever the ranks and the sharding that saved it.

    Raises CheckpointError where there is none, unless `missing_ok` (then False); where there are some and
    none is whole, in any case; and where it is of another model.
    """
    directory = Path(directory)
    found = first(
        lambda: _find(directory, missing_ok=missing_ok), doing=f"looking for a checkpoint in {directory}"
    )
    if found is None:
        return False
    path, manifest = found
    doing = f"loading {path}"
    receivers = everyone(lambda: _receivers(state, manifest), doing=doing)
    reader = everyone(lambda: storage.opened(path), doing=doing)
    everyone(lambda: storage.read(receivers, reader), doing=doing)
    everyone(lambda: state.restored(manifest.values, receivers), doing=doing)
    logger.info("loaded step %d from %s", manifest.step, path)
    return True


def find(directory: Path) -> tuple[Path, Manifest]:
    """`directory` itself where it is a checkpoint, else its newest whole one; CheckpointError for none."""
    found = _find(directory, missing_ok=False)
    assert found is not None, "missing_ok is False"
    return found


def _find(directory: Path, *, missing_ok: bool) -> tuple[Path, Manifest] | None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory of checkpoints.", got="a file")
    if (directory / MANIFEST).exists():
        return directory, verify(directory)
    if (directory / ".metadata").exists():
        read_manifest(directory)  # raises: one checkpoint without its manifest must not pass for none at all
    path = newest(directory)
    if path is not None:
        return path, read_manifest(path)
    broken = [found.name for _, found in step_directories(directory)]
    if broken:
        raise CheckpointError(
            f"none of the checkpoints in {directory} is whole.",
            got=", ".join(broken),
            why="training again from the start is not for us to decide",
            fix="another copy of them; or another directory, to start over",
        )
    if missing_ok:
        return None
    raise CheckpointError(
        f"no checkpoint in {directory}.",
        got="an empty directory" if directory.exists() else "no such directory",
        fix="the directory that holds the step-… directories, or one of these",
    )


def _receivers(state: Checkpointable, manifest: Manifest) -> dict[str, Tensor]:
    receivers = state.receivers(manifest.tensors)
    # DCP would fill another dtype in silence.
    compare_names(receivers, {name: manifest.tensors[name] for name in receivers if name in manifest.tensors})
    return receivers
