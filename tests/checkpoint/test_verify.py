"""No byte of a checkpoint changes unnoticed, and what changed is named."""

import os
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.load import iterate_damage, load
from fullshard.checkpoint.manifest import read_manifest
from fullshard.checkpoint.save import save
from fullshard.checkpoint.shard_file import BLOCK_BYTES
from fullshard.checkpoint.storage import CheckpointReader
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
from tests.checkpoint.test_earlier_versions import unpacked


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


def cut(file: Path, _: int) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize("harm", [flip, cut])
@pytest.mark.parametrize("version", ["current", "listed", "layouts"])
def test_a_damaged_table_names_the_tensors_of_its_file(ranks, tmp_path, version, harm):
    if version == "current":
        path = ranks(4).run(saved_sharded, tmp_path, 1, (2, 2))[0]
    else:
        path = unpacked(version, tmp_path) / "step-00000003"
    tables = CheckpointReader(LocalFiles(path), read_manifest(path))
    for name in tables.manifest.data_file_names:
        within = {piece.name for piece in tables.read_table(name).pieces if 0 not in piece.shape}
        beside = path / f"{name}.pieces"
        table = beside if beside.exists() else path / name
        before = table.read_bytes()
        harm(table, -77)
        (damage,) = iterate_damage(path)
        assert (damage.file, {*damage.tensors}) == (table.name, within)
        table.write_bytes(before)
        assert within < {*tables.manifest.tensors}


class _RecordingFiles(LocalFiles):
    """Appends the names of files that are opened to a list."""

    def __init__(self, path: Path, opened: list[str]) -> None:
        super().__init__(path)
        object.__setattr__(self, "opened", opened)

    def open_file(self, name: str) -> BinaryIO:
        self.opened.append(name)  # pyright: ignore
        return super().open_file(name)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_divide_the_data_files_and_find_the_damage_of_the_whole(ranks, tmp_path, parts):
    (path, _, _) = ranks(3).run(saved_sharded, tmp_path, 1, (3,))
    data = [f"__{rank}_0.distcp" for rank in range(3)]
    opened = [list[str]() for _ in range(parts)]
    for number, names in enumerate(opened, start=1):
        assert not list(iterate_damage(_RecordingFiles(path, names), part=(number, parts)))
    assert sorted(name for names in opened for name in {*names} & {*data}) == data
    for name in ("__0_0.distcp", "__2_0.distcp", "writer.json"):
        flip(path / name, 77)
    flip(path / "__1_0.distcp", -77)  # in the table
    (path / "notes.txt").touch()
    found = [one for number in range(parts) for one in iterate_damage(path, part=(number + 1, parts))]
    assert {one.file for one in found} == {*data, "writer.json", "notes.txt"}
    assert sorted(map(str, found)) == sorted(map(str, iterate_damage(path)))


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
