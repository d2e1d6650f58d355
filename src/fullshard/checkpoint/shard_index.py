"""Index of a checkpoint's shards: data file and position of every shard of every tensor.

    shards.json    the ShardIndex below, one on every disk

DCP keeps the same facts in `.metadata`, which is written so that torch alone can load the directory. It is a
pickle, and reading a pickle can run code, so fullshard never reads it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from pydantic import NonNegativeInt
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.shard_file import ShardFileTable
from fullshard.errors import DamagedCheckpointError
from fullshard.spec.value import FrozenModel


class ShardPosition(NamedTuple):
    """Position of one shard of a tensor.

    file: index of its data file in `ShardIndex.files`
    offset: byte of the data file at which its piece begins
    start: position of its first element in the whole tensor, per dim
    shape: shape of the shard
    """

    file: NonNegativeInt
    offset: NonNegativeInt
    start: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]


class ShardIndex(FrozenModel):
    """Names of the data files, and all shards of each tensor by its name. Lists a replicated shard once."""

    files: tuple[str, ...]
    shards: dict[str, tuple[ShardPosition, ...]]

    @classmethod
    def from_dcp_metadata(cls, metadata: Metadata) -> Self:
        """Builds the index of the shards that DCP's metadata lists as written."""
        return cls._from_places(
            [
                (name, place.relative_path, place.offset, tuple(chunk.offsets), tuple(chunk.sizes))
                for name, tensor in metadata.state_dict_metadata.items()
                if isinstance(tensor, TensorStorageMetadata)
                for chunk in tensor.chunks
                if (place := metadata.storage_data.get(MetadataIndex(name, chunk.offsets))) is not None
            ]
        )

    @classmethod
    def from_shard_file_tables(cls, tables: Mapping[str, ShardFileTable]) -> Self:
        """Builds the index of a checkpoint that has none, from the tables of its data files, by file name."""
        pieces = [(file, piece) for file, table in tables.items() for piece in table.pieces]
        return cls._from_places([(one.name, file, one.offset, one.index, one.shape) for file, one in pieces])

    @classmethod
    def _from_places(cls, places: Sequence[tuple[str, str, int, tuple[int, ...], tuple[int, ...]]]) -> Self:
        files = sorted({file for _, file, *_ in places})
        numbers = {file: number for number, file in enumerate(files)}
        shards: defaultdict[str, list[ShardPosition]] = defaultdict(list)
        for name, file, offset, start, shape in places:
            shards[name].append(ShardPosition(numbers[file], offset, start, shape))
        return cls(files=tuple(files), shards={name: tuple(many) for name, many in shards.items()})

    def to_dcp_metadata(self, manifest: Manifest, *, source: str) -> Metadata:
        """Returns DCP's metadata of the same shards, with (file name, offset) of each in `storage_data`.

        Raises DamagedCheckpointError, which names `source`, unless the shards cover the manifest's tensors
        exactly, and are within its data files.
        """
        if problem := self._find_inconsistency(manifest):
            raise DamagedCheckpointError(f"{source} is damaged.", got=problem)
        tensors = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=manifest.tensors[name].torch_dtype),
                size=torch.Size(manifest.tensors[name].shape),
                chunks=[ChunkStorageMetadata(torch.Size(s.start), torch.Size(s.shape)) for s in shards],
            )
            for name, shards in self.shards.items()
        }
        places = {
            MetadataIndex(name, torch.Size(one.start)): (self.files[one.file], one.offset)
            for name, shards in self.shards.items()
            for one in shards
        }
        return Metadata(state_dict_metadata={**tensors}, storage_data=places)

    def _find_inconsistency(self, manifest: Manifest) -> str | None:
        if strange := set(self.files) - set(manifest.all_data_file_names):
            return f"{min(strange)} is not a data file of this checkpoint"
        if other := self.shards.keys() ^ manifest.tensors.keys():
            return f"{min(other)} is in the index or in the manifest, but not in both"
        for name, shards in self.shards.items():
            shape = manifest.tensors[name].shape
            inside = all(
                len(one.start) == len(one.shape) == len(shape)
                and all(a + n <= whole for a, n, whole in zip(one.start, one.shape, shape, strict=True))
                and one.file < len(self.files)
                and one.offset < manifest.files[self.files[one.file]].size_bytes
                for one in shards
            )
            if not inside or sum(math.prod(one.shape) for one in shards) != math.prod(shape):
                return f"the shards of {name} are not what a tensor of shape {list(shape)} consists of"
        return None
