"""Measurements of ranks by each other: connections, settings, and a sharded step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.jobs.checks.rank_job import gather_rank_facts
from fullshard.jobs.checks.ranks import RankFacts, check_sharded_step, check_state_dtypes
from fullshard.parallel.mesh import RankInfo
from fullshard.spec.run import Run

BATCHES = ("data.source=python", "data.factory=tests.fakes.broken:Batches", "data.sequence_length=16")


def facts_of(fault: str, settings: tuple[str, ...], skewed: bool) -> RankFacts:
    """The facts of ranks of which each is a host of its own if `skewed`; the last then differs in all."""
    model = ("model.python=tests.fakes.broken:Decoder", f'model.options={{fault="{fault}"}}')
    run = Run.load(overrides=[*model, *BATCHES, "run.device=cpu", *settings])
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = RankInfo(rank, size, rank, size, torch.device("cpu"))
    if not skewed:
        return gather_rank_facts(run, plan=None, ranks=ranks)
    wrong = rank == size - 1
    return gather_rank_facts(
        run,
        plan=None,
        ranks=ranks,
        host=f"host-{rank}",
        environment={"NCCL_ALGO": "Ring"} if wrong else {},
        connect=lambda host, port: "refused" if wrong else None,
    )


def test_ranks_measure_their_sharded_step_links_connections_and_settings(
    ranks: Callable[..., Any],
) -> None:
    first, other = ranks(2).run(facts_of, "none", ("optimizer.name=tests.fakes.broken.HalfStateSGD",), True)
    assert first == other
    assert check_sharded_step(first).status == "ok"
    assert check_state_dtypes(first).status == "warning"
    assert [pair.ranks for pair in first.pairs] == [(0, 1)]
    assert first.unreachable == ("host-1 cannot connect to host-0: refused",)
    assert first.settings[1] == first.settings[0] | {"NCCL_ALGO": "Ring"}


def test_a_model_that_depends_on_the_rank_is_found_by_its_sharded_step(ranks: Callable[..., Any]) -> None:
    facts = ranks(2).run(facts_of, "differs by rank", (), False)[0]
    assert check_sharded_step(facts).status == "failure"
    assert check_state_dtypes(facts).status == "ok"


def test_ranks_that_drop_other_blocks_are_found(ranks: Callable[..., Any]) -> None:
    found = check_sharded_step(ranks(2).run(facts_of, "drops by rank", (), False)[0])
    assert found.status == "failure"
    assert "rank 0: gathers blocks.1; rank 1: gathers blocks.0" in found.got
