"""A save that is read back: not acknowledged where a disk or a store keeps other bytes than were written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.manifest import MANIFEST, METADATA
from fullshard.checkpoint.per_node import NodeLocalDirectory
from fullshard.checkpoint.save import save
from fullshard.checkpoint.storage import dcp_data_file_name
from fullshard.errors import CheckpointError
from tests.checkpoint import flipping_memory
from tests.checkpoint.states import State, assert_same, loaded, numbers, saved, saved_sharded

DATA = dcp_data_file_name(0)


@dataclass(frozen=True)
class FlippingFiles(LocalFiles):
    """A directory on a disk that changes a bit of what is written as `flips`."""

    flips: str = ""

    @contextmanager
    def create_file(self, name: str) -> Iterator[BinaryIO]:
        with super().create_file(name) as file:
            yield file
        if name == self.flips:
            data = bytearray((self.path / name).read_bytes())
            data[100] ^= 1
            (self.path / name).write_bytes(data)


@dataclass(frozen=True)
class FlippingPlace(LocalLocation):
    flips: str = ""

    def create_draft(self, step: int, *, needed_bytes: int) -> FlippingFiles:
        return FlippingFiles(
            Path(str(super().create_draft(step, needed_bytes=needed_bytes))), flips=self.flips
        )


@pytest.mark.parametrize("flips", [DATA, f"{DATA}.pieces", METADATA, MANIFEST])
def test_what_a_disk_has_changed_is_not_acknowledged(tmp_path, flips):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"{flips} was read back, and is other than was written"):
        saved(FlippingPlace(tmp_path, flips=flips), 2, read_back=True)
    assert [step for step, _ in LocalLocation(tmp_path).list_checkpoints()] == [1]
    assert loaded(tmp_path).step == 1
    saved(tmp_path, 2, read_back=True)
    assert_same(loaded(tmp_path).held, numbers(2))


@pytest.mark.parametrize("flips", [DATA, f"{DATA}.pieces", METADATA])
def test_what_a_store_has_changed_is_not_acknowledged(flips):
    flipping_memory.begin()
    saved(flipping_memory.URL, 1)
    flipping_memory.begin(flips=flips, empty=False)
    with pytest.raises(CheckpointError, match=f"{flips} was read back, and is other than was written"):
        saved(flipping_memory.URL, 2, read_back=True)
    assert loaded(flipping_memory.URL).step == 1


def save_one_flipped(directory: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        saved_sharded(FlippingPlace(directory, flips=dcp_data_file_name(1)), 1, (2,), {"read_back": True})
    return str(raised.value)


def test_every_rank_reads_its_own(ranks, tmp_path):
    first, second = ranks(2).run(save_one_flipped, tmp_path)
    assert first == second
    assert "rank 1: " in first
    assert list(tmp_path.glob("step-*")) == []


def test_a_save_in_the_background_is_read_back(tmp_path):
    with BackgroundSaver(FlippingPlace(tmp_path, flips=DATA), read_back=True) as saver:
        saver.save(State(1, numbers(1)))
        saver.wait()
        (ended,) = saver.outcomes()
    assert ended.path is None
    assert "was read back" in str(ended.error)


@dataclass(frozen=True)
class FlippingNode(NodeLocalDirectory):
    def create_draft(self, step: int, *, needed_bytes: int) -> FlippingFiles:
        return FlippingFiles(Path(str(super().create_draft(step, needed_bytes=needed_bytes))), flips=MANIFEST)


def test_a_disk_of_one_node_is_read_back(tmp_path):
    with pytest.raises(CheckpointError, match="was read back"):
        save(State(1, numbers(1)), FlippingNode(tmp_path), read_back=True)
    assert list(tmp_path.glob("step-*")) == []
    assert save(State(1, numbers(1)), NodeLocalDirectory(tmp_path), read_back=True).is_dir()
