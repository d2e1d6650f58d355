"""The optimizer that a run names: its class, its options, its groups, and that it updates what is trained."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.errors import ShardError, SpecError, TrainError
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.schedule import learning_rate_factor
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.models import OddModel
from tests.training.runs import (
    WIDTH,
    Regression,
    logged,
    mean_square,
    meta,
    pairs,
    run_of,
    sharded,
    unsharded,
    whole,
)


def described(*overrides: str) -> tuple[str, dict[str, Any]]:
    """(class, the first group's options) of a run's optimizer."""
    optimizer = sharded(run_of(*overrides))[0].optimizer
    return type(optimizer).__name__, {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def messages_of(name: str, *overrides: str) -> list[str]:
    """Returns what is logged while the optimizer is built."""
    with logged() as found:
        described(f"optimizer.name={name}", *overrides)
    return found


def refused(*overrides: str) -> str:
    with pytest.raises(SpecError) as raised:
        sharded(run_of(*overrides))
    return str(raised.value)


class OutOfMemory(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_missing_memory_is_not_called_a_wrong_option(ranks: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        ranks(1).run(described, f"optimizer.name={__name__}.OutOfMemory")


def for_each(function: Callable[..., Any], cases: Sequence[Sequence[str]]) -> list[Any]:
    """In one call of the ranks."""
    return [function(*case) for case in cases]


CLASSES: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
    (
        ("adamw", "optimizer.betas=[0.8, 0.9]", "optimizer.eps=1e-5"),
        "AdamW",
        {"fused": True, "betas": (0.8, 0.9), "eps": 1e-5, "lr": 1e-2, "weight_decay": 0.1},
    ),
    (("sgd", "optimizer.options={momentum=0.5}"), "SGD", {"momentum": 0.5}),
    (("torch.optim.SGD", "optimizer.options={nesterov=true, momentum=0.9}"), "SGD", {"nesterov": True}),
    (("torch.optim.NAdam",), "NAdam", {"betas": (0.9, 0.95), "eps": 1e-8}),
    (("torch.optim.RMSprop", "optimizer.options={alpha=0.5}"), "RMSprop", {"alpha": 0.5}),
    (("torch.optim.Adam", "optimizer.options={foreach=true}"), "Adam", {"foreach": True}),
    (("adamw", "optimizer.options={fused=false, amsgrad=true}"), "AdamW", {"amsgrad": True}),
]


def test_any_class_of_torch_optim_and_its_options(ranks: Any) -> None:
    cases = [(f"optimizer.name={name}", *more) for (name, *more), *_ in CLASSES]
    found = ranks(1).run(for_each, described, cases)[0]
    for (name, options), (_, expected_name, expected) in zip(found, CLASSES, strict=True):
        assert name == expected_name
        assert expected.items() <= options.items()


REFUSED = [
    ("adamw", "{lr=0.1,weight_decay=0.2}", "lr = 0.1, weight_decay = 0.2"),
    ("adamv", "{}", "names no optimizer"),
    ("torch.optim.Adamant", "{}", "names no optimizer"),
    ("torch.nn.Linear", "{}", "names no optimizer"),
    ("no.such.Module", "{}", "names no optimizer"),
    ("..Adam", "{}", "names no optimizer"),
    ("torch.optim", "{}", "names no optimizer"),
    ("torch.optim.Optimizer", "{}", "cannot train these parameters"),
    ("adamw", "{nesterov=true}", "unexpected keyword argument 'nesterov'"),
    ("adamw", "{betas=[2.0, 0.9]}", "Invalid beta"),
    ("adamw", "{fused=true, foreach=true}", "cannot be `True` together"),
    ("torch.optim.LBFGS", "{}", "parameter groups"),
    ("torch.optim.SparseAdam", "{}", "dense gradients"),
]


def test_optimizers_that_cannot_be_built_are_refused(ranks: Any) -> None:
    cases = [(f"optimizer.name={name}", f"optimizer.options={options}") for name, options, _ in REFUSED]
    for said, (_, _, message) in zip(ranks(1).run(for_each, refused, cases)[0], REFUSED, strict=True):
        assert message in said
        assert "try:" in said


def test_betas_and_eps_that_a_class_does_not_use_are_logged(ranks: Any) -> None:
    logs = ranks(1).run(
        messages_of, "torch.optim.Adagrad", "optimizer.betas=[0.8, 0.9]", "optimizer.eps=1e-5"
    )[0]
    assert logs == [
        "optimizer.betas = (0.8, 0.9) is not used by torch.optim.Adagrad: it has no such value",
        "optimizer.eps = 1e-05 is not used by torch.optim.Adagrad: optimizer.options sets it",
    ]
    assert ranks(1).run(messages_of, "adamw", "optimizer.betas=[0.8, 0.9]", "optimizer.eps=1e-5") == [[]]


class Matrices(nn.Module):
    """Without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).tanh())[:, :2]


MAY_FAIL = ("Rprop", "Adafactor", "Muon")


def outcome(*overrides: str) -> str:
    try:
        state, plan = sharded(run_of(*overrides), model=Matrices)
    except SpecError as error:
        return str(error)
    return "trained" if len(list(train(state, plan, loss=mean_square))) == plan.run.train.steps else "stopped"


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_optimizer_that_cannot_update_shards_is_refused(strategy: str, ranks: Any) -> None:
    """Which classes can is torch's to say: they are made of operations that sharded tensors may lack."""
    cases = [
        ("sharding.strategy=" + strategy, "optimizer.name=sgd", "optimizer.options={fused=true}"),
        *(("sharding.strategy=" + strategy, f"optimizer.name=torch.optim.{c}") for c in MAY_FAIL),
    ]
    for rank in ranks(3).run(for_each, outcome, cases):
        for said in rank:
            assert said == "trained" or "cannot train these parameters" in said or "names no" in said


def build_adafactor_of_one_group() -> None:
    """Its one group has vectors, which Adafactor can update, and matrices."""
    sharded(run_of("optimizer.name=torch.optim.Adafactor", "optimizer.weight_decay=0"))


def train_with_own_adafactor() -> None:
    state, plan = sharded(run_of())
    own = torch.optim.Adafactor(state.model.parameters())
    next(iter(train(TrainState(state.model, own, data=state.data), plan, loss=mean_square)))


@pytest.mark.parametrize("attempt", [build_adafactor_of_one_group, train_with_own_adafactor])
def test_an_optimizer_that_can_update_vectors_alone_is_refused_by_name(attempt: Any, ranks: Any) -> None:
    with pytest.raises(
        (SpecError, TrainError), match=r"Adafactor cannot (train these|update sharded) parameters"
    ):
        ranks(2).run(attempt)


def test_pure_bf16_takes_adamw_alone(ranks: Any) -> None:
    pure = "precision.mode=bf16_pure"
    assert ranks(1).run(described, pure)[0][0] == "StochasticAdamW"
    cases = [(pure, "optimizer.name=sgd"), (pure, "optimizer.options={amsgrad=true}")]
    for said in ranks(1).run(for_each, refused, cases)[0]:
        assert "rounds its updates stochastically" in said


# Groups

Group = tuple[float, list[tuple[int, str, int]]]  # weight decay, (dims, dtype, mesh dims) of the parameters


def groups_of(run: Run, model: type[nn.Module]) -> list[Group]:
    state, _ = sharded(run, model=model)
    found: list[Group] = []
    for group in state.optimizer.param_groups:
        kinds = [
            (p.ndim, str(p.dtype), p.device_mesh.ndim if hasattr(p, "device_mesh") else 0)
            for p in group["params"]
        ]
        found.append((group["weight_decay"], kinds))
    return found


def test_matrices_decay_alone_and_a_group_is_of_one_mesh_and_dtype(ranks: Any) -> None:
    run = run_of("data.sequence_length=9", 'sharding.units.overrides=[{match="*head*", strategy="no_shard"}]')
    groups = ranks(2).run(groups_of, run, OddModel)[0]
    assert len(groups) == 5  # matrices and vectors on two meshes, and the scalar
    for decay, kinds in groups:
        assert {decay} == {0.1 if ndim >= 2 else 0.0 for ndim, *_ in kinds}
        assert len({kind[1:] for kind in kinds}) == 1
    assert sum(len(kinds) for _, kinds in groups) == len(
        [p for p in meta(OddModel).parameters() if p.requires_grad]
    )


class HeadNorm(nn.Module):
    """A norm with a weight per head and feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, WIDTH))


class Tower(nn.Module):
    """Names a parameter that does not decay, as models of timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.ones(4, WIDTH))

    def no_weight_decay(self) -> set[str]:
        return {"positions"}


class StackedBiases(nn.Module):
    """The names and shapes of parameters with two dims that are not matrices, beside those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = HeadNorm()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.down_proj = nn.Parameter(torch.ones(4, WIDTH, WIDTH))
        self.down_proj_bias = nn.Parameter(torch.ones(4, WIDTH))
        self.bias = nn.Parameter(torch.ones(4, WIDTH))
        self.bias_table = nn.Parameter(torch.ones(4, WIDTH))
        self.k_norm = nn.Parameter(torch.ones(4, WIDTH))
        self.scales = nn.Parameter(torch.ones(4, WIDTH))
        self.scales._no_weight_decay = True  # as Mamba marks them
        self.tower = Tower()

    def forward(self, x: Tensor) -> Tensor:
        return x


def decayed_parameters() -> set[str]:
    plan = Plan.from_run(run_of("sharding.units.min_parameters=10000000"), world_size=2)
    model = shard(StackedBiases(), plan)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, plan).param_groups
    return {names[one] for group in groups if group["weight_decay"] for one in group["params"]}


def test_norms_biases_and_what_a_model_excludes_do_not_decay(ranks: Any) -> None:
    assert ranks(2).run(decayed_parameters)[0] == {"linear.weight", "down_proj", "bias_table"}


# Order: sharded, then built, before any forward #
def build_unsharded() -> None:
    plan = Plan.from_run(run_of(), world_size=1)
    build_optimizer(unsharded(plan.run), plan)


def build_while_gathered() -> bool:
    state, plan = sharded(run_of("sharding.strategy=shard_grad_op"))
    for module in state.model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    groups = build_optimizer(state.model, plan).param_groups
    return all(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])


def test_an_optimizer_that_is_built_while_the_model_is_gathered_has_its_shards(ranks: Any) -> None:
    assert ranks(1).run(build_while_gathered) == [True]


def build_for_a_new_module() -> None:
    state, plan = sharded(run_of())
    state.model.head = nn.Linear(5, 2)
    build_optimizer(state.model, plan)


def build_before_sharding() -> None:
    plan = Plan.from_run(run_of(), world_size=1)
    model = unsharded(plan.run)
    optimizer = torch.optim.AdamW(model.parameters())
    TrainState(shard(model, plan), optimizer)


def build_for_frozen_parameters() -> None:
    plan = Plan.from_run(run_of(), world_size=1)
    build_optimizer(shard(meta(Regression).requires_grad_(False), plan), plan)


def step_with_a_closure() -> None:
    model = nn.Linear(2, 2)
    TrainState(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (step_with_a_closure, "the step of LBFGS needs arguments."),
        (build_unsharded, "Regression is not sharded."),
        (build_for_a_new_module, "the model has parameters that are not those that were sharded."),
        (build_before_sharding, "the optimizer holds parameters that are not the model's."),
        (build_for_frozen_parameters, "Regression has no trainable parameter."),
    ],
)
def test_optimizer_of_unsharded_parameters_is_refused(attempt: Any, message: str, ranks: Any) -> None:
    with pytest.raises((ShardError, TrainError), match=re.escape(message)):
        ranks(1).run(attempt)


def test_a_wrapped_step_counts_as_needing_no_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    TrainState(model, optimizer)
    optimizer.step = functools.wraps(optimizer.step)(functools.partial(optimizer.step))
    TrainState(model, optimizer)
    closure = torch.optim.LBFGS(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(closure, lambda _step: 1.0)
    with pytest.raises(TrainError, match="got: closure"):
        TrainState(model, closure)


# Same numbers as unsharded #
def trained(run: Run) -> dict[str, Tensor]:
    state, plan = sharded(run)
    assert not any(step.skipped for step in train(state, plan, loss=mean_square))
    return whole(state.model)


def trained_plainly(run: Run, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, Tensor]:
    model = unsharded(run)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = cls(groups, lr=1.0, **options)
    for step in range(run.train.steps):
        optimizer.zero_grad()
        mean_square(model, pairs(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm)
        for group in optimizer.param_groups:
            factor = learning_rate_factor(run.schedule, step=step, steps=run.train.steps)
            group["lr"] = run.optimizer.learning_rate * factor
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("n", "name", "overrides", "options"),
    [
        (3, "SGD", ("optimizer.name=sgd", "optimizer.options={momentum=0.9}"), {"momentum": 0.9}),
        (2, "RMSprop", ("optimizer.name=torch.optim.RMSprop", "train.microbatch=3"), {}),
        (3, "Adagrad", ("optimizer.name=torch.optim.Adagrad",), {}),
        (4, "NAdam", ("optimizer.name=torch.optim.NAdam",), {"betas": (0.9, 0.95)}),
    ],
)
def test_sharded_optimizer_equals_unsharded(
    n: int, name: str, overrides: tuple[str, ...], options: dict[str, Any], ranks: Any
) -> None:
    run = run_of("optimizer.clip_norm=0.5", *overrides)
    expected = trained_plainly(run, getattr(torch.optim, name), options)
    for parameters in ranks(n).run(trained, run):
        torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)
