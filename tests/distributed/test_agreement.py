"""A failure on one rank is raised on all."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from fullshard.distributed.agreement import (
    all_gather_object,
    call_on_rank_zero,
    run_on_all_ranks,
    run_on_rank_zero,
    run_raising_checkpoint_error,
)
from fullshard.errors import CheckpointError, DataError, FullshardError, LaunchError, PlanError


def ranks_and_first() -> tuple[int, int, list[int]]:
    rank = dist.get_rank()
    return (
        run_on_all_ranks(lambda: rank, doing="x"),
        run_on_rank_zero(lambda: rank, doing="x"),
        all_gather_object(rank),
    )


def test_each_rank_gets_its_own_result_or_that_of_rank_zero(ranks):
    assert ranks(2).run(ranks_and_first) == [(0, 0, [0, 1]), (1, 0, [0, 1])]


def fail_on(failing: list[int]) -> str:
    def act() -> None:
        if dist.get_rank() in failing:
            raise DataError(f"rank {dist.get_rank()} has no data.", why="none", fix="get some")

    with pytest.raises(CheckpointError) as raised:
        run_on_all_ranks(act, doing="reading")
    assert all_gather_object(1) == [1] * dist.get_world_size(), "all are still in step"
    return str(raised.value)


def test_the_first_failing_rank_is_named_on_all(ranks):
    message = "rank 1: reading failed.\n  got: rank 1 has no data.\n  why: none\n  try: get some"
    assert ranks(3).run(fail_on, [1, 2]) == [message] * 3


def call_twice_and_fail() -> list[str]:
    def act() -> int:
        assert dist.get_rank() == 0, "rank 0 alone calls it"
        return 3

    def fail(error: Exception) -> None:
        assert dist.get_rank() == 0, "rank 0 alone calls it"
        raise error

    found = [str(call_on_rank_zero(act)), str(call_on_rank_zero(act))]
    for error in (PlanError("no plan.", got=4, fix="5"), ZeroDivisionError("by 0")):
        with pytest.raises((PlanError, LaunchError, ZeroDivisionError)) as raised:
            call_on_rank_zero(lambda error=error: fail(error))
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_all_ranks_return_or_raise_what_rank_zero_does(ranks):
    first, *others = ranks(3).run(call_twice_and_fail)
    assert first == ["3", "3", "PlanError: no plan.\n  got: 4\n  try: 5", "ZeroDivisionError: by 0"]
    lost = "LaunchError: rank 0 failed in work that it does for all ranks.\n  got: ZeroDivisionError: by 0"
    assert others == [[*first[:3], lost]] * 2


def call_while_others_work(directory: str, error: Exception | None) -> object:
    """Returns the result or error of a call on rank 0 while the others work, of which one fails."""
    others, done = (
        [Path(directory, str(rank)) for rank in range(1, dist.get_world_size())],
        Path(directory, "0"),
    )

    def act() -> int:
        wait_for(*others)
        done.touch()
        if error is not None:
            raise error
        return 3

    def work(alive: Callable[[], None]) -> None:
        others[dist.get_rank() - 1].touch()
        if dist.get_rank() == 1:
            raise ValueError("rank 1 fails")
        wait_for(done)
        while True:
            time.sleep(0.1)
            alive()

    try:
        return call_on_rank_zero(act, meanwhile=work)
    except PlanError as raised:
        return raised.what


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


@pytest.mark.parametrize("error", [None, PlanError("no plan.")])
def test_other_ranks_work_until_the_call_on_rank_zero_ends(ranks, tmp_path: Path, error: PlanError | None):
    found = ranks(3).run(call_while_others_work, str(tmp_path), error)
    assert found == [3 if error is None else "no plan."] * 3


def interrupt_other_rank(interrupt: type[BaseException]) -> None:
    def work(alive: Callable[[], None]) -> None:
        raise interrupt

    if dist.get_rank() == 0:
        call_on_rank_zero(lambda: 3, meanwhile=work)
        return
    with pytest.raises(interrupt):
        call_on_rank_zero(lambda: 3, meanwhile=work)
    dist.broadcast_object_list([None], src=0)  # rank 0 waits until the end of this rank is noticed


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_rank_that_works_meanwhile_is_raised(ranks, interrupt: type[BaseException]):
    ranks(2).run(interrupt_other_rank, interrupt)


def return_and_raise_what_cannot_be_pickled() -> list[str]:
    def fail() -> None:
        raise PlanError("no plan.", got=sys, fix="5")

    found: list[str] = []
    for call in (call_on_rank_zero, partial(run_on_rank_zero, doing="x")):
        for act in (lambda: sys, fail):
            with pytest.raises((FullshardError, TypeError)) as raised:
                call(act)
            found.append(f"{type(raised.value).__name__}: {raised.value}")
    assert all_gather_object(1) == [1] * dist.get_world_size(), "all are still in step"
    return found


def test_what_cannot_be_pickled_is_an_error_on_all_ranks(ranks):
    first, other = ranks(2).run(return_and_raise_what_cannot_be_pickled)
    module = "TypeError: cannot pickle 'module' object"
    plan = f"no plan.\n  got: {sys}\n  try: 5"
    assert first[:2] == [module, f"PlanError: {plan}"]
    failed = "LaunchError: rank 0 failed in work that it does for all ranks."
    assert other[:2] == [f"{failed}\n  got: {module}", f"LaunchError: {plan}"]
    assert first[2:] == other[2:]
    assert first[2] == f"CheckpointError: x failed.\n  got: {module}"


def test_an_interrupt_is_raised_at_once():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_raising_checkpoint_error(interrupted, doing="anything")
