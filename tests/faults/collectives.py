"""Each collective in turn is the last one of a rank: there it fails, or the rank is killed.

The methods of torch's process groups are replaced, and its functional collectives, whoever calls them.
"""

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from fullshard.checkpoint.location import newest_complete_step
from fullshard.errors import CheckpointError
from tests.faults.course import (
    Course,
    Mode,
    assert_the_curve_is_undisturbed,
    last_acknowledged,
    lines,
    note_own,
    train_course,
)
from tests.ranks import RankFailed

METHODS = ("allgather", "allreduce", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter")
METHODS += ("_allgather_base", "_reduce_scatter_base", "alltoall", "alltoall_base", "send", "recv")
FUNCTIONS = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "broadcast")
PLACES = [*((dist.ProcessGroup, one) for one in METHODS), *((functional, one) for one in FUNCTIONS)]
STEPS = 2  # of each attempt, with a save after each
LOST = "Connection closed by peer"


@contextmanager
def last_collective(at: int, *, kills: bool) -> Generator[Callable[[], int]]:
    """This process has no connection from its collective number `at` on, or is killed. Yields the count."""
    count = 0

    def counted(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count < at:
            return real(*arguments, **options)
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(LOST)

    before = [(place, name, vars(place)[name]) for place, name in PLACES if name in vars(place)]
    for place, name, _ in before:
        # A function, and so a method, in place of one.
        real = getattr(place, name)
        setattr(place, name, lambda *arguments, _real=real, **options: counted(_real, *arguments, **options))
    try:
        yield lambda: count
    finally:
        for place, name, real in before:
            setattr(place, name, real)


def attempt(course: Course, victim: int, at: int, kills: bool) -> int:
    """Trains; returns the number of collectives. A rank whose training raises notes it; the victim ends."""
    try:
        if dist.get_rank() != victim:
            train_course(course)
            return 0
        with last_collective(at, kills=kills) as count:
            train_course(course)
            return count()
    except Exception:
        note_own(course, f"ended-{dist.get_rank()}", f"{at}")
        if dist.get_rank() == victim:
            os._exit(1)  # as a rank does that a launcher has started: its connections end with it
        raise


def fail_at_each_collective(
    ranks: Callable, directory: Path, *, mode: Mode, victim: int, kills: bool, begin: int = 1, stride: int = 1
) -> int:
    """Fails at every `stride`-th from `begin` on, in attempts of which each resumes after the one before.

    Returns the number of attempts that failed.
    """
    record, checkpoints = directory / "record", directory / "checkpoints"
    record.mkdir()
    failed, at, other = 0, begin, 1 - victim
    while True:
        saved = newest_complete_step(checkpoints) or 0
        assert saved >= last_acknowledged(record), f"a save was lost at collective {at}"
        course = Course(checkpoints, record, mode=mode, until=saved + STEPS)
        try:
            counts = ranks(2).run(attempt, course, victim, at, kills)
        except (RuntimeError, CheckpointError, RankFailed):
            failed += 1
        else:
            assert counts[victim] < at, "it was to fail"
            break
        assert lines(record, f"ended-{other}")[-1] == f"{at}", "the other rank did not end by itself"
        at += stride
    assert [int(start) for start in lines(record, "starts")][-1] == saved
    assert_the_curve_is_undisturbed(ranks, record)
    return failed
