"""Checks that ranks make together: of settings and a sharded step."""

import logging
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.jobs.checks.ranks import check_sharded_step, choose_shard_degree, run_checks_on_ranks
from fullshard.parallel.mesh import RankInfo
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from tests.fakes.broken import Batches as BrokenBatches

BATCHES = ("data.source=python", "data.factory=tests.fakes.broken:Batches", "data.sequence_length=16")


def found_on_ranks(fault: str, *settings: str) -> dict[str, Finding]:
    """The findings of ranks, of which the last has another environment."""
    model = ("model.python=tests.fakes.broken:Decoder", f'model.options={{fault="{fault}"}}')
    run = Run.load(overrides=[*model, *BATCHES, "run.device=cpu", *settings])
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = RankInfo(rank, size, rank, size, torch.device("cpu"))
    environment = {"NCCL_ALGO": "Ring"} if rank == size - 1 else {}
    return {one.check: one for one in run_checks_on_ranks(run, ranks=ranks, environment=environment)}


def test_ranks_compare_their_settings_and_a_sharded_step(ranks: Any) -> None:
    first, other = ranks(2).run(found_on_ranks, "none")
    assert first["sharded_step"] == other["sharded_step"]
    assert first["sharded_step"].status == "ok"
    assert "NCCL_ALGO: unset on rank 0, Ring on rank 1" in first["same_settings"].got


def batches_of_rank(*settings: str) -> int:
    before = BrokenBatches.read
    assert found_on_ranks("none", *settings)["sharded_step"].status == "ok"
    return BrokenBatches.read - before


def test_the_batches_that_a_rank_computes_do_not_grow_with_the_ranks(ranks: Any) -> None:
    (two, _), (three, *_) = (ranks(n).run(batches_of_rank) for n in (2, 3))
    assert two == three


@pytest.mark.parametrize("ranks", [1, 2, 12, 13, 34, 37, 64, 1000, 16384])
def test_a_rank_exchanges_shards_of_the_check_with_few_others(ranks: int) -> None:
    degree = choose_shard_degree(ranks)
    assert ranks % degree == 0
    assert degree <= 16 or degree == ranks == 37, "a prime has no smaller divisor"
    assert ranks > 16 or degree == ranks, "as few ranks shard as a run would"


def warnings_of_rank_checks(*settings: str) -> list[str]:
    handler = BufferingHandler(capacity=1000)
    handler.setLevel(logging.WARNING)
    logging.getLogger("fullshard").addHandler(handler)
    try:
        assert found_on_ranks("none", *settings)["sharded_step"].status == "ok"
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
    return [one.getMessage() for one in handler.buffer]


def test_rank_checks_do_not_speak_of_settings_of_the_optimizer_of_the_run(ranks: Any) -> None:
    own = ("optimizer.betas=[0.9, 0.999]", "optimizer.eps=1e-6", "schedule.min_lr_ratio=0")
    assert ranks(2).run(warnings_of_rank_checks, *own) == [[], []]


PENALTY = ("none", "train.loss=tests.fakes.broken:with_penalty_on_rank_zero")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (("differs by rank",), "the loss of one batch differs between ranks"),
        (PENALTY, "the loss of one batch differs between ranks"),
        (("differs sharded",), "2 steps sharded over 2 of 2 ranks differ from unsharded ones"),
        (("drops by rank",), "rank 0: gathers blocks.1; rank 1: gathers blocks.0"),
    ],
)
def test_a_model_that_depends_on_the_rank_is_found(ranks: Any, fault: tuple[str, ...], text: str) -> None:
    found = ranks(2).run(found_on_ranks, *fault)[0]["sharded_step"]
    assert found.status == "failure"
    assert text in found.got


SMALL = ("model.layers=1", "model.d_model=32", "model.heads=2", "model.d_ff=32", "data.sequence_length=16")
MIXTURE = (*SMALL, "model.experts=4", "sharding.expert_parallel=4")


def sharded_step_of_a_mixture() -> Finding:
    run = Run.load(overrides=[*MIXTURE, "run.device=cpu"])
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = RankInfo(rank, size, rank, size, torch.device("cpu"))
    return check_sharded_step(run, ranks=ranks)


def test_fewer_ranks_than_share_experts_in_the_run_can_check(ranks: Any) -> None:
    assert ranks(2).run(sharded_step_of_a_mixture)[0].status == "ok"
