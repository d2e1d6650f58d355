"""Saving: all of a state or nothing, and never over something that is there."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import torch
from pydantic import JsonValue, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import disk, retention, storage
from fullshard.checkpoint.agreement import everyone, first, gathered, rank, world_size
from fullshard.checkpoint.manifest import (
    MANIFEST,
    MODEL_PREFIX,
    Manifest,
    SavedFile,
    SavedTensor,
    step_directory,
    verify,
)
from fullshard.checkpoint.protocol import Checkpointable
from fullshard.errors import CheckpointError, SpecError
from fullshard.quantities import format_bytes
from fullshard.spec.plan import Plan

# What DCP writes around the bytes of a tensor (a zip archive each): 1.1 KiB to 1.9 KiB on torch 2.13.
_ENVELOPE_BYTES = 2048

_VALUES: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])

logger = logging.getLogger("fullshard")


def save(
    state: Checkpointable,
    directory: str | Path,
    *,
    keep: int = 0,
    plan: Plan | None = None,
    free_bytes: Callable[[Path], int] = disk.free_bytes,
) -> Path:
    """Saves `state` as `directory/step-00000123` and returns that path. Collective: every rank calls it.

    Every rank writes its own shards into a temporary directory beside; the manifest comes last, everything
    is flushed to the disk, and only then it is renamed. When any rank fails, all raise CheckpointError that
    names the first, the temporary directory is removed, and what was there before is untouched.

    `keep`: after that, only the newest `keep` whole checkpoints stay; 0 keeps all. `plan` is noted in the
    manifest. A step that is there already, whole and of the same model, is not written again; of another
    model it is refused; a broken one is renamed to `.bad-…`.
    """
    if keep < 0:
        raise SpecError("a number of checkpoints to keep cannot be negative.", got=f"keep = {keep}")
    directory = Path(directory)
    mine = everyone(lambda: _snapshot(state), doing="taking the state to save")
    doing = f"saving step {mine.step} to {directory}"
    needed_bytes = _agreed_bytes(mine)
    target = step_directory(directory, mine.step)
    temporary = first(
        lambda: _begin(target, mine, needed_bytes=needed_bytes, free_bytes=free_bytes), doing=doing
    )
    if temporary is None:
        return target
    try:
        everyone(lambda: _see(temporary), doing=doing)
        everyone(lambda: _write(mine, temporary), doing=doing)
        first(lambda: _commit(mine, temporary, target=target, plan=plan), doing=doing)
    except CheckpointError:
        retention.remove(temporary)
        raise
    first(lambda: retention.prune(directory, keep=keep, step=mine.step), doing="removing old checkpoints")
    return target


@dataclass(frozen=True)
class _Snapshot:
    step: int
    values: dict[str, JsonValue]
    tensors: dict[str, Tensor]


def _snapshot(state: Checkpointable) -> _Snapshot:
    tensors = state.tensors()
    for name, tensor in tensors.items():
        problem = _unsavable(tensor)
        if problem:
            raise CheckpointError(f"the tensor {name!r} cannot be saved.", got=problem)
    try:
        values = _VALUES.validate_python(state.values())
        json.dumps(values, allow_nan=False)
    except (ValidationError, ValueError) as error:
        reason = error.errors()[0]["loc"] if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            "the state's values cannot be saved.",
            got=f"{reason}",
            why="they go into a JSON file: strings, finite numbers, booleans, null, lists and objects",
        ) from error
    return _Snapshot(state.step, values, tensors)


def _unsavable(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"{type(tensor).__name__}, not a tensor"
    if tensor.is_meta:
        return "a tensor on the meta device, which holds no numbers"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        return "a DTensor with a Partial placement, whose sum over ranks is still due"
    return None


def _agreed_bytes(mine: _Snapshot) -> int:
    """About how many bytes all ranks will write. Raises CheckpointError where ranks hold different states."""
    text = json.dumps(mine.values, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    facts = gathered((mine.step, digest, sum(map(_share_bytes, mine.tensors.values()))))
    for other, (step, values, _) in enumerate(facts):
        if step != facts[0][0]:
            raise CheckpointError(
                "the ranks are not at the same step.", got=f"rank 0 at {facts[0][0]}, rank {other} at {step}"
            )
        if values != facts[0][1]:
            raise CheckpointError(
                "the ranks do not hold the same values.",
                got=f"rank {other} differs from rank 0",
                why="values are saved once for all ranks; what differs goes into a tensor named by rank",
            )
    return math.ceil(sum(share for _, _, share in facts))


def _share_bytes(tensor: Tensor) -> float:
    """This rank's share of the bytes that are written: of n copies, one is. Plain tensors count as copies."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        copies = math.prod(mesh.size(i) for i, one in enumerate(tensor.placements) if one.is_replicate())
        return (cast(DTensor, tensor.detach()).to_local().nbytes + _ENVELOPE_BYTES) / copies
    return (tensor.nbytes + _ENVELOPE_BYTES) / world_size()


def _begin(
    target: Path, mine: _Snapshot, *, needed_bytes: int, free_bytes: Callable[[Path], int]
) -> Path | None:
    """On rank 0: a new temporary directory beside `target`; None where `target` holds this step already."""
    directory = target.parent
    disk.make_directory(directory)
    if _is_there(target, mine):
        return None
    retention.collect_leftovers(directory)
    disk.require_space(target, needed_bytes=needed_bytes, available_bytes=free_bytes(directory))
    temporary = directory / retention.temporary_name(mine.step)
    temporary.mkdir()
    try:
        disk.write_new(
            temporary / retention.WRITER, retention.WriterProcess.this().model_dump_json().encode()
        )
    except OSError:
        retention.remove(temporary)
        raise
    return temporary


def _is_there(target: Path, mine: _Snapshot) -> bool:
    """True where `target` is this step, whole. A broken one is set aside; another model is refused."""
    if not os.path.lexists(target):
        return False
    if not target.is_dir():
        raise CheckpointError(f"{target} is in the way.", got="a file", fix="move it elsewhere")
    try:
        manifest = verify(target)
    except CheckpointError as error:
        logger.warning("%s is not whole (%s); renamed to %s", target, error.got, retention.set_aside(target))
        return False
    model = {n: SavedTensor.of(tensor) for n, tensor in mine.tensors.items() if n.startswith(MODEL_PREFIX)}
    if model != manifest.model_tensors:
        other = {name for name, _ in model.items() ^ manifest.model_tensors.items()}
        raise CheckpointError(
            f"{target} exists, and holds another model.",
            got=f"{len(other)} tensors are others, or are in one of the two alone: {min(other)} …",
            why="a checkpoint is never overwritten",
            fix="another directory for this run",
        )
    changed = sorted(name for name in mine.values if manifest.values.get(name) != mine.values[name])
    if changed:
        logger.warning("%s exists and is kept, although these values changed: %s", target, ", ".join(changed))
    else:
        logger.info("%s exists already", target)
    return True


def _see(temporary: Path) -> None:
    if not (temporary / retention.WRITER).is_file():
        raise CheckpointError(
            f"{temporary.parent} is not the same directory on all ranks.",
            got=f"no {temporary.name} there, which rank 0 has just made",
            fix="a directory on a file system that all machines share",
        )


def _write(mine: _Snapshot, temporary: Path) -> None:
    """This rank's shards, down to the disk."""
    storage.write(mine.tensors, temporary)
    # The machine that wrote a file must flush it, and its own view of the directory.
    for path in temporary.glob(f"__{rank()}_*"):
        disk.flush(path)
    disk.flush(temporary)


def _commit(mine: _Snapshot, temporary: Path, *, target: Path, plan: Plan | None) -> None:
    """On rank 0: the manifest, and the rename that makes it a checkpoint."""
    metadata = storage.opened(temporary).read_metadata()
    sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    tensors = _written_tensors(metadata, sizes)
    manifest = Manifest(
        step=mine.step,
        values=mine.values,
        tensors=tensors,
        files={name: SavedFile(size_bytes=size) for name, size in sizes.items()},
        world_size=world_size(),
        torch_version=torch.__version__,
        fullshard_version=_own_version(),
        plan=None if plan is None else plan.model_dump(mode="json"),
    )
    disk.flush(temporary / ".metadata")
    disk.write_new(temporary / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
    disk.flush(temporary)
    temporary.rename(target)
    disk.flush(target.parent)
    logger.info("saved %s (%s)", target, format_bytes(sum(sizes.values())))


def _written_tensors(metadata: Metadata, sizes: dict[str, int]) -> dict[str, SavedTensor]:
    """Every tensor of DCP's metadata. Raises CheckpointError where a part of one is in no file."""
    tensors: dict[str, SavedTensor] = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), f"{name} was checked to be a tensor"
        for chunk in tensor.chunks:
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None or sizes.get(place.relative_path, -1) < place.offset + place.length:
                raise CheckpointError(
                    f"a part of {name} was not written.",
                    got=f"nothing for its part at {list(chunk.offsets)}",
                    why="torch.distributed.checkpoint reported that it was",
                    fix="save again, and the file system's log",
                )
        tensors[name] = SavedTensor(
            shape=tuple(tensor.size), dtype=str(tensor.properties.dtype).removeprefix("torch.")
        )
    return tensors


def _own_version() -> str:
    """`unknown` where the package is used from its sources, without being installed."""
    try:
        return version("fullshard")
    except PackageNotFoundError:
        return "unknown"
