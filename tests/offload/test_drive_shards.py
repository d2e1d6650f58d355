"""Shards outside of the device: what is given is what was published last, whatever is read and written."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from fullshard.errors import OffloadError
from fullshard.offload.drive import SYSTEM, DriveSystemCalls
from fullshard.offload.gather_source import DriveShards, ShardCopies
from fullshard.spec.groups import UNIT_BUFFERS

UNITS = UNIT_BUFFERS + 2
ELEMENTS = 1024  # in fp32 a block of the drive
UNIT_BYTES = 4 * ELEMENTS
A_WHILE_SECONDS = 0.2  # code that is wrong needs far less; code that is right makes nobody fail by it


@dataclass(frozen=True)
class Parameter:
    """The attributes of FSDPParam that are used, for a parameter that is a unit by itself."""

    sharded_size: torch.Size = torch.Size([ELEMENTS])
    padded_sharded_param_size: torch.Size = torch.Size([ELEMENTS])
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    sharded_param: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def shards_on(directory: Path, system: DriveSystemCalls) -> Iterator[DriveShards]:
    names = [str(unit) for unit in range(UNITS)]
    shards = DriveShards(
        {name: Parameter() for name in names},
        {name: int(name) for name in names},
        path=directory / "parameters.data",
        device=torch.device("cpu"),
        system=system,
    )
    try:
        yield shards
    finally:
        shards.make_close_function()()


def values(unit: int, *, update: int = 0) -> Tensor:
    return torch.arange(ELEMENTS) + 10_000.0 * unit + 1e6 * update


def publish(shards: DriveShards, unit: int, *, update: int = 0) -> None:
    shards.write_shard_elements(str(unit), 0, values=values(unit, update=update))


def is_given(shards: DriveShards, unit: int, *, update: int = 0) -> bool:
    return torch.equal(shards.read_padded_shard(str(unit), torch.float32), values(unit, update=update))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_copies_take_host_memory_only_for_another_device(device: str) -> None:
    home = torch.device("cpu")
    copies = ShardCopies({"one": Parameter()}, home=home, device=torch.device(device), pinned=False)
    assert copies.host_bytes == (UNIT_BYTES if device == "cuda" else 0)


def test_memory_that_is_still_being_written_is_not_given_to_another_unit(tmp_path: Path) -> None:
    all_published = threading.Event()

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            all_published.wait(A_WHILE_SECONDS)
        return os.pwritev(descriptor, buffers, offset)

    with shards_on(tmp_path, replace(SYSTEM, pwritev=pwritev)) as shards:
        for unit in range(UNIT_BUFFERS + 1):
            publish(shards, unit)
        all_published.set()
        shards.wait_for_writes()
        assert all(is_given(shards, unit) for unit in range(UNIT_BUFFERS + 1))


def test_a_unit_that_is_read_ahead_while_an_update_begins_is_read_again(tmp_path: Path) -> None:
    armed, published = threading.Event(), threading.Event()

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        if armed.is_set() and offset == 2 * UNIT_BYTES:
            found = bytes(buffers[0])
            published.wait(A_WHILE_SECONDS)
            buffers[0][:] = found  # the drive's last byte arrives now
        return count

    with shards_on(tmp_path, replace(SYSTEM, preadv=preadv)) as shards:
        for one in range(UNITS):
            publish(shards, one)
        assert all(is_given(shards, one) for one in (*range(UNITS), 0))
        armed.set()
        assert is_given(shards, 1)  # while it is gathered, 2 is read ahead, as it came next the last time
        shards.prepare_for_update()
        for one in range(UNITS):
            publish(shards, one, update=1)
        published.set()
        assert all(is_given(shards, one, update=1) for one in (2, *range(UNITS)))


def test_a_failed_write_is_raised_before_its_memory_is_used_again(tmp_path: Path) -> None:
    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with shards_on(tmp_path, replace(SYSTEM, pwritev=pwritev)) as shards:
        publish(shards, 0)
        with pytest.raises(OffloadError, match="cannot be written"):
            publish(shards, 1)


def test_a_shard_of_an_interrupted_load_is_published_anew(tmp_path: Path) -> None:
    with shards_on(tmp_path, SYSTEM) as shards:
        shards.write_shard_elements("0", 0, values=values(0)[: ELEMENTS // 2])
        shards.prepare_for_update()
        for unit in range(UNITS):
            publish(shards, unit, update=1)
        shards.wait_for_writes()
        assert all(is_given(shards, unit, update=1) for unit in (*range(1, UNITS), 0))
    written = bytearray((tmp_path / "parameters.data").read_bytes())
    assert torch.equal(torch.frombuffer(written, dtype=torch.float32)[:ELEMENTS], values(0, update=1))


class Reads:
    """A drive that counts: of which units something is read."""

    def __init__(self) -> None:
        self.of: list[int] = []
        self.system = replace(SYSTEM, preadv=self._preadv)

    def _preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.of.append(offset // UNIT_BYTES)
        return os.preadv(descriptor, buffers, offset)


@dataclass
class Update:
    """All units are made in a thread of its own."""

    shards: DriveShards
    number: int
    made: tuple[threading.Event, ...] = field(
        default_factory=lambda: tuple(threading.Event() for _ in range(UNITS))
    )

    def __post_init__(self) -> None:
        self.shards.prepare_for_update()
        self.thread = threading.Thread(target=self._make)
        self.thread.start()

    def gather(self, order: Sequence[int]) -> None:
        """As the engine does, each unit once it is made; what is given is of this update."""
        for unit in order:
            assert self.made[unit].wait(120)
            assert is_given(self.shards, unit, update=self.number)

    def settle(self) -> None:
        self.thread.join(120)
        assert not self.thread.is_alive()
        self.shards.wait_for_writes()

    def _make(self) -> None:
        for unit in range(UNITS):
            publish(self.shards, unit, update=self.number)
            self.made[unit].set()


FORWARD = list(range(UNITS))
BACKWARD = FORWARD[1:-1][::-1]  # the root stays gathered after forward, and so does what was gathered last


def read_by(order: Sequence[int]) -> list[int]:
    """Units that a least-recently-used buffer reads again for this order of gathers."""
    there, read = list[int](), list[int]()
    for unit in order:
        read += [] if unit in there else [unit]
        there = [*(one for one in there if one != unit), unit][-UNIT_BUFFERS:]
    return read


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_least_recently_used_units_are_read_again(microbatches: int, tmp_path: Path) -> None:
    reads = Reads()
    with shards_on(tmp_path, reads.system) as shards:
        for number in range(3):
            update = Update(shards, number)
            order = FORWARD + (microbatches - 1) * [*BACKWARD, *FORWARD] + BACKWARD
            update.gather(order)
            update.settle()
            if (
                number == 2
            ):  # the end of the first step is not predicted, so the second may begin with its read
                assert reads.of == read_by(order)
            reads.of.clear()


def test_gathers_in_another_order_are_of_the_last_update(tmp_path: Path) -> None:
    with shards_on(tmp_path, SYSTEM) as shards:
        for number in range(2):
            update = Update(shards, number)
            update.gather([UNITS - 1, 0, 2, 1, *FORWARD])
            update.settle()
