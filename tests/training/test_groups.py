"""[[optimizer.groups]]: who is in a group, and that it is trained as torch trains such a group."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.distributed.tensors import local_tensor
from fullshard.errors import SpecError
from fullshard.spec.run import Run
from fullshard.training.groups import group_lines, match_groups
from fullshard.training.learning_rates import set_learning_rates
from fullshard.training.loop import train
from fullshard.training.schedule import learning_rate_factor
from tests.training.runs import (
    Regression,
    mean_square,
    meta,
    run_of,
    sharded,
    unsharded,
    whole,
)

GROUPS: list[dict[str, Any]] = [
    {"match": ["*.0.*", "head.bias"], "lr_factor": 0.25, "weight_decay": 0.3},
    {"match": ["*.bias"], "betas": [0.5, 0.6]},
    {"match": ["head.*"], "lr_factor": 0.0},
]


def with_groups(*more: str, groups: Any = GROUPS) -> Run:
    return run_of(*more, f"optimizer.groups={toml_text(groups)}")


def toml_text(groups: list[dict[str, Any]]) -> str:
    tables = (", ".join(f"{key} = {json.dumps(one)}" for key, one in group.items()) for group in groups)
    return "[" + ", ".join(f"{{{table}}}" for table in tables) + "]"


def names_of_groups(groups: Any) -> list[tuple[str, ...]]:
    return [
        tuple(one.parameters) for one in match_groups(meta(Regression), with_groups(groups=groups).optimizer)
    ]


def test_the_first_group_that_matches_has_a_parameter() -> None:
    zero, *_, rest = names_of_groups(GROUPS)
    assert zero == ("layers.0.linear.weight", "layers.0.linear.bias", "head.bias")
    assert names_of_groups(GROUPS)[1:3] == [
        ("layers.1.linear.bias", "layers.2.linear.bias"),
        ("head.weight",),
    ]
    assert rest == ("layers.1.linear.weight", "layers.2.linear.weight")


def test_groups_may_have_all_parameters() -> None:
    assert len(names_of_groups([{"match": ["*"]}])) == 1


WRONG = [
    ("*.nonsense", "layers.0.linear.weight"),
    ("*.liner.weight", "layers.0.linear.weight, layers.1.linear.weight"),
    ("head.weights", "head.weight"),
    ("HEAD.*", "head.weight"),
]


@pytest.mark.parametrize(("pattern", "near"), WRONG)
def test_a_pattern_that_matches_nothing_is_refused_with_near_names(pattern: str, near: str) -> None:
    with pytest.raises(SpecError) as raised:
        names_of_groups([{"match": ["*.bias", pattern]}])
    assert repr(pattern) in str(raised.value)
    assert near in (raised.value.fix or "")


def test_a_pattern_whose_parameters_earlier_groups_have_is_refused() -> None:
    with pytest.raises(SpecError, match="the first that matches counts"):
        names_of_groups([{"match": ["*"]}, {"match": ["*.bias"]}])


def test_a_pattern_of_frozen_parameters_is_refused() -> None:
    model = meta(Regression)
    model.get_submodule("head").requires_grad_(False)
    with pytest.raises(SpecError, match=r"only frozen parameters: head\.weight, head\.bias"):
        match_groups(model, with_groups(groups=[{"match": ["head.*"]}]).optimizer)


def test_lines_of_groups_count_parameters() -> None:
    model = meta(Regression)
    lines = group_lines(model, with_groups().optimizer)
    assert lines[0] == "group *.0.*, head.bias, 32 in 3 tensors, rate 0.0025, weight decay 0.3"
    assert lines[1] == "group *.bias, 10 in 2 tensors, rate 0.01, weight decay by default, betas [0.5, 0.6]"
    assert lines[3] == "group all others, 50 in 2 tensors, rate 0.01, weight decay by default"
    assert group_lines(model, run_of().optimizer) == []


# Equal to torch's groups #
STEPS = 4


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(one.shape, generator=generator) for name, one in model.named_parameters()}


def updated_by_torch(run: Run) -> dict[str, Tensor]:
    """Returns the parameters that plain torch updates, without sharding, with the same groups."""
    model = unsharded(run)
    own, section = dict(model.named_parameters()), run.optimizer
    groups: list[dict[str, Any]] = []
    for group, names in zip([*GROUPS, {}], names_of_groups(GROUPS), strict=True):
        for name in names:
            decay = group.get("weight_decay", section.weight_decay if own[name].ndim > 1 else 0.0)
            rate = section.learning_rate * group.get("lr_factor", 1.0)
            betas = tuple(group.get("betas", section.betas))
            groups.append({"params": [own[name]], "weight_decay": decay, "base": rate, "betas": betas})
    optimizer = torch.optim.AdamW(groups, lr=1.0, foreach=True)
    for step in range(STEPS):
        factor = learning_rate_factor(run.schedule, step=step, steps=run.train.step_count)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor
        for name, gradient in gradients(model, step).items():
            own[name].grad = gradient
        optimizer.step()
    return whole(model)


def updated_here(run: Run) -> dict[str, Tensor]:
    state, _ = sharded(run)
    for step in range(STEPS):
        set_learning_rates(state.optimizer, run, step=step)
        given = gradients(state.model, step)
        for name, parameter in state.model.named_parameters():
            own, gradient = local_tensor(parameter), given[name]
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
            assert local_tensor(gradient).shape == own.shape
        state.optimizer.step()
        state.wait_for_updates()
    return whole(state.model)


STRATEGIES = ("full_shard", "no_shard", "zero1")


def differing_parameters() -> list[str]:
    """Compares foreach's updates with torch's. Fused ones round a shard's last elements in another way."""
    found: list[str] = []
    for strategy in STRATEGIES:
        run = with_groups("optimizer.options={foreach=true}", f"sharding.strategy={strategy}")
        wanted, here = updated_by_torch(run), updated_here(run)
        assert torch.equal(here["head.weight"], whole(unsharded(run))["head.weight"]), "its rate is 0"
        found += [f"{name} with {strategy}" for name in wanted if not torch.equal(wanted[name], here[name])]
    fused, offloaded = updated_here(with_groups()), updated_here(with_groups("offload.tier=optimizer:cpu"))
    return found + [f"{name} offloaded" for name in fused if not torch.equal(fused[name], offloaded[name])]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_update_is_bitwise_that_of_an_unsharded_optimizer_with_the_same_groups(
    size: int, ranks: Any
) -> None:
    assert ranks(size).run(differing_parameters) == [[]] * size


def rates() -> dict[str, float]:
    state, plan = sharded(with_groups())
    next(train(state, plan, loss=mean_square))
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    return {
        names[parameter]: group["lr"]
        for group in state.optimizer.param_groups
        for parameter in group["params"]
    }


def shown_rate() -> float:
    state, plan = sharded(with_groups())
    return next(train(state, plan, loss=mean_square)).learning_rate


def test_the_rate_of_a_step_is_that_of_the_rest(ranks: Any) -> None:
    rest, shown = ranks(1).run(rates)[0]["layers.1.linear.weight"], ranks(1).run(shown_rate)[0]
    assert shown == rest == 0.5e-2


def refused_with_adagrad() -> str:
    with pytest.raises(SpecError) as raised:
        sharded(with_groups("optimizer.name=torch.optim.Adagrad"))
    return str(raised.value)


def test_betas_of_a_group_are_refused_by_an_optimizer_without(ranks: Any) -> None:
    said = ranks(1).run(refused_with_adagrad)[0]
    assert "has betas" in said
    assert "Adagrad has none" in said
    for name in ("sgd", "adafactor"):
        with pytest.raises(SpecError, match=f"has betas, which {name} has not"):
            with_groups(f"optimizer.name={name}")
