"""Models of transformers whose matmuls are divided over ranks compute what they compute whole."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.errors import ShardError
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.training.shard import shard
from tests.fakes.architectures_hf import CONFIGS, LENGTH, batch_of
from tests.fakes.plans import plan_of
from tests.models.same_gradients import assert_same_values_and_gradients
from tests.models.test_architectures_hf import built

REFUSED = {
    "gpt2": "base_model_tp_plan",
    "falcon": "base_model_tp_plan",
    "bloom": "base_model_tp_plan",
    "opt": "base_model_tp_plan",
}
CAUSAL = [name for name in CONFIGS if "tokens" in batch_of(name, 0) and name not in REFUSED]


def outcome(name: str) -> str:
    """Compares loss and gradients with those of the whole model; returns why it is refused."""
    world_size = dist.get_world_size()
    plan = plan_of(world_size, f"sharding.tensor_parallel={world_size}", f"data.sequence_length={LENGTH}")
    plain, batch = materialize(built(name)[0], seed=0), batch_of(name, 0)
    expected, _ = next_token_loss(plain, batch)
    expected.backward()
    try:
        model = shard(built(name)[0], plan)
    except ShardError as error:
        return str(error.why)
    total, _ = next_token_loss(model, batch, chunk_rows=5)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
    total.backward()
    assert_same_values_and_gradients(model, plain)
    return "same"


@pytest.mark.parametrize("name", CAUSAL)
def test_the_same_loss_and_gradients(name: str, ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(outcome, name) == ["same"] * 2


def test_key_value_heads_may_be_fewer_than_ranks(ranks: Callable[..., Any]) -> None:
    for name in ("llama", "qwen2"):  # without and with biases
        assert ranks(4).run(outcome, name) == ["same"] * 4


@pytest.mark.parametrize("name", REFUSED)
def test_matmuls_that_no_plan_describes_are_refused(name: str, ranks: Callable[..., Any]) -> None:
    assert all(REFUSED[name] in why for why in ranks(2).run(outcome, name))
