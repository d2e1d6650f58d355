"""Shards on a drive: what is given is what was published last, whatever is read and written meanwhile."""

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
from fullshard.offload.drive import SYSTEM, System
from fullshard.offload.drive_shards import SLOTS, DriveShards

UNITS = SLOTS + 2
ELEMENTS = 1024  # in fp32 a block of the drive
UNIT_BYTES = 4 * ELEMENTS
A_WHILE_SECONDS = 0.2  # code that is wrong needs far less; code that is right makes nobody fail by it


@dataclass(frozen=True)
class Parameter:
    """What is asked of the engine's object for a parameter that is a unit by itself."""

    sharded_size: torch.Size = torch.Size([ELEMENTS])
    padded_sharded_param_size: torch.Size = torch.Size([ELEMENTS])
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    sharded_param: Tensor = field(default_factory=lambda: torch.empty(0))


@contextmanager
def shards_on(directory: Path, system: System) -> Iterator[DriveShards]:
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
        shards.closing()()


def values(unit: int, *, update: int = 0) -> Tensor:
    return torch.arange(ELEMENTS) + 10_000.0 * unit + 1e6 * update


def publish(shards: DriveShards, unit: int, *, update: int = 0) -> None:
    shards.publish(str(unit), 0, values=values(unit, update=update))


def is_given(shards: DriveShards, unit: int, *, update: int = 0) -> bool:
    return torch.equal(shards.give(str(unit), torch.float32), values(unit, update=update))


def test_memory_that_is_still_being_written_is_not_given_to_another_unit(tmp_path: Path) -> None:
    all_published = threading.Event()

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            all_published.wait(A_WHILE_SECONDS)
        return os.pwritev(descriptor, buffers, offset)

    with shards_on(tmp_path, replace(SYSTEM, pwritev=pwritev)) as shards:
        for unit in range(SLOTS + 1):
            publish(shards, unit)
        all_published.set()
        shards.settle()
        assert all(is_given(shards, unit) for unit in range(SLOTS + 1))


@pytest.mark.parametrize("unit", [2, 3], ids=["the unit that is read", "another unit"])
def test_memory_that_is_still_being_read_into_is_not_published_in(unit: int, tmp_path: Path) -> None:
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
        shards.settle()
        assert all(is_given(shards, one) for one in (*range(UNITS), 0))
        armed.set()
        assert is_given(shards, 1)  # while it is gathered, 2 is read ahead, as it came next the last time
        publish(shards, unit, update=1)
        published.set()
        shards.settle()
        assert is_given(shards, 2, update=int(unit == 2))
        assert is_given(shards, 3, update=int(unit == 3))


def test_a_write_that_failed_is_told_before_its_memory_is_used_again(tmp_path: Path) -> None:
    all_busy, failed = threading.Event(), threading.Event()

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 0:
            all_busy.wait(30)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        failed.set()  # one thread writes: what was before is through
        return os.pwritev(descriptor, buffers, offset)

    with shards_on(tmp_path, replace(SYSTEM, pwritev=pwritev)) as shards:
        for unit in range(SLOTS):
            publish(shards, unit)
        all_busy.set()
        assert failed.wait(30)
        with pytest.raises(OffloadError, match="cannot be written"):
            publish(shards, SLOTS)
