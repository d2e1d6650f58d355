"""Parameters of a model that is built on meta get what its constructor computes for them."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.models.meta_init import ConstructorTape, construct_with_meta_parameters
from fullshard.parallel.materialize import materialize
from fullshard.training.shard import shard
from tests.fakes.plans import plan_of
from tests.training.runs import whole

WIDTH = 64


class ByConstructor(nn.Module):
    """Initialises its parameters in the ways in which constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.halved, self.orthogonal = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name, parameter in self.named_parameters():
            if name == "scaled.weight":
                nn.init.normal_(parameter, std=0.02 / math.sqrt(16))
        self.halved.weight.data[: WIDTH // 2].zero_()
        self.copied = copy.deepcopy(self.halved)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.cut = nn.Embedding(100, WIDTH)
        nn.init.trunc_normal_(self.cut.weight, std=0.02, a=-0.04, b=0.04)
        self.computed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.computed.weight = nn.Parameter(2 * self.scaled.weight)
        self.drawn = nn.Parameter(torch.empty(WIDTH).normal_() / 100)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


def built() -> nn.Module:
    return construct_with_meta_parameters(ByConstructor, tape=ConstructorTape())


def values() -> Any:
    return materialize(copy.deepcopy(built()), seed=3)


def test_parameters_have_the_values_of_the_constructor() -> None:
    model = values()
    assert model.scaled.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert model.halved.weight[: WIDTH // 2].count_nonzero() == 0
    assert torch.equal(model.copied.weight, model.halved.weight)
    product = model.orthogonal.weight @ model.orthogonal.weight.T
    torch.testing.assert_close(product, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert 0.01 < model.cut.weight.std().item() < 0.02
    assert model.cut.weight.abs().max().item() <= 0.04
    assert torch.equal(model.computed.weight, 2 * model.scaled.weight)
    assert model.drawn.std().item() == pytest.approx(0.01, rel=0.3)
    assert model.plain.weight.abs().max().item() <= 1 / math.sqrt(WIDTH)


def test_values_follow_the_seed() -> None:
    assert torch.equal(values().scaled.weight, values().scaled.weight)
    other = materialize(built(), seed=4)
    assert not torch.equal(values().scaled.weight, other.scaled.weight)


def sharded_values(world_size: int) -> dict[str, Tensor]:
    units = 'sharding.units={names=["scaled", "cop*"]}'
    plan = plan_of(world_size, "sharding.strategy=full_shard", "run.seed=3", units)
    return whole(shard(built(), plan))


def test_shards_have_the_values_of_the_whole_model(ranks: Any) -> None:
    expected = dict(values().named_parameters())
    for own in ranks(2).run(sharded_values, 2):
        assert own.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in own.items())
