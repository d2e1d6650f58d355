"""Work of rank 0 in a save, and of every rank in a load, with the shards of many ranks."""

import pickle
import tempfile
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from bench.scale.measure import Case, Row, measured
from fullshard.checkpoint import storage
from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.manifest import (
    SHARDS,
    Manifest,
    SavedFile,
    SavedTensor,
    read_manifest,
    read_manifest_and_check_sizes,
    small_file_entry,
    step_name,
)
from fullshard.checkpoint.retention import prune_checkpoints
from fullshard.checkpoint.save import _check_and_list_written_tensors
from fullshard.checkpoint.shard_file import SUFFIX
from fullshard.torch_private.tensors import make_dcp_storage_info

TENSORS = 3411  # weight and two moments of 1,137 parameters
KEPT = 50
WIDE_TENSORS = 1134  # of these, matrices of more columns than rows: key, value, down
ROWS, COLUMNS = 2, 16  # of a rank's shard


def index(ranks: int, tensors: int) -> list[Row]:
    """Plans and commits a save on rank 0, from what the ranks send, and reads it on one rank."""
    with tempfile.TemporaryDirectory() as directory:
        place = LocalLocation(Path(directory))
        files = LocalFiles(place.path / step_name(1))
        files.path.mkdir()
        sent = [_send_of_rank(rank, (ROWS * ranks, COLUMNS), tensors=tensors) for rank in range(ranks)]
        with measured() as saving:
            manifest = _index_and_manifest(sent, files)
        with measured() as loading:
            storage.DcpCheckpointReader(files, manifest).read_metadata()
        index_bytes = (files.path / SHARDS).stat().st_size
    gathered = sum(len(one) for pair in sent for one in pair)
    return [
        Row("save: plan, index (rank 0)", ranks, saving.seconds, saving.peak, most_seconds=5),
        Row("save: gathered at rank 0", ranks, 0, gathered),
        Row("save: index on disk", ranks, 0, index_bytes, most_amount=200e6),
        Row(
            "load: index (each rank)", ranks, loading.seconds, loading.peak, most_seconds=2, most_amount=300e6
        ),
    ]


def wide_tensors(ranks: int, tensors: int) -> list[Row]:
    """Plans a save of tensors that are sharded by rows and have more columns, on rank 0."""
    shape = (ROWS * ranks, 2 * ROWS * ranks)
    with tempfile.TemporaryDirectory() as directory:
        sent = [_send_of_rank(rank, shape, tensors=tensors) for rank in range(ranks)]
        with measured() as found:
            _index_and_manifest(sent, LocalFiles(Path(directory)))
    return [Row("save: plan of wide tensors", ranks, found.seconds, most_seconds=5)]


def _send_of_rank(rank: int, shape: tuple[int, int], *, tensors: int) -> tuple[bytes, bytes]:
    """Returns what a rank sends to rank 0: its plan, and the results of its writes."""
    items, results = list[WriteItem](), list[WriteResult]()
    size, name = torch.Size(shape), f"__{rank}_0.distcp"
    chunk = ChunkStorageMetadata(torch.Size((ROWS * rank, 0)), torch.Size((ROWS, shape[1])))
    for number in range(tensors):
        at = MetadataIndex(f"optimizer.blocks.{number}.feed_forward.gate.weight.exp_avg", chunk.offsets, rank)
        data = TensorWriteData(chunk, TensorProperties(), size)
        items.append(WriteItem(at, WriteItemType.SHARD, tensor_data=data))
        info = make_dcp_storage_info(filesystem, name, offset=number << 20, length=1 << 15)
        results.append(WriteResult(at, 1 << 15, info))
    names = {one.index.fqn: (one.index.fqn,) for one in items}
    return pickle.dumps(SavePlan(items, planner_data=names)), pickle.dumps(results)


def _index_and_manifest(sent: list[tuple[bytes, bytes]], draft: LocalFiles) -> Manifest:
    """Does what rank 0 does between the gather of plans and the commit."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan([pickle.loads(plan) for plan, _ in sent])
    writer = storage.DcpCheckpointWriter(draft, check=lambda name, tensor: None)
    writer.finish(metadata, [pickle.loads(results) for _, results in sent])
    files = _files_of_ranks(len(sent), data_bytes=1 << 40) | writer.written
    return _manifest(1, files, tensors=_check_and_list_written_tensors(metadata, files), ranks=len(sent))


def _files_of_ranks(ranks: int, *, data_bytes: int = 0) -> dict[str, SavedFile]:
    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    empty = small_file_entry(b"")
    return {n: SavedFile(size_bytes=data_bytes) for n in names} | {f"{n}{SUFFIX}": empty for n in names}


def _manifest(
    step: int, files: dict[str, SavedFile], *, tensors: dict[str, SavedTensor], ranks: int
) -> Manifest:
    return Manifest(
        step=step,
        values={"tokens": 1},
        tensors=tensors,
        files=files,
        world_size=ranks,
        torch_version=torch.__version__,
        fullshard_version="0",
    )


def _draft_of_empty_files(place: LocalLocation, step: int, *, ranks: int) -> tuple[LocalFiles, Manifest]:
    """Returns a draft with the files of all ranks, which are empty, and its manifest."""
    draft = cast(LocalFiles, place.clean_up_and_create_draft(step, needed_bytes=0))
    files = _files_of_ranks(ranks) | {SHARDS: small_file_entry(b"")}
    for name in files:
        (draft.path / name).touch()
    tensors = {f"model.{i}.weight": SavedTensor(shape=(4, 4), dtype="float32") for i in range(TENSORS)}
    return draft, _manifest(step, files, tensors=tensors, ranks=ranks)


def commit(ranks: int, _: int) -> list[Row]:
    """Commits a draft with the files of all ranks, and reads its manifest as a load does."""
    with tempfile.TemporaryDirectory() as directory:
        place = LocalLocation(Path(directory))
        draft, manifest = _draft_of_empty_files(place, 1, ranks=ranks)
        with measured() as committing:
            target = place.commit(draft, manifest)
            read_manifest_and_check_sizes(target)
        with measured() as reading:
            read_manifest(target)
        written = (Path(directory) / target.name / "manifest.json").stat().st_size
    return [
        Row("save: commit (rank 0)", ranks, committing.seconds, committing.peak, most_seconds=1),
        Row("load: manifest (rank 0)", ranks, reading.seconds, written, most_seconds=1),
    ]


def retention(ranks: int, kept: int) -> list[Row]:
    """Prunes beside checkpoints that are kept for good, of which earlier saves have read the newest."""
    with tempfile.TemporaryDirectory() as directory:
        place = LocalLocation(Path(directory))
        for step in range(1, kept + 2):
            place.commit(*_draft_of_empty_files(place, step, ranks=ranks))
        with measured() as found:
            prune_checkpoints(place, keep=2, keep_every=1, step=kept + 1, good={kept: None, kept + 1: None})
    return [Row(f"save: retention, {KEPT} kept", ranks, found.seconds, most_seconds=1)]


CHECKPOINT_CASES = [
    Case("index", index, parts=TENSORS, least=4),
    Case("wide tensors", wide_tensors, parts=WIDE_TENSORS),
    Case("commit", commit),
    Case("retention", retention, parts=KEPT, least=2),
]
