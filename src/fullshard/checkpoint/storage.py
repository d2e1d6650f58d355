"""DCP's storage interface: writes shards with their digests, and verifies them while it reads.

[Note: no pickle is read] A checkpoint may come from somebody else, and reading a pickle can run code. So the
metadata for DCP is built from the `ShardIndex` in `shards.json`, which holds the same facts. DCP's own
pickle, `.metadata`, is only written, so that torch alone can load the directory.

DCP pickles a rank's exception to send it to the coordinator, and hangs if pickling fails. So a failure to
write or to read is stored in `attempt`, whose `raise_captured` raises it. See [Note: failures are agreed on].
"""

import itertools
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from pydantic import NonNegativeInt
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from fullshard.checkpoint import shard_file
from fullshard.checkpoint.files import CheckpointFiles
from fullshard.checkpoint.manifest import (
    METADATA,
    SHARDS,
    Manifest,
    SavedFile,
    read_failure_error,
    read_verified_file,
    write_small_file,
)
from fullshard.distributed.agreement import ErrorCapture, Group, is_distributed, rank
from fullshard.distributed.ranges import TimedRange
from fullshard.errors import DamagedCheckpointError
from fullshard.spec.value import FrozenModel
from fullshard.system import files as system_files
from fullshard.torch_private.tensors import make_dcp_storage_info

T = TypeVar("T")

Check = Callable[[str, Tensor], None]
"""Raises CheckpointError if a shard, given its tensor's name and its numbers on the CPU, may not be saved."""


class DcpCheckpointWriter(StorageWriter):
    """DCP's writer of this rank's shards into one data file of a draft, with a table beside it.

    attempt: failure of this rank, if any
    written: manifest's entries of both files; on rank 0 also of `.metadata` and the index
    metadata: DCP's metadata, on rank 0
    """

    def __init__(self, draft: CheckpointFiles, *, check: Check) -> None:
        self.draft, self.check = draft, check
        self.attempt = ErrorCapture()
        self.written: dict[str, SavedFile] = {}
        self.metadata: Metadata | None = None

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, *args: object, **kwargs: object) -> None: ...  # signature: DCP's

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        with self.attempt, TimedRange("write"):
            name = f"__{rank()}_0.distcp"  # as DCP names a rank's first file
            # One at a time: a shard on a GPU is on the host only while it is written.
            shards = (
                (one.index.fqn, tuple(one.index.offset or ()), cast(Tensor, planner.resolve_data(one)))
                for one in plan.items
            )
            pieces, self.written = write_shards(self.draft, name, shards=shards, check=self.check)
            for item, piece in zip(plan.items, pieces, strict=True):
                info = make_dcp_storage_info(filesystem, name, offset=piece.offset, length=piece.length)
                results.append(WriteResult(index=item.index, size_in_bytes=piece.length, storage_data=info))
        return _completed_future(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, as DCP's own storage does, and the index of the shards. Called on rank 0."""
        with self.attempt:
            metadata.storage_data = {one.index: one.storage_data for many in results for one in many}
            metadata.storage_meta = None
            metadata.version = filesystem.CURRENT_DCP_VERSION
            self.metadata = metadata
            self.written[METADATA] = write_small_file(self.draft, METADATA, data=pickle.dumps(metadata))
            index = ShardIndex.from_dcp_metadata(metadata).model_dump_json().encode()
            self.written[SHARDS] = write_small_file(self.draft, SHARDS, data=index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True


def write_shards(
    draft: CheckpointFiles, name: str, *, shards: Iterable[tuple[str, Sequence[int], Tensor]], check: Check
) -> tuple[Sequence[shard_file.ShardRecord], dict[str, SavedFile]]:
    """Writes shards into the data file `name`, and its table beside it. Writes nothing without shards.

    shards: (name of the tensor, position of the shard in the tensor, shard) of each
    check: called with each shard once it is on the CPU, so that a check neither waits for a GPU nor reads a
        drive again

    Returns the records, in the order of the shards, and the manifest's entries for both files.
    """
    shards = iter(shards)
    some = next(shards, None)
    if some is None:
        return (), {}
    with draft.create_file(name) as file, shard_file.ShardFileWriter(file) as pieces, _no_zip_checksums():
        for tensor_name, index, shard in itertools.chain([some], shards):
            on_cpu = shard.detach().cpu()
            check(tensor_name, on_cpu)
            pieces.write_tensor(tensor_name, on_cpu, index=index)
    table = pieces.table
    described = write_small_file(draft, f"{name}{shard_file.SUFFIX}", data=table.model_dump_json().encode())
    return table.pieces, {
        name: SavedFile(size_bytes=table.data_file_bytes),
        f"{name}{shard_file.SUFFIX}": described,
    }


class DcpCheckpointReader(StorageReader):
    """DCP's reader of a checkpoint, which verifies all bytes that it reads."""

    def __init__(self, files: CheckpointFiles, manifest: Manifest) -> None:
        self.files, self.manifest = files, manifest
        self.attempt = ErrorCapture()
        self._metadata: Metadata | None = None
        self._tables: dict[str, shard_file.ShardFileTable] = {}
        self._buffer = memoryview(b"")

    def reset(self, checkpoint_id: object = None) -> None: ...

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # signature: DCP's StorageReader
        """Returns DCP's metadata, built from the index: [Note: no pickle is read]. Raises CheckpointError."""
        if self._metadata is None:
            source = f"{self.files}/{SHARDS}"
            data = read_verified_file(self.files, self.manifest, name=SHARDS)
            index = shard_file.parse_checkpoint_json(ShardIndex, data, source=source)
            self._metadata = index.to_dcp_metadata(self.manifest, source=source)
        return self._metadata

    def set_up_storage_reader(self, *args: object, **kwargs: object) -> None: ...  # signature: DCP's

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self.attempt:
            places = cast(dict[MetadataIndex, tuple[str, int]], self.read_metadata().storage_data)

            def file_and_offset(item: ReadItem) -> tuple[str, int]:
                return places[item.storage_index]

            items = sorted(plan.items, key=file_and_offset)  # in file order
            for name, group in itertools.groupby(items, key=lambda item: file_and_offset(item)[0]):
                pieces = {piece.offset: piece for piece in self.read_table(name).pieces}
                with self.open_data_file(name) as file:
                    for item in group:
                        piece = pieces.get(file_and_offset(item)[1])
                        target = planner.resolve_tensor(item).detach()
                        self.check_piece_and_read_part_into(
                            file, piece, offsets=item.storage_offsets, target=target
                        )
                        planner.commit_tensor(item, target)
        return _completed_future(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def read_table(self, name: str) -> shard_file.ShardFileTable:
        """Returns the table of a data file."""
        if name not in self._tables:
            data = read_verified_file(self.files, self.manifest, name=f"{name}{shard_file.SUFFIX}")
            table = shard_file.parse_checkpoint_json(
                shard_file.ShardFileTable, data, source=f"{self.files}/{name}{shard_file.SUFFIX}"
            )
            if len(self._buffer) < table.block_bytes:
                self._buffer = memoryview(bytearray(table.block_bytes))
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

    def check_piece_and_read_part_into(
        self, file: BinaryIO, piece: shard_file.ShardRecord | None, *, offsets: Sequence[int], target: Tensor
    ) -> None:
        """Fills `target` as `shard_file.read_verified_part_into` does. Checks the dtype of `piece`."""
        if piece is None or piece.dtype != str(target.dtype).removeprefix("torch."):
            differ = f"{SHARDS} and the tables of pieces differ"
            raise DamagedCheckpointError(f"{self.files} is damaged.", got=differ)
        shard_file.read_verified_part_into(file, piece, offsets=offsets, target=target, scratch=self._buffer)


def write_with_dcp(
    tensors: Mapping[str, Tensor], draft: CheckpointFiles, *, check: Check, group: Group
) -> tuple[dict[str, SavedFile], Metadata | None]:
    """Writes this rank's part of `tensors` into `draft` with DCP. Collective; may raise on one rank alone.

    check: see `write_shards`

    Returns the manifest's entries of the files that this rank wrote, and on rank 0 DCP's metadata.
    """
    writer = DcpCheckpointWriter(draft, check=check)
    # In DCP, a rank that is done with its `write` waits for the others.
    with _suppress_single_process_warning(), TimedRange("agreement"):
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=not is_distributed())
    writer.attempt.raise_captured()
    return writer.written, writer.metadata


def build_reader(files: CheckpointFiles, manifest: Manifest) -> DcpCheckpointReader:
    """Returns a reader of a checkpoint, after reading its index. Raises CheckpointError."""
    reader = DcpCheckpointReader(files, manifest)
    reader.read_metadata()
    return reader


def read_with_dcp(tensors: Mapping[str, Tensor], reader: DcpCheckpointReader, *, group: Group = None) -> None:
    """Fills this rank's part of `tensors` with DCP. Collective. May raise on one rank."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _suppress_single_process_warning():
        dcp.load(
            dict(tensors),
            storage_reader=reader,
            planner=planner,
            process_group=group,
            no_dist=not is_distributed(),
        )
    reader.attempt.raise_captured()


def write_dcp_directory(
    directory: Path, state: Mapping[str, object], *, names: Mapping[Tensor, str], reader: DcpCheckpointReader
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
                read_with_dcp({names[value]: values}, reader)
                torch.save(values, file)
            else:
                file.write(value.getbuffer())
            info = make_dcp_storage_info(filesystem, path.name, offset=begin, length=file.tell() - begin)
            metadata.storage_data[item.index] = info
    metadata.version = filesystem.CURRENT_DCP_VERSION
    system_files.write_file_atomically(directory / METADATA, pickle.dumps(metadata))


@contextmanager
def _suppress_single_process_warning() -> Generator[None]:
    if is_distributed():  # then DCP does not warn, and a filter would make other warnings repeat
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


@contextmanager
def _no_zip_checksums() -> Generator[None]:
    """Turns off torch.save's CRC-32 meanwhile: it costs more than fullshard's digests, and is never read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _completed_future(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


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
        places = [
            (name, place.relative_path, place.offset, tuple(chunk.offsets), tuple(chunk.sizes))
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
            if (place := metadata.storage_data.get(MetadataIndex(name, chunk.offsets))) is not None
        ]
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
        if strange := set(self.files) - set(manifest.data_file_names):
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
