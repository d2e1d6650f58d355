"""Mixtures of transformers whose experts are divided over ranks compute what they compute whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.errors import ShardError
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.training.shard import shard
from tests.fakes.architectures_hf import LENGTH, batch_of
from tests.fakes.plans import plan_of
from tests.models.same_gradients import assert_same_values_and_gradients
from tests.training.test_families import built

DIVIDED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe")
REFUSED = ("llama",)


def outcome(name: str, *settings: str, adapter: tuple[str, ...] = ()) -> str:
    """Compares gradients, each rank's of a batch of its own, with those of the whole model of all batches.

    Ranks that share matmuls have the same batch.
    """
    plan = plan_of(
        dist.get_world_size(),
        *("model.experts=4", "sharding.expert_parallel=2", f"data.sequence_length={LENGTH}"),
        *settings,
    )
    plain = materialize(built(name, *adapter)[0], seed=0)
    for rank in range(plan.data_parallel_degree):
        (next_token_loss(plain, batch_of(name, rank))[0] / plan.data_parallel_degree).backward()
    try:
        model = shard(built(name, *adapter)[0], plan)
    except ShardError as error:
        return str(error)
    batch = batch_of(name, plan.data_rank(dist.get_rank()))
    next_token_loss(model, batch, chunk_rows=5)[0].backward()
    assert_same_values_and_gradients(model, plain)
    return "same"


@pytest.mark.parametrize("name", DIVIDED)
def test_the_same_gradients(name: str, ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(outcome, name) == ["same"] * 2


def test_the_same_gradients_sharded_over_further_ranks(ranks: Callable[..., Any]) -> None:
    for name in ("mixtral", "gpt_oss"):
        assert ranks(4).run(outcome, name, "recompute.mode=full") == ["same"] * 4


def test_the_same_gradients_where_ranks_share_matmuls(ranks: Callable[..., Any]) -> None:
    """Tensor parallelism of attention and shared experts, and experts over the same ranks and others."""
    for name in DIVIDED:
        assert (
            ranks(4).run(outcome, name, "sharding.tensor_parallel=2", "sharding.expert_parallel=4")
            == ["same"] * 4
        )


def outcome_with_adapters(*settings: str) -> str:
    return outcome("qwen3_moe", *settings, adapter=("adapter.rank=2", 'adapter.targets=["q_proj", "o_proj"]'))


def test_the_same_gradients_of_adapters(ranks: Callable[..., Any]) -> None:
    for settings in (("sharding.tensor_parallel=1",), ("sharding.tensor_parallel=2",)):
        assert ranks(2).run(outcome_with_adapters, *settings) == ["same"] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused(name: str, ranks: Callable[..., Any]) -> None:
    for message in ranks(2).run(outcome, name):
        assert "sharding.expert_parallel = 1" in message
