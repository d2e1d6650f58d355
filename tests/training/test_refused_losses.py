"""Results of loss functions, and numbers of microbatches, that a step refuses."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.training.between_steps import validation_loss
from fullshard.training.loop import train
from tests.training.runs import mean_square, pairs, run_of, sharded


def refusals(losses: Sequence[Callable[..., Any]], numbers: Sequence[int]) -> list[str]:
    """Returns the error for each loss, and for each number of microbatches other than 3."""
    said = []
    for loss, data in [*((loss, None) for loss in losses), *((mean_square, Number(n)) for n in numbers)]:
        state, plan = sharded(run_of("train.microbatch=4"), data=data)
        with pytest.raises(TrainError) as raised:
            next(iter(train(state, plan, loss=loss)))
        said.append(str(raised.value))
    return said


def no_loss(model: nn.Module, batch: Any) -> Any:
    model(batch[0])


def loss_of_rows(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().sum(1)


def loss_as_float(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch).item()


def detached_loss(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch).detach(), 4


def loss_of_three(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch), 4, "rows"


def loss_and_output(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch), model(batch[0])


def loss_without_count(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch), None


def complex_loss(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch) * 1j


def loss_without_gradients(model: nn.Module, batch: Any) -> Any:
    torch.set_grad_enabled(False)
    try:
        return mean_square(model, batch)
    finally:
        torch.set_grad_enabled(True)


def loss_of_nan(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch), torch.tensor(math.nan)


def loss_of_infinitely_many(model: nn.Module, batch: Any) -> Any:
    return mean_square(model, batch), math.inf


def loss_of_either_kind(model: nn.Module, batch: Any) -> Any:
    total = mean_square(model, batch)
    loss_of_either_kind.calls = getattr(loss_of_either_kind, "calls", 0) + 1  # type: ignore[attr-defined]
    return (total, 4) if loss_of_either_kind.calls % 2 else total  # type: ignore[attr-defined]


class Number:
    def __init__(self, number: int) -> None:
        self.number = number

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        yield from [pairs(step, plan.microbatch)] * self.number


NO_LOSSES: dict[Callable[..., Any], str] = {
    no_loss: "NoneType",
    loss_of_rows: "a float32 tensor of shape [4]",
    loss_as_float: "float",
    detached_loss: "a loss without a gradient (requires_grad=False)",
    loss_of_three: "tuple",
    complex_loss: "a complex64 tensor of shape []",
    loss_without_gradients: "a loss without a gradient (requires_grad=False)",
}
NO_COUNTS: dict[Callable[..., Any], str] = {
    loss_and_output: "a float32 tensor of shape [4, 2]",
    loss_without_count: "NoneType",
    loss_of_nan: "nan, over all ranks and microbatches of the step",
    loss_of_infinitely_many: "inf, over all ranks and microbatches of the step",
}


def test_what_is_no_loss_is_refused(ranks: Any) -> None:
    said = ranks(1).run(refusals, list(NO_LOSSES), [])[0]
    for message, got in zip(said, NO_LOSSES.values(), strict=True):
        assert "the loss function gave no loss to train on" in message
        assert f"got: {got}\n" in message


def test_what_is_no_count_is_refused(ranks: Any) -> None:
    said = ranks(1).run(refusals, [*NO_COUNTS, loss_of_either_kind], [])[0]
    for message, got in zip(said, NO_COUNTS.values(), strict=False):
        assert "count" in message.partition("\n")[0]
        assert f"got: {got}\n" in message
    assert "a mean for some microbatches, and a sum with its count for others" in said[-1]


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


@pytest.mark.parametrize(("weight", "expected"), [(0.25, 3.0), (0.0, math.nan)])
def test_a_validation_loss_is_the_mean_over_what_counts(weight: float, expected: float) -> None:
    model = nn.Linear(2, 2)
    batches = [torch.tensor(3.0 * weight), torch.tensor(3.0 * weight)]
    found = validation_loss(model, batches, loss=lambda _, total: (total, weight))  # type: ignore[arg-type,return-value]
    assert found == pytest.approx(expected, nan_ok=True)
