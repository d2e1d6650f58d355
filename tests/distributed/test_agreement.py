"""A failure on one rank is raised on all."""

import sys
from functools import partial

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
