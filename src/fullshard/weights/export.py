"""Exports a model as safetensors: one file, several with an index, or a complete Hugging Face directory."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import storage
from fullshard.checkpoint.files import CheckpointFiles
from fullshard.checkpoint.load import call_with_newest_checkpoint
from fullshard.checkpoint.location import CheckpointLocation
from fullshard.checkpoint.manifest import MODEL_PREFIX, Checkpointable, Manifest, SavedTensor
from fullshard.checkpoint.storage import CheckpointReader
from fullshard.distributed.agreement import run_raising_checkpoint_error
from fullshard.errors import CheckpointError, SpecError
from fullshard.quantities import format_bytes
from fullshard.spec.weight_map import BoxCopy, Naming, map_weights_by_name
from fullshard.system.direct_io import open_atomic_replacement
from fullshard.system.files import check_disk_space, free_disk_bytes, make_durable_directory
from fullshard.system.targets import check_not_checkpoint_or_run_record
from fullshard.weights.files import (
    DTYPES,
    INDEX,
    ONE_FILE,
    StridedCopy,
    encode_header,
    iterate_copies,
    split_copy,
)
from fullshard.weights.tensor_source import TensorSource, Weights, open_model_tensors

# Parts that torch's wrappers add to names: compile and recompute anywhere, DDP at the front of all names.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_AROUND_ALL = "module."

logger = logging.getLogger("fullshard")
# Piece size for larger tensors: much more than a checkpoint's digest block of 16 MiB.
_PIECE_BYTES = 128 << 20


@dataclass(frozen=True)
class SafetensorsWriter:
    """Writes tensors of a checkpoint to safetensors files, piece by piece.

    source: tensors of the checkpoint
    tensors: shape and dtype of each tensor as written, in the order of the files
    parts: elements of the source that each tensor consists of
    metadata: metadata of the files
    piece_bytes: size of a piece; three are in memory: as saved, as written, and the next one while it is read
    """

    source: TensorSource
    tensors: Mapping[str, SavedTensor]
    parts: Mapping[str, Sequence[BoxCopy]]
    metadata: Mapping[str, str]
    piece_bytes: int

    @property
    def total_tensor_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def group_tensors_into_files(self, shard_bytes: int) -> list[list[str]]:
        """Returns the tensor names of each file, which has at most `shard_bytes`, or one larger tensor."""
        files, room = list[list[str]](), 0
        for name, tensor in self.tensors.items():
            if tensor.size_bytes > room or not files:
                files.append([])
                room = shard_bytes
            files[-1].append(name)
            room -= tensor.size_bytes
        return files

    def write_file(self, target: Path, names: Sequence[str]) -> None:
        """Writes the tensors `names` to the file `target`, which appears when it is complete."""
        header = encode_header({name: self.tensors[name] for name in names}, self.metadata)
        pieces = (piece for name in names for piece in self._iterate_tensor_pieces(name))
        # The next piece is read on the thread while this one is written.
        with open_atomic_replacement(target) as file, ThreadPoolExecutor(max_workers=1) as thread:
            file.write(header)
            coming = thread.submit(next, pieces, None)
            while (piece := coming.result()) is not None:
                coming = thread.submit(next, pieces, None)
                file.write(piece.reshape(-1).view(torch.uint8).numpy().data)

    def _iterate_tensor_pieces(self, name: str) -> Iterator[Tensor]:
        """Yields the tensor `name` as pieces: the rows that fit into `piece_bytes`, or one larger row."""
        tensor = self.tensors[name]
        shape = tensor.shape or (1,)
        dtypes = [tensor.torch_dtype, *(self.source.tensors[p.source].torch_dtype for p in self.parts[name])]
        widest = max(dtype.itemsize for dtype in dtypes)
        most = max(1, self.piece_bytes // max(1, math.prod(shape[1:]) * widest))
        for begin in range(0, shape[0], most):
            rows = min(most, shape[0] - begin)
            piece = torch.empty((rows, *shape[1:]) if tensor.shape else (), dtype=tensor.torch_dtype)
            offsets = (begin, *(0 for _ in shape[1:])) if tensor.shape else ()
            for move in iterate_copies(piece, self.parts[name], offsets=offsets):
                self._read_into_target(move)
            yield piece

    def _read_into_target(self, move: StridedCopy) -> None:
        """Fills the target of `move` from the source, through buffers of at most `piece_bytes`."""
        dtype = self.source.tensors[move.source].torch_dtype
        if move.is_contiguous_on_both_sides and move.target.dtype == dtype:
            self.source.read_into(move.target.view(-1), move.source, begin=move.begin)
            return
        most = max(1, self.piece_bytes // dtype.itemsize)
        for part in split_copy(move, most=most, itemsize=dtype.itemsize):
            elements = torch.empty(part.span_length, dtype=dtype)
            self.source.read_into(elements, part.source, begin=part.begin)
            part.fill_target(elements)


def export(
    checkpoint: str | Path | CheckpointLocation,
    target: str | Path,
    *,
    shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    naming: Naming | None = None,
    weights: Weights = "model",
) -> None:
    """Writes the model tensors of a checkpoint to safetensors.

    Runs in one process, also in a distributed run. The tensor data in memory is at most 384 MiB, and less
    than two of the files. Names lose their prefix `model.` and the parts that wrappers add. A tied parameter
    is written once, and without `naming` its aliases go into the files' metadata (alias -> name).

    checkpoint: a checkpoint, or a directory of them, whose newest complete one is used
    target: the file, which appears when complete and replaces an existing one; with `shard_bytes`, a
        directory
    shard_bytes: size limit per file, bytes (a larger tensor gets its own file). If the model is larger, there
        are several files, and an index, which is written last
    dtype: dtype of all floating-point tensors; None keeps each as saved
    naming: maps the model's tensors to those of the files; None keeps their names
    weights: "ema" writes the averages of the trained parameters, which [ema] keeps, in place of them

    Raises CheckpointError; SpecError for a `shard_bytes` below 1, and for a `target` inside a checkpoint.

    >>> fs.export("checkpoints", "model.safetensors", dtype=torch.bfloat16)
    >>> safetensors.torch.load_file("model.safetensors")["head.weight"].dtype
    torch.bfloat16
    """
    check_shard_bytes(shard_bytes)
    target = Path(target)
    if shard_bytes is None and target.is_dir():
        raise CheckpointError(
            f"{target} cannot be written.",
            got="a directory",
            fix=f"{target}/model.safetensors, or a size of files that go into it",
        )
    source = partial(open_model_tensors, weights=weights)
    write_export(checkpoint, target, naming=naming, dtype=dtype, shard_bytes=shard_bytes, open_source=source)


def write_export(
    checkpoint: str | Path | CheckpointLocation,
    target: Path,
    *,
    naming: Naming | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    open_source: Callable[[CheckpointReader], TensorSource] = open_model_tensors,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Writes the model of a checkpoint, on this rank alone, and logs its size. Raises like `export`.

    open_source: opens the tensors of the checkpoint, by their saved names
    beside: contents of the other files by name, written after the weights in this order. The last one is
        config.json, so that an interrupted export cannot be loaded
    """
    check_not_checkpoint_or_run_record(target)

    def write(files: CheckpointFiles, manifest: Manifest) -> None:
        outgoing = _build_writer(
            files, manifest, naming=naming, open_source=open_source, dtype=dtype, shard_bytes=shard_bytes
        )
        directory = target.parent if shard_bytes is None else target
        make_durable_directory(directory)
        needed, available = outgoing.total_tensor_bytes, free_disk_bytes(directory)
        check_disk_space(target, needed_bytes=needed, available_bytes=available)
        if shard_bytes is None:
            outgoing.write_file(target, list(outgoing.tensors))
        else:
            _write_directory(outgoing, target, shard_bytes=shard_bytes)
        for name, data in (beside or {}).items():
            make_durable_directory((target / name).parent)
            with open_atomic_replacement(target / name) as file:
                file.write(data)
        logger.info("exported %s to %s (%s)", files, target, format_bytes(outgoing.total_tensor_bytes))

    def export_checkpoint(files: CheckpointFiles, manifest: Manifest) -> None:
        doing = f"exporting {files} to {target}"
        run_raising_checkpoint_error(lambda: write(files, manifest), doing=doing)

    call_with_newest_checkpoint(checkpoint, export_checkpoint)


def check_shard_bytes(shard_bytes: int | None) -> None:
    """Raises SpecError for a size limit per file below 1."""
    if shard_bytes is not None and shard_bytes < 1:
        raise SpecError("no file is so small.", got=f"files of at most {shard_bytes} bytes", fix="5GB")


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
    open_source: Callable[[CheckpointReader], TensorSource],
    dtype: torch.dtype | None,
    shard_bytes: int | None,
) -> SafetensorsWriter:
    metadata = {"format": "pt", **(tied_parameter_aliases(manifest.values) if naming is None else {})}
    source = open_source(storage.CheckpointReader(files, manifest))
    saved_names = {plain: name for name, plain in names_without_wrappers(source.tensors).items()}
    shapes = {plain: source.tensors[name].shape for plain, name in saved_names.items()}
    names = map_weights_by_name(shapes, shapes, prefixes=()) if naming is None else naming(shapes)
    if not names.parts:
        raise CheckpointError(f"{files} holds no model.")
    tensors, parts = dict[str, SavedTensor](), dict[str, Sequence[BoxCopy]]()
    for name, own in names.parts.items():
        parts[name] = [replace(part, source=saved_names[part.source]) for part in own]
        saved = source.tensors[parts[name][0].source]
        if saved.torch_dtype not in DTYPES:
            raise CheckpointError(
                f"{parts[name][0].source} cannot be exported.",
                got=saved.dtype,
                why="safetensors has no such dtype",
            )
        turned = dtype is not None and saved.torch_dtype.is_floating_point
        chosen = str(dtype).removeprefix("torch.") if turned else saved.dtype
        tensors[name] = SavedTensor(shape=names.shapes[name], dtype=chosen)
    # Wide dtypes come first, so that every tensor is aligned; then the source's order, in which the experts
    # of a stack follow each other, so that its blocks and its adapter are read once.
    first = {name: (-one.torch_dtype.itemsize, parts[name][0]) for name, one in tensors.items()}
    order = sorted(tensors, key=lambda name: (first[name][0], first[name][1].source, first[name][1].begin))
    piece_bytes = _PIECE_BYTES if shard_bytes is None else min(_PIECE_BYTES, max(1, shard_bytes // 3))
    return SafetensorsWriter(source, {n: tensors[n] for n in order}, parts, metadata, piece_bytes)


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


def _write_directory(outgoing: SafetensorsWriter, directory: Path, *, shard_bytes: int) -> None:
    """Writes one file, or several and their index if they are larger than `shard_bytes`."""
    index = directory / INDEX
    index.unlink(missing_ok=True)  # it must not name files of two exports
    if outgoing.total_tensor_bytes <= shard_bytes:
        outgoing.write_file(directory / ONE_FILE, list(outgoing.tensors))
        return
    parts = outgoing.group_tensors_into_files(shard_bytes)
    names: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        outgoing.write_file(directory / file, part)
        names |= dict.fromkeys(part, file)
    contents = {"metadata": {"total_size": outgoing.total_tensor_bytes}, "weight_map": names}
    with open_atomic_replacement(index) as file:
        file.write(json.dumps(contents, indent=1).encode())


def tied_parameter_aliases(values: Mapping[str, JsonValue]) -> dict[str, str]:
    """Returns {alias: name} of tied parameters in a state's values, without the parts that wrappers add."""
    tied = values.get("tied") or {}
    if not isinstance(tied, dict):
        raise CheckpointError("the checkpoint's tied names cannot be read.", got=repr(tied))
    plain = names_without_wrappers([*tied, *(str(name) for name in tied.values())])
    return {plain[alias]: plain[str(name)] for alias, name in tied.items()}
