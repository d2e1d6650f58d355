"""Writes the shards of a checkpoint with their digests, and verifies them while it reads.

[Note: no pickle is read] A checkpoint may come from somebody else, and reading a pickle can run code. So
shards are found by the `ShardIndex` in `shards.json`. `.metadata`, the pickle of torch.distributed.checkpoint
(DCP), is only written, so that torch alone can load the directory. It has an entry per shard, so it is left
out of checkpoints of more than DCP_SHARDS shards.
"""

import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import shard_file
from fullshard.checkpoint.files import WRITER, CheckpointFiles
from fullshard.checkpoint.manifest import (
    METADATA,
    SHARDS,
    Manifest,
    SavedFile,
    SavedTensor,
    file_entry,
    read_failure_error,
    read_verified_file,
    write_small_file,
)
from fullshard.checkpoint.save_plan import OwnShard, SavePlan
from fullshard.checkpoint.shard_index import LocatedShard, ShardIndex, ShardPosition, data_file_name
from fullshard.distributed.agreement import rank
from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.shard_boxes import ShardPlacer
from fullshard.distributed.tensors import detached_local_tensor
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.spec.shard_layout import Box
from fullshard.system import files as system_files
from fullshard.torch_private.tensors import make_dcp_storage_info

DCP_SHARDS = 1 << 17
"""Most shards of a checkpoint for which `.metadata` is written: 24 MB, which rank 0 makes in seconds."""

Check = Callable[[str, Tensor], None]
"""Raises CheckpointError if a shard, given its tensor's name and its numbers on the CPU, may not be saved."""


class ListedShard(NamedTuple):
    """A shard of the tensor `name` (`dtype`, shape `whole`) that the index lists; `length` of its piece."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    position: ShardPosition
    length: int


class WrittenShards(NamedTuple):
    """Report of a rank to rank 0 of what it wrote.

    file: fields of the data file's SavedFile; None without shards
    listed: shards that the index lists
    others: number of the other shards
    pieces: (offset, length) of these, in the order of the plan; empty if `.metadata` is not written
    """

    file: tuple[int, str | None, int] | None
    listed: tuple[ListedShard, ...]
    others: int
    pieces: tuple[tuple[int, int], ...]


def write_own_shards(
    own: Sequence[OwnShard], plan: SavePlan, *, draft: CheckpointFiles, check: Check, dcp_shards: int
) -> WrittenShards:
    """Writes the shards `own` of this rank. May raise on one rank alone.

    check: see `write_shards`
    dcp_shards: most shards for which `.metadata` is written
    """
    with TimedRange("write"):
        shards = ((one.name, one.start, one.shard) for one in own)
        records, file = write_shards(draft, data_file_name(rank()), shards=shards, check=check)
    listed, others = list[ListedShard](), list[tuple[int, int]]()
    for one, piece in zip(own, records, strict=True):
        if one.is_listed:
            position = ShardPosition(rank(), piece.offset, piece.index, piece.shape)
            listed.append(ListedShard(one.name, piece.dtype, one.saved.shape, position, piece.length))
        else:
            others.append((piece.offset, piece.length))
    sent = tuple(others) if plan.shard_count <= dcp_shards else ()
    entry = file and (file.size_bytes, file.digest, file.digest_begin)
    return WrittenShards(entry, tuple(listed), len(others), sent)


def write_index(
    draft: CheckpointFiles, plan: SavePlan, *, written: Sequence[WrittenShards], dcp_shards: int
) -> tuple[dict[str, SavedFile], dict[str, SavedTensor]]:
    """Writes the index of the shards, and `.metadata` unless there are too many. Called on rank 0.

    written: what each rank wrote
    dcp_shards: most shards for which `.metadata` is written

    Returns the manifest's entries of all files and tensors. Raises CheckpointError if a shard is missing.
    """
    count = plan.shard_count
    if (others := sum(one.others for one in written)) != count:
        got = f"{others} shards, where the layouts have {count}"
        raise CheckpointError("a part of the state was not written.", got=got)
    tensors = dict(plan.tensors)
    places: defaultdict[str, dict[tuple[int, ...], ShardPosition]] = defaultdict(dict)
    ranks = [number for number, one in enumerate(written) if one.listed]
    for number, listing in enumerate(ranks):
        for name, dtype, whole, position, _ in written[listing].listed:
            if name not in tensors:
                tensors[name] = SavedTensor(shape=whole, dtype=dtype)
            # A shard that several ranks wrote is taken from the first.
            places[name].setdefault(position.start, position._replace(file=number))
    index = ShardIndex(
        files=tuple(map(data_file_name, ranks)),
        shards={name: tuple(some.values()) for name, some in places.items()},
        meshes=plan.meshes,
        layouts=dict(plan.layouts),
    )
    entries = [(data_file_name(number), one.file) for number, one in enumerate(written) if one.file]
    files = {n: SavedFile(size_bytes=size, digest=d, digest_begin=at) for n, (size, d, at) in entries}
    files[WRITER] = file_entry(WRITER, draft.read_file(WRITER))
    text = index.model_dump_json().encode()
    files[SHARDS] = write_small_file(draft, SHARDS, data=text)
    if count <= dcp_shards:
        positions = tuple((one.listed, one.pieces) for one in written)
        data = _encode_dcp_metadata(text, tuple(tensors.items()), written=positions)
        files[METADATA] = write_small_file(draft, METADATA, data=data)
    return files, dict(sorted(tensors.items()))


@lru_cache(maxsize=1)  # the next save of a run has the same shards at the same positions
def _encode_dcp_metadata(
    index: bytes,
    tensors: tuple[tuple[str, SavedTensor], ...],
    *,
    written: tuple[tuple[tuple[ListedShard, ...], tuple[tuple[int, int], ...]], ...],
) -> bytes:
    """Returns `.metadata`, by which torch alone loads the directory.

    written: `listed` and `pieces` of each rank's `WrittenShards`
    """
    pieces = {data_file_name(number): iter(some) for number, (_, some) in enumerate(written)}
    lengths = {
        (data_file_name(number), one.position.offset): one.length
        for number, (listed, _) in enumerate(written)
        for one in listed
    }
    shards, described = ShardIndex.model_validate_json(index), dict[str, TensorStorageMetadata]()
    places = dict[MetadataIndex, object]()
    for name, saved in tensors:  # in the order of the plan, as `pieces` are
        chunks = list[ChunkStorageMetadata]()
        for file, (start, shape), offset in shards.iterate_shards(name, saved.shape):
            begin, length = next(pieces[file]) if offset is None else (offset, lengths[file, offset])
            at = torch.Size(start)
            chunks.append(ChunkStorageMetadata(at, torch.Size(shape)))
            info = make_dcp_storage_info(filesystem, file, offset=begin, length=length)
            places[MetadataIndex(name, at)] = info
        properties = TensorProperties(dtype=saved.torch_dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(saved.shape), chunks)
    metadata = Metadata(state_dict_metadata={**described}, storage_data=places)
    metadata.version = filesystem.CURRENT_DCP_VERSION
    return pickle.dumps(metadata)


def write_shards(
    draft: CheckpointFiles, name: str, *, shards: Iterable[tuple[str, Sequence[int], Tensor]], check: Check
) -> tuple[Sequence[shard_file.ShardRecord], SavedFile | None]:
    """Writes shards and their table into the data file `name`. Writes nothing without shards.

    shards: (name of the tensor, position of the shard in the tensor, shard) of each
    check: called with each shard once it is on the CPU, so that a check neither waits for a GPU nor reads a
        drive again

    Returns the records, in the order of the shards, and the manifest's entry for the file.
    """
    shards = iter(shards)
    some = next(shards, None)
    if some is None:
        return (), None
    with draft.create_file(name) as file, shard_file.ShardFileWriter(file) as pieces, _no_zip_checksums():
        for tensor_name, index, shard in itertools.chain([some], shards):
            on_cpu = shard.detach().cpu()
            check(tensor_name, on_cpu)
            pieces.write_tensor(tensor_name, on_cpu, index=index)
        table = pieces.table
        data = table.model_dump_json().encode()
        entry = file_entry(name, data, begin=table.pieces_bytes)
        file.write(data)
    return table.pieces, entry


class CheckpointReader:
    """Reads tensors of a checkpoint, and verifies all bytes that it reads."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest) -> None:
        self.files, self.manifest = files, manifest
        self._index: ShardIndex | None = None
        self._tables: dict[str, shard_file.ShardFileTable] = {}
        self._pieces: dict[str, dict[tuple[str, tuple[int, ...]], shard_file.ShardRecord]] = {}
        self._buffer = shard_file.BlockBuffer()

    def read_index(self, data: bytes | None = None) -> ShardIndex:
        """Returns the index of the shards.

        data: bytes of the index, if they were read already

        Raises DamagedCheckpointError unless the index covers the manifest's tensors exactly.
        """
        if self._index is None:
            source = f"{self.files}/{SHARDS}"
            data = read_verified_file(self.files, self.manifest, name=SHARDS) if data is None else data
            index = shard_file.parse_checkpoint_json(ShardIndex, data, source=source)
            if problem := index.find_inconsistency(self.manifest):
                raise DamagedCheckpointError(f"{source} is damaged.", got=problem)
            self._index = index
        return self._index

    def find_pieces(self, name: str, part: Box | None = None) -> list[tuple[str, shard_file.ShardRecord]]:
        """Returns (data file, piece) of each shard of a tensor with elements of `part`, by default all.

        Raises DamagedCheckpointError unless the tables of the files have them.
        """
        found = list[tuple[str, shard_file.ShardRecord]]()
        for one in self.read_index().iterate_shards(name, self.manifest.tensors[name].shape, part=part):
            if (piece := self._find_piece(name, one)) is None:
                differ = f"{SHARDS} and the tables of pieces differ about {name} in {one.file}"
                raise DamagedCheckpointError(f"{self.files} is damaged.", got=differ)
            found.append((one.file, piece))
        return found

    def list_tensors_in_file(self, file: str, *, absent: bool = False) -> list[str]:
        """Returns the tensors that have shards in a data file according to the index.

        Raises CheckpointError for an unreadable index or table.

        absent: whether to return only tensors with shards that the table of the file lacks
        """
        shards = self.read_index().iterate_shards_in_file(file, self.manifest.tensors)
        return sorted({name for name, one in shards if not absent or self._find_piece(name, one) is None})

    def _find_piece(self, name: str, shard: LocatedShard) -> shard_file.ShardRecord | None:
        """Returns the piece of a shard of the tensor `name`; None if the table of its file lacks it."""
        if shard.file not in self._pieces:
            pieces = self.read_table(shard.file).pieces
            self._pieces[shard.file] = {(piece.name, piece.index): piece for piece in pieces}
        piece = self._pieces[shard.file].get((name, shard.box.begin))
        kind = (shard.box.size, self.manifest.tensors[name].dtype)
        is_same = piece and (piece.shape, piece.dtype) == kind and shard.offset in (None, piece.offset)
        return piece if is_same else None

    def read_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills this rank's part of `tensors`. May raise on one rank alone."""
        reads = list[tuple[str, shard_file.ShardRecord, Tensor, tuple[int, ...]]]()
        placer = ShardPlacer()
        for name, tensor in tensors.items():
            local = detached_local_tensor(tensor)
            placed = placer.place(tensor) if isinstance(tensor, DTensor) else None
            start, _ = placed[1] if placed else ((0,) * local.ndim, ())
            part = Box(start, tuple(local.shape))
            reads += [(*one, local, start) for one in self.find_pieces(name, part)] if local.numel() else []
        reads.sort(key=lambda one: (one[0], one[1].offset))
        for file_name, group in itertools.groupby(reads, key=lambda one: one[0]):
            with self.open_data_file(file_name) as file:
                for _, piece, local, start in group:
                    target, offsets = local, list[int]()
                    for dim, (own, at) in enumerate(zip(start, piece.index, strict=True)):
                        low = max(own, at)
                        high = min(own + local.shape[dim], at + piece.shape[dim])
                        target = target.narrow(dim, low - own, high - low)
                        offsets.append(low - at)
                    self.read_part_into(file, piece, offsets=offsets, target=target)

    def read_table(self, name: str) -> shard_file.ShardFileTable:
        if name not in self._tables:
            beside = f"{name}{shard_file.SUFFIX}"
            file = beside if beside in self.manifest.files else name
            data = read_verified_file(self.files, self.manifest, name=file)
            table = shard_file.parse_checkpoint_json(
                shard_file.ShardFileTable, data, source=f"{self.files}/{file}"
            )
            if self._buffer.memory.nbytes < table.block_bytes:
                self._buffer = shard_file.BlockBuffer(table.block_bytes)
            self._tables[name] = table
        return self._tables[name]

    @contextmanager
    def open_data_file(self, name: str) -> Generator[BinaryIO]:
        """Opens a data file for reading. Raises CheckpointError instead of OSError while it is open."""
        try:
            with self.files.open_file(name) as file:
                yield file
        except OSError as error:
            raise read_failure_error(error, f"{self.files} cannot be read.", name=name) from error

    def read_part_into(
        self, file: BinaryIO, piece: shard_file.ShardRecord, *, offsets: Sequence[int], target: Tensor
    ) -> None:
        """Fills `target` as `shard_file.read_verified_part_into` does."""
        shard_file.read_verified_part_into(file, piece, offsets=offsets, target=target, buffer=self._buffer)


def write_dcp_directory(
    directory: Path, state: Mapping[str, object], *, names: Mapping[Tensor, str], reader: CheckpointReader
) -> None:
    """Writes nested values as a directory that DCP loads; `.metadata` completes it. Not collective.

    names: name in the checkpoint of each tensor in `state`, whose values are read when they are written
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    path, metadata.storage_data = directory / "__0_0.distcp", {}
    with _no_zip_checksums(), system_files.write_new_file(path) as file:
        for item in planner.finish_plan(plan).items:
            begin, value = file.tell(), planner.resolve_data(item)
            if isinstance(value, Tensor):
                values = torch.empty_like(value)
                reader.read_tensors({names[value]: values})
                torch.save(values, file)
            else:
                file.write(value.getbuffer())
            info = make_dcp_storage_info(filesystem, path.name, offset=begin, length=file.tell() - begin)
            metadata.storage_data[item.index] = info
    metadata.version = filesystem.CURRENT_DCP_VERSION
    system_files.write_file_atomically(directory / METADATA, pickle.dumps(metadata))


@contextmanager
def _no_zip_checksums() -> Generator[None]:
    """Turns off torch.save's CRC-32 meanwhile: it costs more than fullshard's digests, and is never read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
