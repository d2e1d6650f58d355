"""In bf16, parameters may be trained, or have their first gradient, later than others of their unit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.training.loop import train
from tests.training.runs import Regression, mean_square, run_of, sharded, whole

BF16 = ("precision.mode=bf16", "train.steps=4", "train.microbatch=2")


def train_an_unfrozen_layer(strategy: str) -> dict[str, Tensor]:
    """Parameters after two steps with a frozen first layer, and two with all."""
    state, plan = sharded(run_of(*BF16, f"sharding.strategy={strategy}"))
    layer = state.model.get_submodule("layers.0").requires_grad_(False)
    for step in train(state, plan, loss=mean_square):
        layer.requires_grad_(step.index >= 2)
    return whole(state.model)


class LateRegression(Regression):
    """Regression that adds a second output if `adds_late` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(5, 2)
        self.adds_late = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.late(x) if self.adds_late else 0)


def train_with_late_gradients(strategy: str) -> dict[str, Tensor]:
    """Parameters of a model whose last microbatch of a step alone uses some of its last unit."""
    settings = (f"sharding.strategy={strategy}", "train.gradient_sync=last_microbatch")
    state, plan = sharded(run_of(*BF16, *settings), model=LateRegression)
    calls = 0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        model.adds_late = calls % plan.accumulation == 0
        return mean_square(model, batch)

    list(train(state, plan, loss=loss))
    return whole(state.model)


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
@pytest.mark.parametrize("trained", [train_an_unfrozen_layer, train_with_late_gradients])
def test_parameters_that_come_late_are_trained_as_on_whole_replicas(
    trained: Callable[[str], dict[str, Tensor]], strategy: str, ranks: Any
) -> None:
    found, expected = (ranks(2).run(trained, own)[0] for own in (strategy, "no_shard"))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
