"""Parameters that FSDP2 cannot take are refused before anything is allocated; attributes and hooks stay."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import ShardError
from fullshard.parallel.model_parameters import check_parameters
from fullshard.spec.plan import Plan
from fullshard.training.shard import shard
from tests.training.runs import run_of


def parameter(value: Tensor, **options: Any) -> nn.Parameter:
    return nn.Parameter(value, **options)


def hooked() -> nn.Parameter:
    made = parameter(torch.ones(2))
    made.register_hook(lambda gradient: gradient)
    return made


REFUSED: dict[str, Callable[[], nn.Parameter]] = {
    "complex": lambda: parameter(torch.ones(2, dtype=torch.complex64)),
    "complex scalar": lambda: parameter(torch.ones((), dtype=torch.complex64)),
    "empty": lambda: parameter(torch.ones(0, 3)),
    "sparse": lambda: parameter(torch.eye(2).to_sparse()),
    "fp8": lambda: parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False),
    "hooked": hooked,
}
ACCEPTED: dict[str, Callable[[], nn.Parameter]] = {
    "frozen complex": lambda: parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False),
    "fp64": lambda: parameter(torch.ones(2, dtype=torch.float64)),
    "frozen integers": lambda: parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
    "transposed": lambda: parameter(torch.ones(3, 2).T),
    "scalar": lambda: parameter(torch.ones(())),
}


def module_with(one: nn.Parameter) -> nn.Module:
    model = nn.Linear(2, 2)
    model.other = one
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_parameters_that_fail_in_a_step_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ShardError) as raised:
        check_parameters(module_with(REFUSED[kind]()))
    assert raised.value.got == "other"


@pytest.mark.parametrize("kind", ACCEPTED)
def test_parameters_that_can_be_sharded_are_accepted(kind: str) -> None:
    check_parameters(module_with(ACCEPTED[kind]()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_with_elements_in_common_are_refused_and_neighbours_are_not(device: str) -> None:
    memory = torch.zeros(6, device=device)
    model = nn.Module()
    model.first, model.second = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
    check_parameters(model)
    check_parameters(nn.RNN(2, 2))
    model.third = nn.Parameter(memory[2:4])
    with pytest.raises(ShardError, match="share memory"):
        check_parameters(model)


def attributes_and_calls() -> tuple[bool, int]:
    model, called = nn.Linear(4, 4), []
    vars(model.weight)["no_weight_decay"] = True
    model.weight.register_post_accumulate_grad_hook(called.append)
    shard(model, Plan.from_run(run_of("sharding.units.min_parameters=10000000"), world_size=2))
    model(torch.ones(2, 4)).sum().backward()
    return vars(model.weight).get("no_weight_decay", False), len(called)


def test_attributes_and_hooks_of_parameters_are_those_of_their_shards(ranks: Any) -> None:
    assert ranks(2).run(attributes_and_calls) == [(True, 1)] * 2


def test_trained_parameters_in_float64_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).double().requires_grad_(False))
    check_parameters(model)
    assert "2 parameters in float64 are trained in the run's dtype: 0.weight, 0.bias" in caplog.text


@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_shards_cannot_follow_are_refused(kind: type[nn.Module], option: str) -> None:
    with pytest.raises(ShardError, match=r"an embedding (?s:.)* cannot be sharded"):
        check_parameters(nn.Sequential(kind(3, 2, **{option: True})))


class Elsewhere(nn.Module):
    """A linear layer whose weight something else holds, too."""

    def __init__(self, hold: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = hold(self.linear.weight)


ELSEWHERE: dict[str, Callable[[nn.Parameter], Any]] = {
    "list": lambda one: [0, one],
    "dict of tuples": lambda one: {"a": (one,)},
    "partial": lambda one: partial(torch.add, other=one),
    "closure": lambda one: lambda x: x @ one,
    "object": lambda one: SimpleNamespace(inner=SimpleNamespace(weight=one)),
    "transposed view": lambda one: one.t(),
    "view of a row": lambda one: [one.detach()[1]],
    "buffer": lambda one: nn.Buffer(one.data),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_an_attribute_with_a_parameter_is_refused(kind: str) -> None:
    with pytest.raises(ShardError, match="an attribute of Elsewhere holds a parameter") as raised:
        check_parameters(Elsewhere(ELSEWHERE[kind]))
    assert "linear.weight" in str(raised.value.got)


def test_attributes_that_follow_the_parameters_are_accepted() -> None:
    check_parameters(nn.Sequential(nn.GRU(2, 2), Elsewhere(lambda one: [one.shape, "linear.weight"])))
    check_parameters(Elsewhere(lambda one: nn.ParameterList([one])))
    check_parameters(Elsewhere(lambda one: one.detach().clone()))
    check_parameters(nn.utils.spectral_norm(nn.Linear(2, 2)))
