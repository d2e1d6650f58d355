"""Kills of ranks, among strays and beside a reader: no acknowledged save or committed step is lost."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.checkpoint.location import newest_complete_step
from tests.faults.course import (
    Course,
    Kill,
    Mode,
    assert_the_curve_is_undisturbed,
    last_acknowledged,
    last_committed,
    lines,
    train_course,
)
from tests.faults.crowd import left_by_saves, litter, reader_beside
from tests.ranks import RankFailed

VICTIMS = {"one rank": (1,), "the rank that commits": (0,), "all ranks": (0, 1)}
EVERY = 3  # steps from a checkpoint to the next, with state outside of the device
STARTING = 0.2  # of all kills
STARTING_SECONDS = 0.2
KILLS_HERE = 2  # of each tier and mode below, in `make test`; many more by `make torture`
HERE = [
    ("none", "sync", "all ranks"),
    ("none", "async", "the rank that commits"),
    pytest.param("none", "live", "one rank", marks=pytest.mark.long),
    pytest.param("optimizer:nvme", "sync", "one rank", marks=pytest.mark.long),
    ("optimizer:nvme", "async", "all ranks"),
    ("params+optimizer:nvme", "async", "the rank that commits"),
    ("optimizer:cpu", "sync", "one rank"),
]


def kill_again_and_again(
    ranks: Callable, directory: Path, *, mode: Mode, victims: str, times: int, tier: str = "none"
) -> Counter[str]:
    """Each attempt resumes where the one before was killed. Counts `phase of the kill: source of the resume`,
    for starts that were not killed themselves."""
    every = 1 if tier == "none" else EVERY
    rng = random.Random(f"{tier} {mode} {victims}")
    record, checkpoints = directory / "record", directory / "checkpoints"
    record.mkdir()
    came: Counter[str] = Counter()
    hits: list[str] = []
    for i in range(times + 1):
        whole, saved = last_committed(record), newest_complete_step(checkpoints) or 0
        assert saved >= last_acknowledged(record)
        starts = len(lines(record, "starts"))
        course = Course(checkpoints, record, mode=mode, every=every, tier=tier)
        if i < times:
            killed = replace(course, kill=_kill(rng, victims, every))
            with (
                reader_beside(checkpoints),
                pytest.raises((RankFailed, RuntimeError)),  # the killed one, or one that lost it
            ):
                ranks(2).run(train_course, killed)
            litter(checkpoints)
        else:
            ranks(2).run(train_course, replace(course, until=max(whole, saved) + 4))
        for start in lines(record, "starts")[starts:]:
            assert int(start) >= max(whole, saved), "what all ranks had whole was lost"
            assert tier.endswith("nvme") or int(start) == saved
            source = "a generation" if int(start) > saved else "the newest checkpoint" if saved else "nothing"
            came.update(f"{hit}: {source}" for hit in hits)
            hits.clear()
        hits += _hits(record)
    assert_the_curve_is_undisturbed(ranks, record, tier=tier)
    return came


def _kill(rng: random.Random, victims: str, every: int) -> Kill:
    early = rng.uniform(0, STARTING_SECONDS) if rng.random() < STARTING else None
    return Kill(VICTIMS[victims], rng.uniform(0, 2 * every), starting_seconds=early)


def _hits(record: Path) -> list[str]:
    """The phase in which a kill came. Of several killed ranks, the first is counted."""
    doing: list[str] = []
    for path in sorted(record.glob("killed-*")):
        doing += path.read_text().splitlines()
        path.unlink()
    phases = {"starting": "starting", "saving": "a save"}
    return [phases.get(act, "a step beside a save" if "beside" in act else "a step") for act in doing[:1]]


@pytest.mark.parametrize(("tier", "mode", "victims"), HERE)
def test_no_kill_loses_a_save_or_a_whole_generation_or_changes_a_loss(ranks, tmp_path, tier, mode, victims):
    came = kill_again_and_again(ranks, tmp_path, tier=tier, mode=mode, victims=victims, times=KILLS_HERE)
    assert came.total() == KILLS_HERE
    left = left_by_saves(tmp_path / "checkpoints")
    assert len([name for name in left if name.startswith("step-")]) <= 2
    assert not [name for name in left if name.startswith((".tmp-", ".bad-", ".del-"))]
