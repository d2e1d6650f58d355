"""Models of transformers whose matmuls or experts are divided over ranks compute what they compute whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.errors import ShardError
from fullshard.models.loss import next_token_loss
from fullshard.parallel.materialize import materialize
from fullshard.training.gradients import sum_gradients_over_tensor_axis
from fullshard.training.shard import shard
from tests.fakes.architectures import whole
from tests.fakes.architectures_hf import CONFIGS, LENGTH, batch_of
from tests.fakes.plans import plan_of
from tests.training.test_families import built

WITHOUT_PLAN = ("gpt2", "falcon", "bloom", "opt")
CAUSAL = [name for name in CONFIGS if "tokens" in batch_of(name, 0) and name not in WITHOUT_PLAN]
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe")
EXPERTS = ("model.experts=4", "sharding.expert_parallel=2")
ADAPTER = ("adapter.rank=2", 'adapter.targets=["q_proj", "o_proj"]')


def outcome(name: str, settings: tuple[str, ...], adapter: tuple[str, ...] = ()) -> str:
    """Compares gradients, each rank's of a batch of its own, with those of the whole model of all batches.

    Ranks that share matmuls have the same batch. Returns why a model is refused.
    """
    plan = plan_of(dist.get_world_size(), f"data.sequence_length={LENGTH}", *settings)
    plain = materialize(built(name, *adapter)[0], seed=0)
    for rank in range(plan.data_parallel_degree):
        (next_token_loss(plain, batch_of(name, rank))[0] / plan.data_parallel_degree).backward()
    try:
        model = shard(built(name, *adapter)[0], plan)
    except ShardError as error:
        return str(error)
    batch = batch_of(name, plan.data_rank(dist.get_rank()))
    next_token_loss(model, batch, chunk_rows=5)[0].backward()
    sum_gradients_over_tensor_axis([p.grad for p in model.parameters() if p.grad is not None])
    sharded = dict(model.named_parameters())
    for key, parameter in plain.named_parameters():
        assert torch.equal(whole(sharded[key]), parameter), key
        if parameter.grad is not None:
            gradient = sharded[key].grad
            assert gradient is not None, key
            torch.testing.assert_close(
                whole(gradient), parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda t, key=key: f"{key}: {t}"
            )
    return "same"


@pytest.mark.parametrize("name", CAUSAL)
def test_the_same_gradients_of_divided_matmuls(name: str, ranks: Any) -> None:
    assert ranks(2).run(outcome, name, ("sharding.tensor_parallel=2",)) == ["same"] * 2


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without and with biases
def test_key_value_heads_may_be_fewer_than_ranks(name: str, ranks: Any) -> None:
    assert ranks(4).run(outcome, name, ("sharding.tensor_parallel=4",)) == ["same"] * 4


@pytest.mark.parametrize("name", MIXTURES)
def test_the_same_gradients_of_divided_experts(name: str, ranks: Any) -> None:
    """Alone; and with attention and shared experts divided, over the same ranks and others."""
    assert ranks(2).run(outcome, name, EXPERTS) == ["same"] * 2
    shared = (*EXPERTS, "sharding.tensor_parallel=2", "sharding.expert_parallel=4")
    assert ranks(4).run(outcome, name, shared) == ["same"] * 4


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_same_gradients_sharded_over_further_ranks(name: str, ranks: Any) -> None:
    assert ranks(4).run(outcome, name, (*EXPERTS, "recompute.mode=full")) == ["same"] * 4


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_same_gradients_of_adapters(tensor: int, ranks: Any) -> None:
    settings = (*EXPERTS, f"sharding.tensor_parallel={tensor}")
    assert ranks(2).run(outcome, "qwen3_moe", settings, ADAPTER) == ["same"] * 2


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        *((name, ("sharding.tensor_parallel=2",), "base_model_tp_plan") for name in WITHOUT_PLAN),
        ("llama", EXPERTS, "sharding.expert_parallel = 1"),
    ],
)
def test_indivisible_models_are_refused(name: str, settings: tuple[str, ...], said: str, ranks: Any) -> None:
    assert all(said in message for message in ranks(2).run(outcome, name, settings))
