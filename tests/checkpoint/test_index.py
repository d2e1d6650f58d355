"""The index follows the layout of tensors, and says where their shards are, whatever the number of ranks."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.checkpoint.files import SMALL_BYTES, CheckpointFiles, LocalFiles
from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.location import LocalLocation, location_of
from fullshard.checkpoint.manifest import SavedTensor, write_small_file
from fullshard.checkpoint.save import CheckpointSaver, save
from fullshard.checkpoint.save_plan import SavePlan
from fullshard.checkpoint.shard_index import ShardIndex, ShardPosition, data_file_name
from fullshard.errors import CheckpointError
from fullshard.spec.shard_layout import Box, RankMesh, ShardLayout, cut_box
from tests.checkpoint.states import (
    State,
    assert_same,
    loaded_sharded,
    numbers,
    saved,
    saved_sharded,
    sharded,
)
from tests.checkpoint.test_strangers import replace

LAYOUTS = [
    ((3,), ((0,), ())),
    ((2, 3), ((), (1,))),
    ((2, 3), ((1, 0), ())),
    ((3, 2, 2), ((2, 1), (0,))),
    ((2, 4), ((), ())),
]


@pytest.mark.parametrize("whole", [(7, 5), (1, 4), (0, 3), (12, 12), (13, 2)])
@pytest.mark.parametrize(("mesh_shape", "cuts"), LAYOUTS)
def test_the_shards_of_a_layout_are_those_of_its_ranks_and_cover_the_tensor_once(mesh_shape, cuts, whole):
    mesh = RankMesh(mesh_shape, tuple(range(10, 10 + torch.Size(mesh_shape).numel())))
    coordinates = dict(zip(mesh.ranks, itertools.product(*map(range, mesh_shape)), strict=True))
    for copy in range(ShardLayout(0, cuts, 0).count_copies(mesh)):
        layout, seen = ShardLayout(0, cuts, copy), torch.zeros(whole, dtype=torch.int)
        shards = list(layout.iterate_shards(mesh, whole, part=Box((0, 0), whole)))
        assert len(shards) == layout.count_shards(mesh, whole)
        for rank, (start, shape) in shards:
            assert cut_box(whole, cuts, sizes=mesh_shape, coordinate=coordinates[rank]) == (start, shape)
            seen[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]] += 1
        assert (seen == 1).all()
        if seen[1:4, 1:3].shape == (3, 2):
            found = layout.iterate_shards(mesh, whole, part=Box((1, 1), (3, 2)))
            reaching = [one for one in shards if covers_some_of(one[1], slice(1, 4), slice(1, 3))]
            assert list(found) == reaching


def covers_some_of(box: Box, rows: slice, columns: slice) -> bool:
    (row, column), (height, width) = box
    grid = torch.zeros(20, 20)
    grid[row : row + height, column : column + width] = 1
    return bool(grid[rows, columns].any())


def index_with_a_layout_and_listed_shards(count: int) -> tuple[ShardIndex, dict[str, SavedTensor]]:
    """Returns the index of `count` ranks, which have a row each of one tensor, and list one of another."""
    rows = tuple(ShardPosition(rank, 0, (rank, 0), (1, 2)) for rank in range(count))
    empty = ShardPosition(0, 0, (0, 0), (0, 2))
    index = ShardIndex(
        files=tuple(map(data_file_name, range(count))),
        shards={"listed": rows, "empty": (empty,)},
        meshes=(RankMesh((2, count // 2), tuple(range(count))),),
        layouts={"cut": ShardLayout(0, ((0, 1), ()), 0), "copied": ShardLayout(0, ((0,), ()), 1)},
    )
    shapes = dict.fromkeys(("listed", "cut", "copied"), (count, 2)) | {"empty": (0, 2)}
    return index, {name: SavedTensor(shape=shape, dtype="float32") for name, shape in shapes.items()}


def test_the_shards_in_a_file_are_those_that_the_index_has_there():
    index, tensors = index_with_a_layout_and_listed_shards(8)
    every = [(name, one) for name in tensors for one in index.iterate_shards(name, tensors[name].shape)]
    for file in (*index.files, "__8_0.distcp"):
        assert sorted(index.iterate_shards_in_file(file, tensors)) == sorted(
            one for one in every if one[1].file == file
        )


def test_finding_the_shards_of_every_file_takes_steps_in_proportion_to_the_files():
    def count_steps(count: int) -> int:
        index, tensors = index_with_a_layout_and_listed_shards(count)
        steps = itertools.count()
        sys.setprofile(lambda *_: next(steps))
        try:
            for file in index.files:
                assert len({name for name, _ in index.iterate_shards_in_file(file, tensors)}) >= 2
        finally:
            sys.setprofile(None)
        return next(steps)

    assert count_steps(256) < 2.5 * count_steps(128)


def test_the_index_of_many_ranks_has_one_entry_per_tensor(tmp_path):
    def index_bytes(count: int) -> int:
        names = [f"model.{i}" for i in range(50)]
        layouts = {name: ShardLayout(0, ((0,), ()), 0) for name in names}
        mesh = RankMesh((count,), tuple(range(count)))
        index = ShardIndex(files=(), shards={}, meshes=(mesh,), layouts=layouts)
        return len(index.model_dump_json())

    assert index_bytes(4096) - index_bytes(8) < 4096 * 5  # the ranks of one mesh


def without_metadata(directory: Path, mesh_shape: tuple[int, ...]) -> None:
    CheckpointSaver(location_of(directory), dcp_shards=0).save(State(3, sharded(3, mesh_shape)))


def test_without_the_metadata_of_dcp_a_checkpoint_of_one_file_per_rank_is_complete(ranks, tmp_path):
    ranks(4).run(without_metadata, tmp_path, (2, 2))
    path = tmp_path / "step-00000003"
    of_ranks = {f"__{rank}_0.distcp" for rank in range(4)}
    assert {one.name for one in path.iterdir()} == of_ranks | {"manifest.json", "shards.json", "writer.json"}
    assert not list(iterate_damage(path))
    assert ShardIndex.model_validate_json((path / "shards.json").read_bytes()).layouts.keys() == {
        f"model.{name}" for name in ("uneven", "few_rows", "columns", "everywhere")
    }
    for _, whole in ranks(3).run(loaded_sharded, tmp_path, (3,)):
        assert_same({n: t for n, t in whole.items() if ".rank" not in n}, numbers(3))


def copies_of_plan(count: int) -> list[int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, Tensor] = {
        f"model.{i}": DTensor.from_local(torch.ones(4 if i % 3 else 400), mesh) for i in range(count)
    }
    plan = SavePlan.from_tensors(tensors)
    own = sum(one.shard.nbytes for one in plan.list_own_shards(tensors))
    return [own, plan.shard_count]


def test_ranks_with_equal_shards_write_about_as_many_bytes(ranks):
    (first, count), (second, _) = ranks(2).run(copies_of_plan, 12)
    assert (first + second, count) == (4 * (8 * 4 + 4 * 400), 12)
    assert abs(first - second) <= 1600


def refused(kind: str, directory: Path) -> str:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    part = DTensor.from_local(
        torch.ones(2 + rank), mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    other = sharded(1, (2,))
    if rank and kind == "absent":
        del other["model.uneven"]
    tensors = {"model.odd": part} if kind == "cut otherwise" else other
    with pytest.raises(CheckpointError) as raised:
        save(State(1, tensors), directory)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut otherwise", "'model.odd' cannot be saved.\n  got: a shard of shape"),
        ("absent", "do not hold the same tensors.\n  got: on rank 1, model.uneven is not float32 [7, 5]"),
    ],
)
def test_shards_that_no_layout_describes_are_refused(ranks, tmp_path, kind, message):
    assert all(message in said for said in ranks(2).run(refused, kind, tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_layout_that_is_none_of_its_tensor_is_damage(ranks, tmp_path):
    (path, _) = ranks(2).run(saved_sharded, tmp_path, 1, (2,))
    index = ShardIndex.model_validate_json((path / "shards.json").read_bytes())
    good = index.layouts["model.uneven"]
    mesh = index.meshes[0]
    wrong = [good._replace(mesh=1), good._replace(copy=1), good._replace(cuts=((0,),))]
    wrong += [good._replace(cuts=cuts) for cuts in (((1,), ()), ((0, 0), ()), ((0,), (0,)))]
    layouts = [index.layouts | {"model.uneven": one} for one in wrong]
    changes = [{"layouts": one} for one in layouts]
    changes += [{"meshes": (mesh._replace(ranks=(0,)),)}, {"shards": index.shards | {"model.uneven": ()}}]
    for change in [*changes, {"meshes": (mesh._replace(ranks=(0, 7)),)}]:
        replace(path, {"shards.json": index.model_copy(update=change).model_dump_json().encode()})
        assert {damage.file for damage in iterate_damage(path)} == {"shards.json"}
        with pytest.raises(CheckpointError):
            load(State(0, numbers(0)), path)


def test_no_file_is_written_that_is_too_large_to_be_read(tmp_path):
    files = LocalFiles(tmp_path)
    with pytest.raises(CheckpointError, match="shards.json would be too large to be read"):
        write_small_file(files, "shards.json", data=bytes(SMALL_BYTES + 1))
    assert not files.file_sizes_bytes()


class _Altered(LocalFiles):
    def read_file(self, name: str, *, begin: int = 0) -> bytes:
        data = super().read_file(name, begin=begin)
        return data[:-1] if name == "shards.json" else data


class _OnBadDisk(LocalLocation):
    def clean_up_and_create_draft(self, step: int, *, needed_bytes: int) -> CheckpointFiles:
        draft = super().clean_up_and_create_draft(step, needed_bytes=needed_bytes)
        return _Altered(draft.path) if isinstance(draft, LocalFiles) else draft


def test_an_index_that_cannot_be_read_back_is_not_committed(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="shards.json holds other bytes than were saved"):
        saved(_OnBadDisk(tmp_path), 2, keep=1)
    assert [path.name for path in tmp_path.glob("*-*")] == ["step-00000001"]
