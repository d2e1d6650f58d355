"""Reads the tensors of a checkpoint by ranges of their elements, for checkpoints of any ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fullshard.checkpoint.manifest import Manifest, SavedTensor
from fullshard.checkpoint.shard_file import SUFFIX, ShardRecord
from fullshard.checkpoint.storage import Reader
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.weight_map import Part, row_major
from fullshard.weights.strided import moves_into


class TensorSource(Protocol):
    """Tensors by name, read by ranges of their elements."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]: ...

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        """Fills the flat `target` with elements of the tensor `name` from `begin` on, row-major."""
        ...


@dataclass(frozen=True)
class _ShardLocation:
    """A piece of a tensor, and its data file."""

    file: str
    piece: ShardRecord


class SavedModel:
    """The model tensors of a checkpoint. Every read verifies the blocks that it touches."""

    def __init__(self, reader: Reader) -> None:
        manifest = reader.manifest
        if manifest.layout == "ranks":
            raise CheckpointError(
                f"{reader.files} cannot be exported.",
                got='layout = "ranks"',
                why="its tensors are in parts, each a rank's own",
                fix='load it on its ranks and save it with checkpoint.layout = "sharded"',
            )
        self._reader = reader
        self.tensors: Mapping[str, SavedTensor] = manifest.model_tensors
        self._places = _places(reader, manifest)

    def read_into(self, target: Tensor, name: str, *, begin: int) -> None:
        """Fills the flat `target` with elements of the tensor `name` from `begin` on, row-major.

        Raises DamagedCheckpointError, CheckpointError.
        """
        shape = self.tensors[name].shape
        places = self._places[name]
        if all(tuple(place.piece.shape[1:]) == shape[1:] for place in places):
            self._read_rows(target, name, begin=begin)
            return
        # The pieces are boxes: assemble the rows that contain the range first.
        row = math.prod(shape[1:])
        first, last = begin // row, -(-(begin + target.numel()) // row)
        rows = torch.empty((last - first, *shape[1:]), dtype=target.dtype)
        parts = [
            Part(str(number), 0, row_major(one.piece.shape), one.piece.index, one.piece.shape)
            for number, one in enumerate(places)
        ]
        for move in moves_into(rows, parts, offsets=(first, *(0 for _ in shape[1:]))):
            elements = torch.empty(move.span, dtype=target.dtype)
            self._read_piece(elements, places[int(move.source)], begin=move.begin)
            move.take(elements)
        start = begin - first * row
        target.copy_(rows.reshape(-1)[start : start + target.numel()])

    def _read_rows(self, target: Tensor, name: str, *, begin: int) -> None:
        """Reads from pieces that are whole rows. Each holds a range of the flat tensor."""
        row = math.prod(self.tensors[name].shape[1:])
        for place in self._places[name]:
            start = place.piece.index[0] * row if place.piece.index else 0
            low = max(start, begin)
            high = min(start + math.prod(place.piece.shape), begin + target.numel())
            if low < high:
                self._read_piece(target[low - begin : high - begin], place, begin=low - start)

    def _read_piece(self, target: Tensor, place: _ShardLocation, *, begin: int) -> None:
        flat = place.piece.model_copy(update={"shape": (math.prod(place.piece.shape),), "index": (0,)})
        with self._reader.opened(place.file) as file:
            self._reader.read_part(file, flat, offsets=(begin,), target=target)


def _places(reader: Reader, manifest: Manifest) -> dict[str, list[_ShardLocation]]:
    """Returns the pieces of each model tensor, ordered by row. One of several copies is used."""
    found: dict[str, dict[tuple[int, ...], _ShardLocation]] = {name: {} for name in manifest.model_tensors}
    for file in manifest.data_files:
        for piece in reader.table(file).pieces:
            if piece.name in found:
                found[piece.name].setdefault(piece.index, _ShardLocation(file, piece))
    for name, tensor in manifest.model_tensors.items():
        held = sum(math.prod(place.piece.shape) for place in found[name].values())
        if held != math.prod(tensor.shape):
            for file in manifest.files:
                if f"{file}{SUFFIX}" in manifest.files:
                    reader.table(file)  # raises for a file on another node's disk
            raise _incomplete(reader, name, tensor=tensor, held=held)
    return {
        name: sorted(places.values(), key=lambda place: place.piece.index) for name, places in found.items()
    }


def _incomplete(reader: Reader, name: str, *, tensor: SavedTensor, held: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{reader.files} does not hold all of {name}.",
        got=f"{held} of {math.prod(tensor.shape)} elements",
        why="the tables of its pieces do not cover the tensor",
    )
