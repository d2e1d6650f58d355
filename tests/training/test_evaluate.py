"""Evaluation between steps: it leaves no trace, and ranks with unequally many batches agree."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.training.evaluate import mean_loss, metrics_of_function
from fullshard.training.loop import train
from tests.training.runs import Layer, Regression, local_bits, mean_square, pairs, run_of, same_bits, sharded

Batch = tuple[Tensor, Tensor]
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")


def summed_square(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def uneven(counts: tuple[int, ...]) -> tuple[float, float]:
    """The mean loss over batches of which each rank has its own number, and that of one unsharded model."""
    state, _ = sharded(run_of())
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = [pairs(100 * r + i, 1 + r) for r in range(world) for i in range(counts[r])]
    own = [pairs(100 * rank + i, 1 + rank) for i in range(counts[rank])]
    found = mean_loss(state.model, iter(own), loss=summed_square)
    alone, _ = sharded(run_of("sharding.strategy=no_shard"))
    sums = [summed_square(alone.model, batch) for batch in whole]
    return found, sum(total.item() for total, _ in sums) / sum(count for _, count in sums)


@pytest.mark.parametrize("counts", [(1, 3), (20, 7), (3, 3)])
def test_ranks_with_unequally_many_batches_have_the_mean_of_all(counts: tuple[int, ...], ranks: Any) -> None:
    for found, expected in ranks(2).run(uneven, counts):
        assert found == pytest.approx(expected, rel=1e-6)


def without_batches() -> str:
    state, _ = sharded(run_of())
    with pytest.raises(TrainError) as raised:
        mean_loss(state.model, [pairs(0)] * dist.get_rank(), loss=summed_square)
    return str(raised.value)


def test_a_rank_without_batches_is_refused_on_all_ranks(ranks: Any) -> None:
    assert all("none on rank 0" in text for text in ranks(2).run(without_batches))


class Noisy(Regression):
    """Layers with dropout, one of which the user keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Layer(), nn.Dropout(0.3)) for _ in range(3))


def draw_everywhere(model: nn.Module, _plan: Plan) -> dict[str, float]:
    """Draws from each generator, and computes with dropout as a user might."""
    torch.rand(3), random.random(), np.random.rand()  # noqa: B018
    model.train()
    model(pairs(3)[0])
    return {"one": 1.0}


def trained(strategy: str, *, evaluates: bool) -> tuple[dict[str, Tensor], list[float], list[bool]]:
    state, plan = sharded(run_of(f"sharding.strategy={strategy}"), model=Noisy)
    state.model.get_submodule("layers.0").eval()
    losses: list[float] = []

    def evaluate() -> None:
        if evaluates:
            mean_loss(state.model, [pairs(7, 3), pairs(8, 3)], loss=mean_square)
            metrics_of_function(draw_everywhere, state.model, plan=plan, name="draw")

    evaluate()
    for step in train(state, plan, loss=mean_square):
        losses.append(step.loss)
        evaluate()
    own = random.random(), np.random.rand(), torch.rand(1).item()
    return local_bits(state), [*losses, *own], [one.training for one in state.model.modules()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_with_evaluations_is_bitwise_equal_to_training_without(strategy: str, ranks: Any) -> None:
    runs = [ranks(2).run(partial(trained, strategy, evaluates=one)) for one in (False, True)]
    for (bits, losses, modes), (other_bits, other_losses, other_modes) in zip(*runs, strict=True):
        assert same_bits(bits, other_bits)
        assert losses == other_losses
        assert modes == other_modes
        assert modes[1:].count(False) == 4, "the layer that the user keeps in evaluation mode"


def metrics_of(by_rank: list[Any]) -> dict[str, float] | str:
    state, plan = sharded(run_of("train.steps=1"))
    try:
        given = by_rank[dist.get_rank()]
        return metrics_of_function(lambda *_: given, state.model, plan=plan, name="quiz")
    except TrainError as error:
        return str(error)


def test_pairs_are_summed_over_ranks_and_equal_numbers_are_kept(ranks: Any) -> None:
    found = ranks(2).run(metrics_of, [{"a": 2, "b": (torch.tensor(0.0), r), "c": (r, 0)} for r in (1, 2)])
    assert [one["a"] for one in found] == [2.0, 2.0]
    found = ranks(2).run(metrics_of, [{"b": (1, 1)}, {"b": (torch.tensor(0.5), np.int64(2))}])
    assert found == [{"b": 0.5}] * 2


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([{"a": 1}, {"a": 2}], "a = 1.0 on rank 0, a = 2.0 on rank 1"),
        ([{"a": 1}, {"b": 1}], "returned different metrics on different ranks"),
        ([{"a": 1}, {"a": (1, 1)}], "returned different metrics on different ranks"),
        ([{"a": 1}, None], "returned no metrics"),
        ([{"a": "much"}] * 2, "a = 'much'"),
        ([{"a b": 1}] * 2, "the name 'a b'"),
    ],
)
def test_other_results_of_a_function_are_refused_on_all_ranks(
    by_rank: list[Any], message: str, ranks: Any
) -> None:
    for text in ranks(2).run(metrics_of, by_rank):
        assert "quiz" in text
        assert message in text


class QuizError(Exception):
    """An error of a user's function."""


def raise_on_rank_one(model: nn.Module, _plan: Plan) -> dict[str, float]:
    if dist.get_rank() == 1:
        raise QuizError("question 7 has no answer")
    model(pairs(0)[0])  # gathers with rank 1, which does not come
    return {"a": 1}


def evaluates_with_an_error() -> None:
    state, plan = sharded(run_of())
    metrics_of_function(raise_on_rank_one, state.model, plan=plan, name="quiz")


def test_an_error_of_one_rank_is_raised_at_once_and_names_the_evaluation(ranks: Any) -> None:
    with pytest.raises(QuizError) as raised:
        ranks(2).run(evaluates_with_an_error)
    assert "in the evaluation 'quiz' on rank 1" in "".join(raised.value.__notes__)
