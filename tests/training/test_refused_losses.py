"""Losses and microbatches that a step refuses, and the mean that validation takes of losses."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.training.evaluate import mean_loss
from fullshard.training.loop import train
from tests.training.runs import mean_square, pairs, run_of, sharded


def refusals(losses: Sequence[str], numbers: Sequence[int]) -> list[str]:
    """Returns the error for each loss, and for each number of microbatches other than 3."""
    errors = []
    cases = [*((LOSSES[name][0], None) for name in losses), *((mean_square, Number(n)) for n in numbers)]
    for loss, data in cases:
        state, plan = sharded(run_of("train.microbatch=4"), data=data)
        with pytest.raises(TrainError) as raised:
            next(iter(train(state, plan, loss=loss)))
        errors.append(str(raised.value))
    return errors


def loss_without_gradients(model: nn.Module, batch: Any) -> Any:
    with torch.no_grad():
        return mean_square(model, batch)


calls = itertools.count()


def loss_of_either_kind(model: nn.Module, batch: Any) -> Any:
    total = mean_square(model, batch)
    return (total, 4) if next(calls) % 2 else total


class Number:
    def __init__(self, number: int) -> None:
        self.number = number

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        yield from [pairs(step, plan.microbatch)] * self.number


# name -> (loss, what the error reports)
NO_LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "none": (lambda model, batch: None, "NoneType"),
    "rows": (lambda model, batch: model(batch[0]).square().sum(1), "a float32 tensor of shape [4]"),
    "float": (lambda model, batch: mean_square(model, batch).item(), "float"),
    "detached": (
        lambda model, batch: (mean_square(model, batch).detach(), 4),
        "a loss without a gradient (requires_grad=False)",
    ),
    "three values": (lambda model, batch: (mean_square(model, batch), 4, "rows"), "tuple"),
    "complex": (lambda model, batch: mean_square(model, batch) * 1j, "a complex64 tensor of shape []"),
    "no gradients": (loss_without_gradients, "a loss without a gradient (requires_grad=False)"),
}
NO_COUNTS: dict[str, tuple[Callable[..., Any], str]] = {
    "output": (
        lambda model, batch: (mean_square(model, batch), model(batch[0])),
        "a float32 tensor of shape [4, 2]",
    ),
    "no count": (lambda model, batch: (mean_square(model, batch), None), "NoneType"),
    "nan": (
        lambda model, batch: (mean_square(model, batch), torch.tensor(math.nan)),
        "nan, over all ranks and microbatches of the step",
    ),
    "infinite": (
        lambda model, batch: (mean_square(model, batch), math.inf),
        "inf, over all ranks and microbatches of the step",
    ),
}
LOSSES = {**NO_LOSSES, **NO_COUNTS, "mean or sum": (loss_of_either_kind, "")}


def test_results_that_are_not_losses_are_refused(ranks: Any) -> None:
    errors = ranks(1).run(refusals, list(NO_LOSSES), [])[0]
    for error, (_, got) in zip(errors, NO_LOSSES.values(), strict=True):
        assert "the loss function gave no loss to train on" in error
        assert f"got: {got}\n" in error


def test_results_that_are_not_counts_are_refused(ranks: Any) -> None:
    *errors, last = ranks(1).run(refusals, [*NO_COUNTS, "mean or sum"], [])[0]
    for error, (_, got) in zip(errors, NO_COUNTS.values(), strict=True):
        assert "count" in error.partition("\n")[0]
        assert f"got: {got}\n" in error
    assert "a mean for some microbatches, and a sum with its count for others" in last


def mean_or_sum(model: nn.Module, batch: Any) -> Any:
    total = mean_square(model, batch)
    return (total, 4) if dist.get_rank() else total


def train_on_mean_or_sum() -> None:
    state, plan = sharded(run_of())
    list(train(state, plan, loss=mean_or_sum))


def test_a_mean_on_one_rank_and_a_sum_on_another_are_refused(ranks: Any) -> None:
    with pytest.raises(TrainError, match=r"kind of loss \(a mean or a sum\) differs"):
        ranks(2).run(train_on_mean_or_sum)


def test_another_number_of_microbatches_is_refused(ranks: Any) -> None:
    said = ranks(1).run(refusals, [], [2, 4, 0])[0]
    for message, got in zip(said, ("2", "more than 3", "0"), strict=True):
        assert "a step takes 3 microbatches of each rank" in message
        assert f"got: {got}\n" in message


class LossWithHead(nn.Module):
    """A loss with a trained or a frozen head."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2).requires_grad_(is_trained)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return self.head(model(batch[0]) - batch[1]).square().mean()


def train_with_head_outside(strategy: str, recompute: str, is_trained: bool, is_wrapped: bool) -> int:
    state, plan = sharded(run_of(f"sharding.strategy={strategy}", f"recompute.mode={recompute}"))
    loss = LossWithHead(is_trained=is_trained)
    return len(list(train(state, plan, loss=(lambda *given: loss(*given)) if is_wrapped else loss)))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_loss_with_trained_parameters_of_its_own_is_refused(ranks: Any, is_wrapped: bool) -> None:
    with pytest.raises(TrainError, match="depends on trained parameters that are not the model's") as raised:
        ranks(2).run(train_with_head_outside, "full_shard", "none", True, is_wrapped)
    names = ["one of shape [2, 2]", "one of shape [2]"]
    if not is_wrapped:
        names = ["LossWithHead.head.weight", "LossWithHead.head.bias"]
    assert raised.value.got in (", ".join(names), ", ".join(reversed(names)))


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard"])
def test_a_loss_with_frozen_parameters_of_its_own_is_trained_on(ranks: Any, strategy: str) -> None:
    assert ranks(2).run(train_with_head_outside, strategy, "full", False, False) == [6, 6]


@pytest.mark.parametrize(("weight", "expected"), [(0.25, 3.0), (0.0, math.nan)])
def test_validation_loss_is_the_mean_over_counts(weight: float, expected: float) -> None:
    model = nn.Linear(2, 2)
    batches = [torch.tensor(3.0 * weight), torch.tensor(3.0 * weight)]
    found = mean_loss(model, batches, loss=lambda _, total: (total, weight))  # type: ignore[arg-type,return-value]
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("microbatch", [1, 2, 3])
def test_a_mean_in_validation_does_not_depend_on_the_microbatch(
    microbatch: int,
) -> None:
    labels = torch.tensor([[5, 7], [-100, 3], [1, 2]])
    padded = torch.cat([labels, torch.full((-len(labels) % microbatch + microbatch, 2), -100)])
    batches = [{"labels": rows} for rows in padded.split(microbatch)]  # the last has no labels

    def mean_label(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return batch["labels"][batch["labels"] >= 0].float().mean()

    found = mean_loss(nn.Linear(2, 2), batches, loss=mean_label)
    assert found == pytest.approx((5 + 7 + 3 + 1 + 2) / 5)
