"""Drives that fail under a run: a clear error, no other damage, and the next start resumes."""

import errno
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from fullshard.checkpoint.load import iterate_damage
from fullshard.errors import DamagedOffloadError, OffloadError
from tests.faults.course import (
    Course,
    assert_it_resumes,
    last_acknowledged,
    last_committed,
    train_course,
)
from tests.offload.systems import turning_bad

STATE, SHARDS = "optimizer:nvme", "params+optimizer:nvme"
EVERY = 3  # steps from a checkpoint to the next
AFTER = EVERY + 2  # generations: a step's after that checkpoint, for one is the state as it began
FOR_GOOD = 1 << 30


@dataclass(frozen=True)
class Fault:
    """`call` on files with `file` in their names fails with `number`, this many `times`. `said`: of it."""

    call: str
    number: int
    file: str
    said: str
    times: int = FOR_GOOD
    tier: str = STATE

    @property
    def damages(self) -> bool:
        """Returns whether the fault loses the generation, which the next attempt does without."""
        return self.call == "preadv"


IO, FULL = errno.EIO, errno.ENOSPC
FAULTS = {
    "read error": Fault("preadv", IO, "state-", "cannot be read: .*EIO"),
    "write error": Fault("pwritev", IO, "data", "cannot be written: .*EIO"),
    "one write error": Fault("pwritev", IO, "data", "cannot be written: .*EIO", times=1),
    "flush error": Fault("fdatasync", IO, "data", "cannot be flushed to its drive: .*EIO"),
    "drive full": Fault("pwritev", FULL, "json", "cannot be kept in .*ENOSPC(.|\n)*disk is full"),
    "shards, a write error": Fault("pwritev", IO, "param", "be written(.|\n)*EIO", times=1, tier=SHARDS),
    "shards, read error": Fault("preadv", IO, "param", "be read(.|\n)*EIO", tier=SHARDS),
}


QUICK = ("read error", "drive full", "shards, a write error")


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in QUICK else pytest.mark.long) for one in FAULTS]
)
def test_a_failing_drive_is_an_error_and_the_next_start_resumes(ranks, tmp_path: Path, name: str) -> None:
    """On one rank of two. Nothing that came after the fault is in a checkpoint or a generation."""
    fault = FAULTS[name]
    record, checkpoints = tmp_path / "record", tmp_path / "checkpoints"
    record.mkdir()
    drive = partial(turning_bad, fault.call, fault.number, file=fault.file, after=AFTER, times=fault.times)
    course = Course(checkpoints, record, every=EVERY, tier=fault.tier)
    with pytest.raises(OffloadError) as caught:
        ranks(2).run(train_course, replace(course, drive=drive, until=30))
    assert re.search(fault.said, str(caught.value)), caught.value
    assert caught.value.fix
    assert isinstance(caught.value, DamagedOffloadError) == fault.damages
    for one in checkpoints.glob("step-*"):
        assert not list(iterate_damage(one))
    whole, saved = last_committed(record), last_acknowledged(record)
    assert saved, "it came after a checkpoint"
    assert_it_resumes(ranks, course, least=max(whole, saved))
