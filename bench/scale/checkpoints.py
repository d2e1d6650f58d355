"""Work of rank 0 in a save, and of every rank in a load, with the shards of many ranks."""

import pickle
import tempfile
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.scale.control import open_fake_group
from bench.scale.measure import Case, Row, measured
from fullshard.checkpoint import storage
from fullshard.checkpoint.files import LocalFiles, write_process_name
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.manifest import (
    METADATA,
    SHARDS,
    Manifest,
    SavedFile,
    SavedTensor,
    file_entry,
    read_manifest,
    read_manifest_and_check_sizes,
)
from fullshard.checkpoint.retention import prune_checkpoints
from fullshard.checkpoint.save_plan import SavePlan
from fullshard.checkpoint.shard_file import ShardFileTable, ShardRecord
from fullshard.checkpoint.shard_index import data_file_name
from fullshard.spec.shard_layout import Box

TENSORS = 3411  # weight and two moments of 1,137 parameters
KEPT = 50
ROWS, COLUMNS = 2, 16  # of a rank's shard


def index(ranks: int, tensors: int) -> list[Row]:
    """Plans and commits a save on rank 0, from what the ranks send, and finds the shards of one rank."""
    own = _tensors_of_rank_zero(ranks, tensors)
    with tempfile.TemporaryDirectory() as directory:
        draft = LocalFiles(Path(directory))
        write_process_name(draft)
        sent = [pickle.dumps(_report_of_rank(rank, own, draft)) for rank in range(ranks)]
        with measured() as saving:
            plan = SavePlan.from_tensors(own)
            plan.list_own_shards(own)
            written = [pickle.loads(one) for one in sent]
            files, saved = storage.write_index(draft, plan, written=written, dcp_shards=storage.DCP_SHARDS)
            manifest = _manifest(1, files, tensors=saved, ranks=ranks)
            storage.CheckpointReader(draft, manifest).read_index()
        with measured() as loading:
            reader = storage.CheckpointReader(draft, manifest)
            found = [reader.find_pieces(name, Box((0, 0), (ROWS, COLUMNS))) for name in own]
    written_bytes = sum(one.size_bytes for name, one in files.items() if name in (SHARDS, METADATA))
    problem = "" if all(len(one) == 1 for one in found) else "other shards than its own"
    return [
        Row("save: plan, index (rank 0)", ranks, saving.seconds, saving.peak, most_seconds=5),
        Row("save: gathered at rank 0", ranks, 0, sum(map(len, sent))),
        Row("save: index on disk", ranks, 0, written_bytes, most_amount=200e6),
        Row(
            "load: index (each rank)",
            ranks,
            loading.seconds,
            loading.peak,
            most_seconds=2,
            most_amount=300e6,
            problem=problem,
        ),
    ]


def _tensors_of_rank_zero(ranks: int, tensors: int) -> dict[str, Tensor]:
    """Returns tensors that all ranks share by rows, without memory."""
    open_fake_group(ranks)
    mesh, local = init_device_mesh("cpu", (ranks,)), torch.empty(ROWS, COLUMNS, device="meta")
    return {
        f"optimizer.blocks.{i}.feed_forward.gate.weight.exp_avg": DTensor.from_local(
            local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size((ROWS * ranks, COLUMNS)),
            stride=(COLUMNS, 1),
        )
        for i in range(tensors)
    }


def _report_of_rank(rank: int, own: dict[str, Tensor], draft: LocalFiles) -> storage.WrittenShards:
    """Returns what a rank sends after it has written its shards. Writes rank 0's table behind a hole."""
    name, places = data_file_name(rank), tuple((i << 15, 1 << 15) for i in range(len(own)))
    data = b""
    if rank == 0:
        pieces = tuple(
            ShardRecord(
                name=tensor,
                index=(0, 0),
                shape=(ROWS, COLUMNS),
                dtype="float32",
                offset=offset,
                length=length,
                data_offset=1024,
                digests=("0" * 32,),
            )
            for tensor, (offset, length) in zip(own, places, strict=True)
        )
        data = ShardFileTable(block_bytes=16 << 20, pieces=pieces).model_dump_json().encode()
        with (draft.path / name).open("wb") as file:
            file.seek(len(own) << 15)
            file.write(data)
    entry = file_entry(name, data, begin=len(own) << 15)
    is_small = dist.get_world_size() * len(own) <= storage.DCP_SHARDS
    fields = (entry.size_bytes, entry.digest, entry.digest_begin)
    return storage.WrittenShards(fields, (), len(own), places if is_small else ())


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
    files = {name: file_entry(name, b"") for name in (*map(data_file_name, range(ranks)), SHARDS)}
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
        Row("save: commit (rank 0)", ranks, committing.seconds, committing.peak, most_seconds=2),
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
    Case("index", index, parts=TENSORS, least=TENSORS),
    Case("commit", commit),
    Case("retention", retention, parts=KEPT, least=2),
]
