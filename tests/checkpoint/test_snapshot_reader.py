"""Of shards that training continues with, the numbers of one moment are read, however far the reader is."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullshard.checkpoint.snapshot_reader import LiveShardReader
from fullshard.errors import CheckpointError

NAMES = ("a", "b", "c", "d")


def some() -> dict[str, Tensor]:
    return {name: torch.full((3,), float(number)) for number, name in enumerate(NAMES)}


def of(copied: list[str], failing: str = "") -> Callable[[str, Tensor], Tensor]:
    """Makes copies, and notes of what."""

    def copy(name: str, shard: Tensor) -> Tensor:
        if name == failing:
            raise MemoryError("no room")
        copied.append(name)
        return shard.clone()

    return copy


def read(held: LiveShardReader, name: str, shard: Tensor) -> Tensor:
    with held.open_shard(name, shard) as found:
        return found.clone()


@pytest.mark.parametrize("written", range(len(NAMES) + 1))
def test_what_is_not_written_is_copied_before_it_changes(written: int) -> None:
    shards, copied, found = some(), list[str](), dict[str, Tensor]()
    held = LiveShardReader(shards, copied=of(copied))
    for name in NAMES[:written]:
        found[name] = read(held, name, shards[name])
    held.copy_unwritten_shards()
    for shard in shards.values():
        shard.fill_(9)
    for name in NAMES[written:]:
        found[name] = read(held, name, shards[name])
    assert copied == list(reversed(NAMES[written:]))
    assert all(torch.equal(found[name], before) for name, before in some().items())


def test_nothing_changes_while_it_is_read() -> None:
    shards, copied, order = some(), list[str](), list[str]()
    held = LiveShardReader(shards, copied=of(copied))

    def change() -> None:
        held.copy_unwritten_shards()
        order.append("settled")
        shards["b"].fill_(9)

    training = threading.Thread(target=change)
    with held.open_shard("b", shards["b"]) as found:
        training.start()
        training.join(0.1)
        assert torch.equal(found, some()["b"])
        order.append("read")
    training.join(120)
    assert order == ["read", "settled"]
    assert sorted(copied) == ["a", "c", "d"]


def test_a_shard_is_read_once() -> None:
    shards = some()
    held = LiveShardReader(shards, copied=of([]))
    read(held, "c", shards["c"])
    with pytest.raises(AssertionError, match="c is read a second time"):
        read(held, "c", shards["c"])


def test_a_copy_that_fails_is_the_saves_failure_and_not_trainings() -> None:
    shards, copied = some(), list[str]()
    held = LiveShardReader(shards, copied=of(copied, failing="c"))
    held.copy_unwritten_shards()
    for shard in shards.values():
        shard.fill_(9)
    assert torch.equal(read(held, "b", shards["b"]), some()["b"])
    with pytest.raises(CheckpointError, match=r"c is not saved\.\n  got: MemoryError: no room"):
        read(held, "c", shards["c"])


def test_nothing_is_copied_for_a_save_that_has_ended() -> None:
    copied = list[str]()
    held = LiveShardReader(some(), copied=of(copied))
    held.release_shards()
    held.copy_unwritten_shards()
    assert not copied
