"""No byte of a checkpoint changes unnoticed, and what changed is named."""

import os
from pathlib import Path

import pytest
import torch

from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.save import save
from fullshard.checkpoint.shard_file import BLOCK_BYTES
from fullshard.errors import CheckpointError
from fullshard.system.direct_io import LARGE_BYTES
from tests.checkpoint.states import (
    State,
    assert_same,
    numbers,
    saved,
    saved_sharded,
    table_of,
)


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_flipped_bit_names_its_tensor(tmp_path):
    path = saved(tmp_path, 1)
    table = table_of(path)
    for piece in table.pieces:
        whole = (path / "__0_0.distcp").read_bytes()
        flip(path / "__0_0.distcp", 8 * (piece.offset + piece.length - 1))
        (damage,) = iterate_damage(path)
        assert damage.tensors == (piece.name,)
        (path / "__0_0.distcp").write_bytes(whole)
    assert not list(iterate_damage(path))
    assert sum(piece.length for piece in table.pieces) == table.pieces_bytes


def test_a_part_of_many_blocks_is_verified_block_by_block(tmp_path):
    elements = 3 * BLOCK_BYTES // 4 + 5
    state = State(1, {"model.large": torch.arange(elements, dtype=torch.float32)})
    path = save(state, tmp_path)
    (piece,) = table_of(path).pieces
    assert len(piece.digests) == 4
    target = State(0, {"model.large": torch.zeros(elements)})
    assert load(target, tmp_path)
    assert torch.equal(target.held["model.large"], state.held["model.large"])
    begin = piece.offset + 2 * BLOCK_BYTES
    flip(path / "__0_0.distcp", 8 * (begin + 7))
    (damage,) = iterate_damage(path)
    assert f"bytes {begin} to {begin + BLOCK_BYTES}" in damage.what


def test_a_flipped_bit_of_the_padding_is_damage_and_does_not_stop_a_load(tmp_path):
    state = State(1, {"model.small": torch.ones(3), "model.large": torch.ones(LARGE_BYTES // 4 + 5)})
    path = save(state, tmp_path)
    small, large = table_of(path).pieces
    assert large.offset > small.length
    flip(path / "__0_0.distcp", 8 * (large.offset - 1) + 3)
    (damage,) = iterate_damage(path)
    assert f"bytes {small.length} to {large.offset}, before model.large, are not all zero" in damage.what
    target = State(0, {name: torch.zeros_like(tensor) for name, tensor in state.held.items()})
    assert load(target, tmp_path)
    assert_same(target.held, state.held)


@pytest.mark.parametrize("act", ["exchange", "add"])
def test_exchanged_and_added_files_are_damage(ranks, tmp_path, act):
    (path, _) = ranks(2).run(saved_sharded, tmp_path / "a", 1, (2,))
    (other, _) = ranks(2).run(saved_sharded, tmp_path / "b", 2, (2,))
    file = path / "__1_0.distcp"
    if act == "exchange":  # for a shard of another step, of the same size
        assert (other / file.name).stat().st_size == file.stat().st_size
        os.replace(other / file.name, file)
    else:
        file = path / "notes.txt"
        file.write_text("")
    damages = list(iterate_damage(path))
    assert {damage.file for damage in damages} == {file.name}
    if act == "exchange":
        assert {"model.uneven", "random.rank1"} <= {name for damage in damages for name in damage.tensors}


def test_parts_read_each_file_once_and_find_the_damage_of_the_whole(ranks, tmp_path):
    (path, _, _) = ranks(3).run(saved_sharded, tmp_path, 1, (3,))
    for name in ("__0_0.distcp", "__2_0.distcp", "writer.json"):
        flip(path / name, 77)
    flip(path / "__1_0.distcp", -77)  # in the table
    (path / "notes.txt").touch()
    parts = [list(iterate_damage(path, part=(number, 2))) for number in (1, 2)]
    assert [{one.file for one in found} for found in parts] == [
        {"__0_0.distcp", "__2_0.distcp", "writer.json", "notes.txt"},
        {"__1_0.distcp"},
    ]
    assert parts[1][0].tensors == tuple(read_manifest(path).tensors)
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, iterate_damage(path)))


def test_a_checkpoint_set_aside_still_forbids_a_fresh_start(tmp_path):
    path = saved(tmp_path, 1)
    flip(path / "__0_0.distcp", 77)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none of the checkpoints"):
            load(State(0, numbers(0)), tmp_path, missing_ok=True)
    assert not path.exists()
    assert list(tmp_path.glob(".bad-step-00000001-*"))


def test_a_damaged_checkpoint_loaded_by_path_raises_instead_of_falling_back(tmp_path):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    flip(path / "__0_0.distcp", 77)
    with pytest.raises(CheckpointError, match="holds other bytes than were saved"):
        load(State(0, numbers(0)), path)
    assert path.exists()
