"""Nodes whose disks are their own commit together, and load in place or after they were gathered."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.location import NodeLocalDirectory
from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from tests.checkpoint.states import State, assert_same, loaded_sharded, numbers, ones_own, sharded
from tests.checkpoint.test_verify import flip

STEP = "step-00000003"


def disks_of(directory: Path, ranks_a_node: int) -> NodeLocalDirectory:
    return NodeLocalDirectory(directory / f"node-{dist.get_rank() // ranks_a_node}")


def joined(directory: Path, ranks_a_node: int) -> tuple[int | None, int, bool]:
    disk = disks_of(directory, ranks_a_node).recover_and_group_ranks()
    return disk.node, disk.nodes, disk.is_leader


def test_ranks_that_see_each_others_files_share_a_disk(ranks, tmp_path):
    assert ranks(4).run(joined, tmp_path, 2) == [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]
    assert ranks(3).run(joined, tmp_path, 3) == [(0, 1, rank == 0) for rank in range(3)]
    assert not list(tmp_path.rglob(".seat-*"))


def save_on_nodes(directory: Path, step: int, mesh_shape: tuple[int, ...], ranks_a_node: int = 2) -> None:
    state = State(step, sharded(step, mesh_shape), {"tokens": step * 100})
    save(state, disks_of(directory, ranks_a_node), keep=2)


def load_on_nodes(directory: Path, mesh_shape: tuple[int, ...], ranks_a_node: int = 2) -> tuple[Any, Any]:
    state = State(0, sharded(0, mesh_shape))
    load(state, disks_of(directory, ranks_a_node))
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.held.items()}
    return (state.step, state.noted), whole


def assert_loaded(found: list[tuple[Any, Any]], step: int) -> None:
    for rank, (values, whole) in enumerate(found):
        assert values == (step, {"tokens": step * 100})
        assert_same(whole, numbers(step) | {f"random.rank{rank}": ones_own(step, rank)})


def copied_into_one(directory: Path) -> Path:
    for node in (1, 0):
        shutil.copytree(directory / f"node-{node}" / STEP, directory / "all" / STEP, dirs_exist_ok=True)
    return directory / "all" / STEP


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_nodes_load_in_place_and_other_ranks_from_a_gathered_copy(ranks, tmp_path, mesh_shape):
    ranks(4).run(save_on_nodes, tmp_path, 3, mesh_shape)
    for node in (0, 1):
        path = tmp_path / f"node-{node}" / STEP
        manifest = read_manifest(path)
        assert (manifest.nodes, manifest.node) == (2, node)
        assert not list(iterate_damage(path))
        here = {name for name in os.listdir(path) if not name.endswith(".json")}
        assert here == {name for name in manifest.files_on_this_disk if not name.endswith(".json")}
    assert_loaded(ranks(4).run(load_on_nodes, tmp_path, mesh_shape), 3)

    path = copied_into_one(tmp_path)
    assert not list(iterate_damage(path))
    for _, whole in ranks(3).run(loaded_sharded, tmp_path / "all", (3,)):
        assert_same({n: t for n, t in whole.items() if ".rank" not in n}, numbers(3))


def refused(directory: Path, mesh_shape: tuple[int, ...], ranks_a_node: int) -> str:
    with pytest.raises(CheckpointError) as raised:
        load_on_nodes(directory, mesh_shape, ranks_a_node)
    return str(raised.value)


def test_shards_on_the_disk_of_another_node_are_refused_with_the_copy_command(ranks, tmp_path):
    ranks(4).run(save_on_nodes, tmp_path, 3, (4,))
    (message, *_) = ranks(4).run(refused, tmp_path, (2, 2), 2)
    assert "on the disk of node" in message
    assert "rsync -a" in message


def test_a_step_is_committed_once_all_nodes_have_it(ranks, tmp_path):
    ranks(4).run(save_on_nodes, tmp_path, 2, (4,))
    ranks(4).run(save_on_nodes, tmp_path, 3, (4,))
    newer = tmp_path / "node-1" / STEP
    # Ended between the two renames: node 1 had prepared, so the step is committed when someone starts.
    newer.rename(tmp_path / "node-1" / ".tmp-00000003-aa")
    assert_loaded(ranks(4).run(load_on_nodes, tmp_path, (4,)), 3)
    assert newer.is_dir()
    # Ended before node 1 had prepared: no rank reported the step as saved.
    shutil.rmtree(newer)
    assert_loaded(ranks(4).run(load_on_nodes, tmp_path, (4,)), 2)
    ranks(4).run(save_on_nodes, tmp_path, 3, (4,))
    assert_loaded(ranks(4).run(load_on_nodes, tmp_path, (4,)), 3)
    assert list((tmp_path / "node-0").glob(f".bad-{STEP}-*"))


def test_parts_of_two_saves_are_no_checkpoint(ranks, tmp_path):
    ranks(4).run(save_on_nodes, tmp_path / "a", 3, (4,))
    ranks(4).run(save_on_nodes, tmp_path / "b", 3, (4,))
    shutil.rmtree(tmp_path / "a" / "node-1")
    (tmp_path / "b" / "node-1").rename(tmp_path / "a" / "node-1")
    (message, *_) = ranks(4).run(refused, tmp_path / "a", (4,), 2)
    assert "is whole on all of them" in message


def test_a_byte_that_one_node_lost_sends_all_to_the_older_step(ranks, tmp_path):
    for step in (2, 3):
        ranks(4).run(save_on_nodes, tmp_path, step, (4,))
    shard = tmp_path / "node-1" / STEP / "__3_0.distcp"
    flip(shard, 4 * shard.stat().st_size)
    assert_loaded(ranks(4).run(load_on_nodes, tmp_path, (4,)), 2)
    assert all(list((tmp_path / f"node-{node}").glob(f".bad-{STEP}-*")) for node in (0, 1))


def save_in_the_background(directory: Path) -> list[str | None]:
    with BackgroundSaver(disks_of(directory, 2)) as saver:
        saver.save(State(3, sharded(3, (4,)), {"tokens": 300}))
        saver.wait()
        return [None if one.error is None else str(one.error) for one in saver.outcomes()]


def test_nodes_save_in_the_background_too(ranks, tmp_path):
    assert ranks(4).run(save_in_the_background, tmp_path) == [[None]] * 4
    assert_loaded(ranks(4).run(load_on_nodes, tmp_path, (4,)), 3)


def refused_by_a_full_node(directory: Path) -> str:
    disks = disks_of(directory, 2)
    if dist.get_rank() == 2:
        disks.path.mkdir(parents=True)
        (disks.path / ".lock").mkdir()  # this node cannot be written to
    dist.barrier()
    with pytest.raises(CheckpointError) as raised:
        save(State(3, sharded(3, (4,))), disks)
    return str(raised.value)


def test_a_node_that_cannot_save_fails_all_and_leaves_nothing(ranks, tmp_path):
    messages = ranks(4).run(refused_by_a_full_node, tmp_path)
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 2: saving step 3")
    assert not list(tmp_path.rglob("step-*"))
