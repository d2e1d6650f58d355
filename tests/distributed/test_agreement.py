"""A failure on one rank is raised on all."""

import pytest
import torch.distributed as dist

from fullshard.distributed.agreement import (
    all_gather_object,
    run_on_all_ranks,
    run_on_rank_zero,
    run_raising_checkpoint_error,
)
from fullshard.errors import CheckpointError, DataError


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


def test_an_interrupt_is_raised_at_once():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_raising_checkpoint_error(interrupted, doing="anything")
