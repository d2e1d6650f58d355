"""Ranks that are killed in the middle of saving lose no acknowledged save, and change no loss."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.course import (
    Course,
    Kill,
    Mode,
    assert_the_curve_is_undisturbed,
    last_acknowledged,
    lines,
    train_course,
)
from tests.faults.crowd import left_by_saves, litter, reader_beside
from tests.ranks import RankFailed

VICTIMS = {"one rank": (1,), "the rank that commits": (0,), "all ranks": (0, 1)}
KILLS_HERE = 3  # of each kind and mode, in `make test`; many more by `make torture`


def kill_again_and_again(ranks: Callable, directory: Path, *, mode: Mode, victims: str, times: int) -> int:
    """Each attempt resumes where the one before was killed, among strays and beside a reader.

    Returns the last acknowledged step.
    """
    rng = random.Random(f"{mode} {victims}")
    record = directory / "record"
    record.mkdir()
    for _ in range(times):
        before = last_acknowledged(record)
        kill = Kill(VICTIMS[victims], rng.uniform(0, 3))
        with (
            reader_beside(directory / "checkpoints"),
            pytest.raises((RankFailed, RuntimeError)),  # the killed one, or one that lost it
        ):
            ranks(2).run(train_course, Course(directory / "checkpoints", record, mode=mode, kill=kill))
        litter(directory / "checkpoints")
        assert int(lines(record, "starts")[-1]) >= before, "an acknowledged save was lost"
    last = last_acknowledged(record)
    (started_at, _) = ranks(2).run(train_course, Course(directory / "checkpoints", record, until=last + 3))
    assert started_at >= last
    assert_the_curve_is_undisturbed(ranks, record)
    return last


HERE = {
    ("one rank", "sync"),
    ("one rank", "async"),
    ("the rank that commits", "async"),
    ("all ranks", "sync"),
}


@pytest.mark.parametrize(
    ("victims", "mode"),
    [
        pytest.param(victims, mode, marks=[] if (victims, mode) in HERE else pytest.mark.long)
        for victims in VICTIMS
        for mode in ("sync", "async", "live")
    ],
)
def test_no_kill_loses_a_save_or_changes_a_loss(ranks, tmp_path, mode, victims):
    assert kill_again_and_again(ranks, tmp_path, mode=mode, victims=victims, times=KILLS_HERE) > 0
    left = left_by_saves(tmp_path / "checkpoints")
    assert len([name for name in left if name.startswith("step-")]) == 2
    assert not [name for name in left if name.startswith((".tmp-", ".bad-", ".del-"))]
