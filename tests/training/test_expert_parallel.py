"""A run whose experts are divided over ranks computes what an unsharded one computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import PlanError, ShardError, TrainError
from fullshard.models.experts import Router
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import global_batch
from tests.fakes.models import VOCABULARY
from tests.survival.test_replicas import flip
from tests.training.meshes import (
    BF16,
    assert_loads_on_any_mesh,
    load_whole,
    parameters_of,
    state_of_run,
    train_and_save,
    whole,
)
from tests.training.same_numbers import STRATEGIES, assert_same_numbers, build, make_run, train_sharded

MIXTURE = "mixture_decoder"
NO_SHARD = 'sharding.units.overrides=[{match="*.experts", strategy="no_shard"}]'

# ranks, ranks that divide experts, model, strategy, and what differs from the default
CASES: list[tuple[int, int, str, str, dict[str, Any]]] = [
    (2, 2, MIXTURE, "full_shard", {"recompute": "full", "loss_chunk": 4}),
    (4, 2, MIXTURE, "full_shard", {"accumulation": (2, "last_microbatch"), "prefetch": "explicit"}),
    (4, 4, MIXTURE, "no_shard", {"accumulation": (2, "every_microbatch")}),
    (4, 2, MIXTURE, "hybrid_shard", {"recompute": "selective"}),
    (3, 3, "biased_mixture_decoder", "zero1", {"units": "unsharded_head"}),
    (4, 2, "biased_mixture_decoder", "shard_grad_op", {"extra": [NO_SHARD]}),
    (2, 2, "biased_mixture_decoder", "shard_grad_op", {"extra": ["run.compile=true"]}),
    (4, 4, MIXTURE, "hybrid_shard_zero2", {"context": 2, "length": 16}),
    (4, 2, MIXTURE, "hpz", {}),
    (4, 2, MIXTURE, "full_shard", {"extra": ["offload.tier=optimizer:cpu"]}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_numbers(case: tuple[Any, ...], ranks: Callable[..., Any]) -> None:
    count, expert, model, strategy, more = case
    run = make_run(model=model, ranks=count, strategy=strategy, expert=expert, **more)
    length = more.get("length", 9)
    assert_same_numbers(model, ranks(count).run(train_sharded, model, run), length=length)


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "full", "every", "selective"])
@pytest.mark.parametrize("accumulation", [(1, "every_microbatch"), (2, "last_microbatch")])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "hpz"])
@pytest.mark.parametrize(("count", "expert"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_the_same_numbers_in_the_full_cross(  # noqa: PLR0917
    count: int, expert: int, strategy: str, accumulation: Any, recompute: str, ranks: Callable[..., Any]
) -> None:
    if count == 8 and accumulation[0] == 2:
        pytest.skip("24 sequences are not two microbatches of 8 ranks")
    more = {"expert": expert, "accumulation": accumulation, "recompute": recompute}
    run = make_run(model=MIXTURE, ranks=count, strategy=strategy, **more)
    assert_same_numbers(MIXTURE, ranks(count).run(train_sharded, MIXTURE, run))


def state_of(expert: int, *extra: str) -> tuple[TrainState, Plan]:
    """A fresh state on this world's ranks."""
    count = dist.get_world_size()
    run = make_run(model=MIXTURE, ranks=count, strategy="full_shard", expert=expert, extra=extra)
    return state_of_run(MIXTURE, run)


def gradients_of_skewed_routing(expert: int) -> dict[str, Tensor]:
    """Gradients of one batch, by name, if all tokens go to the first two of four experts."""
    state, _ = state_of(expert)
    with torch.no_grad():
        for router in (one for one in state.model.modules() if isinstance(one, Router)):
            router.register_buffer("balance_bias", torch.tensor([9.0, 9.0, 0.0, 0.0]))
            router.has_bias = True
            router.register_buffer("tokens", torch.zeros(4))
    batch = global_batch(0, sequences=4, length=9, vocabulary=VOCABULARY)
    own = {name: rows.chunk(dist.get_world_size())[dist.get_rank()] for name, rows in batch.items()}
    next_token_loss(state.model, own)[0].backward()
    return {name: whole(p.grad) for name, p in state.model.named_parameters() if p.grad is not None}


def test_a_rank_that_gets_no_token_takes_part(ranks: Callable[..., Any]) -> None:
    expected = ranks(2).run(gradients_of_skewed_routing, 1)[0]
    for found in ranks(2).run(gradients_of_skewed_routing, 2):
        assert not found["blocks.0.feed_forward.experts.up"][2:].any()
        torch.testing.assert_close(found, expected)


def initial_values(expert: int) -> dict[str, Tensor]:
    return parameters_of(state_of(expert)[0])


def test_initial_values_do_not_depend_on_the_ranks_that_divide_experts(ranks: Callable[..., Any]) -> None:
    run = make_run(model=MIXTURE, ranks=1, strategy="full_shard")
    expected = dict(materialize(build(MIXTURE, run), seed=run.run.seed).named_parameters())
    for values in ranks(4).run(initial_values, 2):
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def saved(directory: Path, expert: int) -> dict[str, Tensor]:
    return train_and_save(*state_of(expert, BF16), directory)


def loaded(directory: Path, expert: int) -> dict[str, Tensor]:
    return load_whole(state_of(expert, BF16)[0], directory)


def test_a_checkpoint_of_any_mesh_is_loaded_on_any_other(ranks: Callable[..., Any], tmp_path: Path) -> None:
    cases = ((2, 4, ((1, 1), (4, 4), (3, 1))), (1, 3, ((2, 2),)))
    assert_loads_on_any_mesh(ranks, tmp_path, saved=saved, loaded=loaded, cases=cases)


def compared_replicas(damaged: str | None) -> str | None:
    """Trains on 4 ranks, which replicate experts twice, and compares; rank 1 damages its part."""
    more = ("fault_tolerance.check_replicas_every=1", "precision.mode=bf16_pure", NO_SHARD)
    state, plan = state_of(2, *more)
    try:
        for step in train(state, plan):
            if damaged is not None and step.index == 1 and dist.get_rank() == 1:
                flip(state.tensors()[damaged])
    except TrainError as error:
        return str(error)
    return None


def test_replicated_experts_are_compared_with_those_of_the_same_part(ranks: Callable[..., Any]) -> None:
    assert ranks(4).run(compared_replicas, None) == [None] * 4
    for message in ranks(4).run(compared_replicas, "model.blocks.1.feed_forward.experts.down"):
        assert "ranks 1, 3 differ in" in message
        assert "experts.down" in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["sharding.expert_parallel=4"], "one of [1, 2]"),
        (["sharding.expert_parallel=2", "model.experts=3"], "one of [1, 3]"),
        (["sharding.expert_parallel=2", "model.experts=0"], "no experts"),
        (
            [
                *("sharding.expert_parallel=2", "sharding.tensor_parallel=2"),
                'sharding.tensor_parallel_styles={head="head"}',
            ],
            "tensor_parallel_styles, sharding.expert_parallel = 2",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_divided_or_combined_is_refused(settings: list[str], reason: str) -> None:
    run = make_run(model="decoder", ranks=2, strategy="full_shard", extra=["model.experts=4", *settings])
    with pytest.raises(PlanError) as error:
        Plan.from_run(run, world_size=2)
    assert reason in str(error.value)


def refused(policy: list[str]) -> str:
    run = make_run(model=MIXTURE, ranks=2, strategy="full_shard", expert=2, extra=policy)
    with pytest.raises(ShardError) as error:
        shard(build(MIXTURE, run), Plan.from_run(run, world_size=2))
    return str(error.value)


def test_experts_that_share_a_unit_are_refused(ranks: Callable[..., Any]) -> None:
    for message in ranks(2).run(refused, ["sharding.units.names=['blocks.*']"]):
        assert "blocks.0" in message
        assert "names of the experts too" in message
