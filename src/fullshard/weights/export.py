"""Exports a model as safetensors: one file, several with an index, or a complete Hugging Face directory."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import storage
from fullshard.checkpoint.checkpointable import Checkpointable
from fullshard.checkpoint.files import CheckpointFiles
from fullshard.checkpoint.load import call_with_newest_checkpoint
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import MODEL_PREFIX, Manifest
from fullshard.distributed.agreement import run_alone_or_raise
from fullshard.errors import CheckpointError, SpecError
from fullshard.quantities import format_bytes
from fullshard.spec.weight_map import Naming, WeightMap, map_weights_by_name
from fullshard.system import disk
from fullshard.system.files import make_durable_directory
from fullshard.system.targets import check_not_checkpoint_or_run_record
from fullshard.weights.files import INDEX, ONE_FILE
from fullshard.weights.tensor_source import LayerMerging, MergedModel, SavedModel, TensorSource
from fullshard.weights.write import SafetensorsWriter

# Parts that torch's wrappers add to names: compile and recompute anywhere, DDP at the front of all names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_AROUND_ALL = "module."

logger = logging.getLogger("fullshard")


def export(
    checkpoint: str | Path | CheckpointLocation,
    target: str | Path,
    *,
    shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    naming: Naming | None = None,
    free_bytes: Callable[[Path], int] = disk.free_disk_bytes,
) -> None:
    """Writes the model tensors of a checkpoint to safetensors.

    Runs in one process, also in a distributed run. The tensor data in memory is at most 384 MiB, and less
    than two of the files. Names lose their prefix `model.` and the parts that wrappers add. A tied parameter
    is written once, and its aliases go into the file's metadata (alias -> name).

    checkpoint: a checkpoint, or a directory of them, whose newest complete one is used
    target: the file, which appears when complete and replaces an existing one; with `shard_bytes`, a
        directory
    shard_bytes: size limit per file, bytes (a larger tensor gets its own file); the index is written last
    dtype: dtype of all floating-point tensors; None keeps each as saved
    naming: maps the model's tensors to those of the files; None keeps their names
    free_bytes: returns the free space of a directory

    Raises CheckpointError; SpecError for a `shard_bytes` below 1, and for a `target` inside a checkpoint.

    >>> fs.export("checkpoints", "model.safetensors", dtype=torch.bfloat16)
    >>> safetensors.torch.load_file("model.safetensors")["head.weight"].dtype
    torch.bfloat16
    """
    check_shard_bytes(shard_bytes)
    target = Path(target)
    check_not_checkpoint_or_run_record(target)
    if shard_bytes is None and target.is_dir():
        raise CheckpointError(
            f"{target} cannot be written.",
            got="a directory",
            fix=f"{target}/model.safetensors, or a size of files that go into it",
        )

    def write_safetensors_files(files: CheckpointFiles, manifest: Manifest) -> SafetensorsWriter:
        outgoing = _build_writer(files, manifest, naming=naming, dtype=dtype, shard_bytes=shard_bytes)
        _make_directory_and_check_space(outgoing, target, is_file=shard_bytes is None, free_bytes=free_bytes)
        if shard_bytes is None:
            outgoing.write_file(target, list(outgoing.tensors))
        else:
            _write_files_and_index(outgoing, target, shard_bytes=shard_bytes)
        return outgoing

    _export_newest_checkpoint(checkpoint, write_safetensors_files, target=target)


def export_in_hf_layout(
    checkpoint: str | Path | CheckpointLocation,
    directory: str | Path,
    *,
    naming: Naming,
    beside: Mapping[str, bytes],
    dtype: torch.dtype | None = None,
    shard_bytes: int,
    merging: Mapping[str, LayerMerging] | None = None,
) -> None:
    """Writes the model of a checkpoint into `directory` in the Hugging Face layout.

    naming: maps the model's tensors to those of the files (`weights.names`)
    beside: contents of the other files by name, written after the weights in this order. The last one is
        config.json, so that an interrupted export cannot be loaded
    dtype: dtype of all floating-point tensors; None keeps each as saved
    shard_bytes: size limit per weights file, bytes; above it there are several files and an index
    merging: how the adapter of each layer is merged, by its saved name; None without adapters

    Raises CheckpointError, also for a directory that already holds weights; SpecError for a directory inside
    a checkpoint.
    """
    target = Path(directory)
    check_not_checkpoint_or_run_record(target)
    check_holds_no_weights(target)

    def write_hugging_face_directory(files: CheckpointFiles, manifest: Manifest) -> SafetensorsWriter:
        outgoing = _build_writer(
            files, manifest, naming=naming, merging=merging, dtype=dtype, shard_bytes=shard_bytes
        )
        _make_directory_and_check_space(outgoing, target, is_file=False, free_bytes=disk.free_disk_bytes)
        if outgoing.total_tensor_bytes <= shard_bytes:
            outgoing.write_file(target / ONE_FILE, list(outgoing.tensors))
        else:
            _write_files_and_index(outgoing, target, shard_bytes=shard_bytes)
        for name, data in beside.items():
            with disk.open_atomic_replacement(target / name) as file:
                file.write(data)
        return outgoing

    _export_newest_checkpoint(checkpoint, write_hugging_face_directory, target=target)


def check_shard_bytes(shard_bytes: int | None) -> None:
    """Raises SpecError for a size limit per file below 1."""
    if shard_bytes is not None and shard_bytes < 1:
        raise SpecError("no file is so small.", got=f"files of at most {shard_bytes} bytes", fix="5GB")


def _export_newest_checkpoint(
    checkpoint: str | Path | CheckpointLocation,
    write: Callable[[CheckpointFiles, Manifest], SafetensorsWriter],
    *,
    target: Path,
) -> None:
    """Calls `write` with the newest complete checkpoint, on this rank alone, and logs the size written."""

    def export_checkpoint(files: CheckpointFiles, manifest: Manifest) -> None:
        written = run_alone_or_raise(lambda: write(files, manifest), doing=f"exporting {files} to {target}")
        logger.info("exported %s to %s (%s)", files, target, format_bytes(written.total_tensor_bytes))

    call_with_newest_checkpoint(checkpoint, export_checkpoint)


def full_state(state: Checkpointable) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, whole tensor on the host) for every tensor that `state` saves, one at a time. Collective.

    Every rank must iterate to the end, and holds at most one whole tensor at a time. Raises SpecError for an
    object that is not a training state, such as a model.

    >>> for name, tensor in fs.full_state(state):  # on every rank, to the end
    ...     if name.endswith("head.weight"):
    ...         print(tuple(tensor.shape))
    (256, 32)
    """
    if not callable(getattr(state, "tensors", None)):
        raise SpecError(
            "fullshard.full_state is of a training state.",
            got=type(state).__name__,
            why="its names and tensors are those of a checkpoint, with the optimizer's",
            fix="fullshard.full_state(fullshard.TrainState(model, optimizer))",
        )
    return _iterate_full_tensors(state)


def _iterate_full_tensors(state: Checkpointable) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.tensors().items():
        own = tensor.detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        yield name, whole.cpu().contiguous()


def names_without_wrappers(saved: Iterable[str]) -> dict[str, str]:
    """Maps each saved name to the name without the model's prefix and without the parts that wrappers add."""
    plain = {name: name.removeprefix(MODEL_PREFIX) for name in saved}
    for wrapper in _WRAPPERS:
        plain = {name: one.replace(f".{wrapper}", ".").removeprefix(wrapper) for name, one in plain.items()}
    if all(one.startswith(_AROUND_ALL) for one in plain.values()):
        plain = {name: one.removeprefix(_AROUND_ALL) for name, one in plain.items()}
    return plain


def _build_writer(
    files: CheckpointFiles,
    manifest: Manifest,
    *,
    naming: Naming | None,
    merging: Mapping[str, LayerMerging] | None = None,
    dtype: torch.dtype | None,
    shard_bytes: int | None,
) -> SafetensorsWriter:
    metadata = {"format": "pt", **(_tied_parameter_aliases(manifest.values) if naming is None else {})}
    source: TensorSource = SavedModel(storage.build_reader(files, manifest))
    if merging is not None:
        source = MergedModel(source, merging)
    saved_names = {plain: name for name, plain in names_without_wrappers(source.tensors).items()}
    shapes = {plain: source.tensors[name].shape for plain, name in saved_names.items()}
    names = map_weights_by_name(shapes, shapes, prefixes=()) if naming is None else naming(shapes)
    back = WeightMap(
        parts={
            name: tuple(replace(part, source=saved_names[part.source]) for part in parts)
            for name, parts in names.parts.items()
        },
        shapes=names.shapes,
    )
    return SafetensorsWriter.for_mapped_tensors(
        source, back, what=str(files), dtype=dtype, metadata=metadata, shard_bytes=shard_bytes
    )


def _make_directory_and_check_space(
    outgoing: SafetensorsWriter, target: Path, *, is_file: bool, free_bytes: Callable[[Path], int]
) -> None:
    directory = target.parent if is_file else target
    make_durable_directory(directory)
    available = free_bytes(directory)
    disk.check_disk_space(target, needed_bytes=outgoing.total_tensor_bytes, available_bytes=available)


def check_holds_no_weights(directory: Path) -> None:
    """Raises CheckpointError for a directory that already holds safetensors files."""
    held = sorted(path.name for path in directory.glob("*.safetensors")) if directory.is_dir() else []
    if held:
        raise CheckpointError(
            f"{directory} holds weights already.",
            got=", ".join(held[:3]),
            why="what loads it must not find files of two models",
            fix="another directory, or remove them",
        )


def _write_files_and_index(outgoing: SafetensorsWriter, directory: Path, *, shard_bytes: int) -> None:
    index = directory / INDEX
    index.unlink(missing_ok=True)  # it must not name files of two exports
    parts = outgoing.group_tensors_into_files(shard_bytes)
    names: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        outgoing.write_file(directory / file, part)
        names |= dict.fromkeys(part, file)
    contents = {"metadata": {"total_size": outgoing.total_tensor_bytes}, "weight_map": names}
    with disk.open_atomic_replacement(index) as file:
        file.write(json.dumps(contents, indent=1).encode())


def _tied_parameter_aliases(values: Mapping[str, JsonValue]) -> dict[str, str]:
    tied = values.get("tied") or {}
    if not isinstance(tied, dict):
        raise CheckpointError("the checkpoint's tied names cannot be read.", got=repr(tied))
    plain = names_without_wrappers([*tied, *(str(name) for name in tied.values())])
    return {plain[alias]: plain[str(name)] for alias, name in tied.items()}
