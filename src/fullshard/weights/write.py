"""Writes tensors of a checkpoint to safetensors files, piece by piece."""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.errors import CheckpointError
from fullshard.spec.weight_map import BoxCopy, WeightMap
from fullshard.system import disk
from fullshard.weights.files import DTYPES, encode_header
from fullshard.weights.strided import StridedCopy, iterate_copies_into, split_copy
from fullshard.weights.tensor_source import TensorSource

# Piece size for larger tensors: much more than a checkpoint's digest block of 16 MiB.
_PIECE_BYTES = 128 << 20


@dataclass(frozen=True)
class SafetensorsWriter:
    """Writes tensors of a checkpoint to safetensors files, piece by piece.

    what: name of the checkpoint for messages
    source: tensors of the checkpoint
    tensors: shape and dtype of each tensor as written, in the order of the files
    parts: elements of the source that each tensor consists of
    metadata: metadata of the files
    piece_bytes: size of a piece; three are in memory: as saved, as written, and the next one while it is read
    """

    what: str
    source: TensorSource
    tensors: Mapping[str, SavedTensor]
    parts: Mapping[str, Sequence[BoxCopy]]
    metadata: Mapping[str, str]
    piece_bytes: int

    @classmethod
    def for_mapped_tensors(
        cls,
        source: TensorSource,
        names: WeightMap,
        *,
        what: str,
        dtype: torch.dtype | None = None,
        metadata: Mapping[str, str],
        shard_bytes: int | None,
    ) -> "SafetensorsWriter":
        """Builds the writer for the tensors of `names`.

        dtype: dtype of all floating-point tensors; None keeps each as saved
        shard_bytes: size limit per file, which also limits the size of a piece

        Raises CheckpointError if there are no tensors, and for a dtype that safetensors does not support.
        """
        if not names.parts:
            raise CheckpointError(f"{what} holds no model.")
        tensors: dict[str, SavedTensor] = {}
        for name, parts in names.parts.items():
            saved = source.tensors[parts[0].source]
            if saved.torch_dtype not in DTYPES:
                raise CheckpointError(
                    f"{parts[0].source} cannot be exported.",
                    got=saved.dtype,
                    why="safetensors has no such dtype",
                )
            turned = dtype is not None and saved.torch_dtype.is_floating_point
            chosen = str(dtype).removeprefix("torch.") if turned else saved.dtype
            tensors[name] = SavedTensor(shape=names.shapes[name], dtype=chosen)
        # Wide dtypes come first, so that every tensor is aligned; then sorted by name.
        order = sorted(tensors, key=lambda name: (-tensors[name].torch_dtype.itemsize, name))
        piece_bytes = _PIECE_BYTES if shard_bytes is None else min(_PIECE_BYTES, max(1, shard_bytes // 3))
        return cls(what, source, {n: tensors[n] for n in order}, names.parts, metadata, piece_bytes)

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
        with disk.open_atomic_replacement(target) as file, ThreadPoolExecutor(max_workers=1) as thread:
            file.write(header)
            coming = thread.submit(next, pieces, None)
            while (piece := coming.result()) is not None:
                coming = thread.submit(next, pieces, None)
                file.write(piece.reshape(-1).view(torch.uint8).numpy().data)

    def _iterate_tensor_pieces(self, name: str) -> Iterator[Tensor]:
        """Yields the tensor `name` as pieces: groups of rows that fit into `piece_bytes`."""
        tensor = self.tensors[name]
        shape = tensor.shape or (1,)
        dtypes = [tensor.torch_dtype, *(self.source.tensors[p.source].torch_dtype for p in self.parts[name])]
        widest = max(dtype.itemsize for dtype in dtypes)
        most = max(1, self.piece_bytes // max(1, math.prod(shape[1:]) * widest))
        for begin in range(0, shape[0], most):
            rows = min(most, shape[0] - begin)
            piece = torch.empty((rows, *shape[1:]) if tensor.shape else (), dtype=tensor.torch_dtype)
            offsets = (begin, *(0 for _ in shape[1:])) if tensor.shape else ()
            for move in iterate_copies_into(piece, self.parts[name], offsets=offsets):
                self._read_into_target(move)
            yield piece

    def _read_into_target(self, move: StridedCopy) -> None:
        """Fills the target of `move` from the source, through buffers of at most `piece_bytes`."""
        dtype = self.source.tensors[move.source].torch_dtype
        if move.is_contiguous and move.target.dtype == dtype:
            self.source.read_into(move.target.view(-1), move.source, begin=move.begin)
            return
        most = max(1, self.piece_bytes // dtype.itemsize)
        for part in split_copy(move, most=most, itemsize=dtype.itemsize):
            elements = torch.empty(part.span_length, dtype=dtype)
            self.source.read_into(elements, part.source, begin=part.begin)
            part.fill_target(elements)
