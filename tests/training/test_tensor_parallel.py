"""A run whose matmuls are divided over ranks computes what an unsharded one computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import ShardError, TrainError
from fullshard.models.loss import next_token_loss
from fullshard.offload.rounding import shard_index
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
from tests.training.same_numbers import assert_same_numbers, build, make_run, train_sharded, train_unsharded

LENGTH = 16

# ranks, ranks per matmul, model, strategy, and what differs from the default; 13 tokens are divided unevenly
CASES: list[tuple[int, int, str, str, dict[str, Any]]] = [
    (2, 2, "decoder", "full_shard", {"loss_chunk": 4}),
    (4, 4, "one_kv_head_decoder", "no_shard", {"recompute": "full"}),
    (4, 2, "tied_decoder", "shard_grad_op", {"accumulation": (2, "last_microbatch"), "units": "size"}),
    (4, 2, "decoder", "full_shard", {"units": "unsharded_head", "recompute": "selective"}),
    (4, 2, "one_kv_head_decoder", "zero1", {"prefetch": "explicit", "context": 2}),
    (2, 2, "tied_decoder", "full_shard", {"extra": ["run.compile=true"]}),
    (8, 2, "decoder", "hpz", {}),
    (
        4,
        2,
        "one_kv_head_decoder",
        "full_shard",
        {"recompute": "every", "extra": ["offload.tier=optimizer:cpu"]},
    ),
]
TIERS = ("optimizer:cpu", "params+optimizer:cpu", "optimizer:nvme", "params+optimizer:nvme")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_numbers(case: tuple[Any, ...], ranks: Callable[..., Any]) -> None:
    count, tensor, model, strategy, more = case
    run = make_run(model=model, ranks=count, strategy=strategy, tensor=tensor, length=LENGTH, **more)
    assert_same_numbers(model, ranks(count).run(train_sharded, model, run), length=LENGTH)


@pytest.mark.long
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard", "shard_grad_op"])
def test_the_same_numbers_from_any_offload_target(
    tier: str, strategy: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    more = {"tensor": 2, "length": LENGTH, "extra": [f"offload.tier={tier}", f"run.dir={tmp_path}"]}
    run = make_run(model="one_kv_head_decoder", ranks=4, strategy=strategy, **more)
    _, losses, norms = train_unsharded("one_kv_head_decoder", torch.float64, length=LENGTH)
    # The parameters themselves are on the drive.
    for _, own_losses, own_norms in ranks(4).run(train_sharded, "one_kv_head_decoder", run):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-4)


def state_of(tensor: int, *extra: str, model: str = "decoder") -> tuple[TrainState, Plan]:
    """A fresh state on this world's ranks."""
    count = dist.get_world_size()
    more = {"tensor": tensor, "length": LENGTH, "extra": extra}
    return state_of_run(model, make_run(model=model, ranks=count, strategy="full_shard", **more))


def initial_values(tensor: int) -> dict[str, Tensor]:
    return parameters_of(state_of(tensor)[0])


def test_initial_values_do_not_depend_on_the_ranks_of_a_matmul(ranks: Callable[..., Any]) -> None:
    run = make_run(model="decoder", ranks=1, strategy="full_shard", length=LENGTH)
    expected = dict(materialize(build("decoder", run), seed=run.run.seed).named_parameters())
    for values in ranks(4).run(initial_values, 2):
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def saved(directory: Path, tensor: int) -> dict[str, Tensor]:
    return train_and_save(*state_of(tensor, BF16), directory)


def loaded(directory: Path, tensor: int) -> dict[str, Tensor]:
    return load_whole(state_of(tensor, BF16)[0], directory)


def test_a_checkpoint_of_any_mesh_is_loaded_on_any_other(ranks: Callable[..., Any], tmp_path: Path) -> None:
    cases = ((2, 4, ((1, 1), (3, 1), (2, 2))), (1, 3, ((4, 2),)))
    assert_loads_on_any_mesh(ranks, tmp_path, saved=saved, loaded=loaded, cases=cases)


def compared_replicas(damaged: str | None) -> str | None:
    """Trains on 2 × 2 ranks, and compares replicas after each step, which rank 1 damages after the first."""
    state, plan = state_of(2, "precision.mode=bf16_pure", "fault_tolerance.check_replicas_every=1")
    try:
        for step in train(state, plan):
            if damaged is not None and step.index == 1 and dist.get_rank() == 1:
                flip(state.tensors()[damaged])
    except TrainError as error:
        return str(error)
    return None


def test_whole_parameters_stay_the_same_on_the_ranks_of_a_matmul(ranks: Callable[..., Any]) -> None:
    """Other parts of a matrix are not compared, and are rounded by other random numbers."""
    assert ranks(4).run(compared_replicas, None) == [None] * 4
    for message in ranks(4).run(compared_replicas, "model.norm.weight"):
        assert "model.norm.weight" in message
        assert "differ" in message


def shard_indices() -> dict[str, int]:
    return {name: shard_index(parameter) for name, parameter in state_of(2)[0].model.named_parameters()}


def test_each_part_has_an_index_of_its_own(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(4).run(shard_indices)
    for name, expected in (("head", [0, 1, 2, 3]), ("norm", [0, 0, 1, 1])):
        assert [indices[f"{name}.weight"] for indices in by_rank] == expected


def counted_and_compared() -> tuple[tuple[int, int], tuple[int, int], list[Tensor]]:
    """Tokens of a step; gradients with the default loss, and with one that reads whole logits."""
    state, plan = state_of(2)
    step = next(train(state, plan))
    batch = global_batch(0, sequences=4, length=LENGTH, vocabulary=VOCABULARY)
    found: list[list[Tensor]] = []
    for own in (False, True):
        if own:
            logits, labels = state.model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
            total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        else:
            total, _ = next_token_loss(state.model, batch)
        total.backward()
        gradients = [p.grad for p in state.model.parameters()]
        found.append([total.detach(), *(whole(one) for one in gradients if one is not None)])
        state.model.zero_grad()
    for parallel, plain in zip(*found, strict=True):
        torch.testing.assert_close(parallel, plain)
    expected = global_batch(0, sequences=24, length=LENGTH, vocabulary=VOCABULARY)
    valid = int((expected["labels"] != -100).sum())
    return (step.tokens, step.trained_tokens), (plan.run.tokens_per_step, valid), found[0]


def test_tokens_count_once_and_any_loss_may_read_the_logits(ranks: Callable[..., Any]) -> None:
    for tokens, expected, _ in ranks(2).run(counted_and_compared):
        assert tokens == expected


def refused() -> str:
    run = make_run(model="decoder", ranks=3, strategy="full_shard", tensor=3, length=15)
    with pytest.raises(ShardError) as error:
        shard(build("decoder", run), Plan.from_run(run, world_size=3))
    return str(error.value)


def test_heads_that_do_not_divide_are_refused_with_the_nearest_that_do(ranks: Callable[..., Any]) -> None:
    for message in ranks(3).run(refused):
        assert "model.heads = 4" in message
        assert "tensor_parallel = 2" in message
