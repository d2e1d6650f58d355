"""The optimizer in backward: the plain path's bits, never all gradients, and what it cannot go with."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard.errors import PlanError, SpecError, TrainError
from fullshard.profiler.memory import storage_bytes_of_tensors
from fullshard.sharding.apply import shard
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import Step, train
from fullshard.training.loss import next_token_loss
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY, OddModel
from tests.training.runs import (
    WIDTH,
    Pairs,
    Regression,
    local_bits,
    mean_square,
    meta,
    run_of,
    same_bits,
    sharded,
)

IN_BACKWARD = "optimizer.in_backward=true"


class Tied(OddModel):
    def __init__(self) -> None:
        super().__init__(tied=True)


class Mixed(OddModel):
    """Experts, a scalar, frozen matrices."""

    def __init__(self) -> None:
        super().__init__(mixture=True)


def odd_run(*more: str) -> Run:
    return run_of("optimizer.clip_norm=0", "data.sequence_length=9", "train.steps=4", *more)


def trained(run: Run, model: type[nn.Module]) -> tuple[list[Step], dict[str, Tensor]]:
    state, plan = sharded(run, model=model, data=Rows(VOCABULARY))
    steps = list(train(state, plan, loss=next_token_loss))
    return steps, local_bits(state)


def both(model: type[nn.Module], *more: str) -> list[tuple[list[Step], dict[str, Tensor]]]:
    """The plain path's, and with the optimizer in backward."""
    return [trained(odd_run(*more, *one), model) for one in ((), (IN_BACKWARD,))]


class Twice(OddModel):
    """Its layers run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([*self.layers, *self.layers])


# The same numbers

HYBRID = ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2")
UNSHARDED = 'sharding.units.overrides=[{match="layers.1", strategy="no_shard"}]'
SAME = [
    pytest.param(1, Tied, (), marks=pytest.mark.long),
    (2, Mixed, ("sharding.strategy=no_shard", "optimizer.name=sgd", "optimizer.momentum=0.5")),
    pytest.param(3, Mixed, ("precision.mode=bf16", "recompute.mode=full"), marks=pytest.mark.long),
    (2, Mixed, (UNSHARDED, "optimizer.name=torch.optim.NAdam")),
    (2, Twice, ()),
    (
        4,
        Tied,
        (*HYBRID, "precision.mode=bf16_reduce", "prefetch.mode=explicit", "fault_tolerance.fingerprint=all"),
    ),
]


@pytest.mark.parametrize(("n", "model", "more"), SAME)
def test_each_step_leaves_the_bits_that_the_plain_path_leaves(
    n: int, model: type[nn.Module], more: tuple[str, ...], ranks: Any
) -> None:
    for (plain, bits), (steps, own) in ranks(n).run(both, model, *more):
        assert same_bits(own, bits)
        assert any(name.startswith("optimizer.") for name in own)
        figures = [[(s.loss, s.grad_norm, s.tokens, s.learning_rate) for s in one] for one in (plain, steps)]
        assert figures[0] == figures[1]


STRATEGIES = ("full_shard", "no_shard", "zero1", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_reduce", "bf16_pure"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_whatever_the_strategy_and_the_precision(n: int, strategy: str, precision: str, ranks: Any) -> None:
    degree = (f"sharding.shard_degree={n}",) if strategy.startswith("hybrid") else ()
    more = (f"sharding.strategy={strategy}", f"precision.mode={precision}", *degree)
    for model in (Tied, Mixed):
        for (_, bits), (_, own) in ranks(n).run(both, model, *more):
            assert same_bits(own, bits)


class Counting(torch.optim.SGD):
    """The rate falls with the steps that a group has seen, as some optimizers have it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            group["lr"] /= group["seen"]
        return super().step(closure)


def counted(*more: str) -> tuple[list[int], dict[str, Tensor]]:
    run = run_of("optimizer.clip_norm=0", *more)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(meta(Regression), plan)
    matrices = [[p for p in model.parameters() if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False)]
    optimizer = Counting([{"params": group} for group in matrices], lr=0.1)
    state = TrainState(model, optimizer, data=Pairs())
    list(train(state, plan, loss=mean_square))
    return [group["seen"] for group in optimizer.param_groups], local_bits(state)


def both_counted() -> list[tuple[list[int], dict[str, Tensor]]]:
    return [counted(), counted(IN_BACKWARD)]


def test_what_an_optimizer_counts_in_its_groups_is_counted_once_a_step(ranks: Any) -> None:
    (plain, bits), (seen, own) = ranks(2).run(both_counted)[0]
    assert plain == seen == [6, 6]
    assert same_bits(own, bits)


def half_an_optimizer() -> tuple[list[float], bool, bool]:
    """It holds the first layer alone."""
    run = run_of("optimizer.clip_norm=0", IN_BACKWARD)
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(meta(Regression), plan)
    optimizer = torch.optim.SGD(model.get_submodule("layers.0").parameters(), lr=1e-2)
    state = TrainState(model, optimizer, data=Pairs())
    before = local_bits(state)
    norms = [step.grad_norm for step in train(state, plan, loss=mean_square)]
    changed = {name for name, bits in local_bits(state).items() if not torch.equal(bits, before[name])}
    first = {name for name in before if name.startswith("model.layers.0.")}
    return norms, changed == first, all(p.grad is None for p in model.parameters())


def test_what_the_optimizer_does_not_hold_is_measured_and_stays(ranks: Any) -> None:
    for norms, is_the_first_layer, none_left in ranks(1).run(half_an_optimizer):
        assert all(norm > 0 for norm in norms)
        assert is_the_first_layer
        assert none_left


# Never all gradients


def gradients_at_updates(*more: str) -> tuple[list[int], int]:
    """Bytes of gradients at each of the optimizer's calls in a step, and of all parameters."""
    state, plan = sharded(run_of("optimizer.clip_norm=0", "train.steps=1", *more))
    parameters = list(state.model.parameters())
    seen: list[int] = []
    state.optimizer.register_step_pre_hook(
        lambda *_: seen.append(storage_bytes_of_tensors(p.grad for p in parameters if p.grad is not None))
    )
    list(train(state, plan, loss=mean_square))
    return seen, storage_bytes_of_tensors(parameters)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_one_units_gradients_are_there_at_once(strategy: str, ranks: Any) -> None:
    """Regression: three blocks of 5 × 5 + 5, and the root's head of 2 × 5 + 2."""
    block, head = 4 * (WIDTH * WIDTH + WIDTH), 4 * (2 * WIDTH + 2)
    plain, whole = ranks(1).run(gradients_at_updates, "sharding.strategy=" + strategy)[0]
    assert plain == [whole]
    seen, _ = ranks(1).run(gradients_at_updates, "sharding.strategy=" + strategy, IN_BACKWARD)[0]
    assert sorted(seen) == [head, block, block, block]
    assert sum(seen) == whole


# Before the first update


def bits_when_told() -> list[bool]:
    """Whether what a background save must have copied by then is as it was before the step."""
    state, plan = sharded(run_of("optimizer.clip_norm=0", IN_BACKWARD))
    steps = train(state, plan, loss=mean_square)
    next(steps)
    before, told = local_bits(state), list[bool]()
    state.register_before_next_update(lambda: told.append(same_bits(before, local_bits(state))))
    next(steps)
    return [*told, not same_bits(before, local_bits(state))]


def test_a_snapshot_is_waited_for_before_the_first_update(ranks: Any) -> None:
    assert ranks(2).run(bits_when_told) == [[True, True]] * 2


# What is not finite


def spoiled(spoil: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """`mean_square`, but for the second call on the last rank."""
    calls = itertools.count(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = mean_square(model, batch)
        is_it = next(calls) == 2 and dist.get_rank() == dist.get_world_size() - 1
        return spoil(value) if is_it else value

    return loss


def spoiled_loss(*more: str) -> tuple[list[bool], list[bool], dict[str, Tensor]]:
    state, plan = sharded(run_of("optimizer.clip_norm=0", "train.steps=4", *more))
    skipped, touched, before = list[bool](), list[bool](), local_bits(state)
    for step in train(state, plan, loss=spoiled(lambda value: value + torch.inf)):
        after = local_bits(state)
        skipped.append(step.skipped)
        touched.append(not same_bits(before, after))
        before = after
    return skipped, touched, before


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(strategy: str, ranks: Any) -> None:
    where = "sharding.strategy=" + strategy
    plain = ranks(3).run(spoiled_loss, where)
    for rank, (skipped, touched, bits) in enumerate(ranks(3).run(spoiled_loss, where, IN_BACKWARD)):
        assert skipped == [False, True, False, False]
        assert touched == [True, False, True, True]
        assert same_bits(bits, plain[rank][2])


def nothing_counts(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).float().sum() * 0, 0


def without_a_token() -> tuple[bool, bool, float]:
    state, plan = sharded(run_of("optimizer.clip_norm=0", IN_BACKWARD))
    before = local_bits(state)
    step = next(iter(train(state, plan, loss=nothing_counts)))
    return step.skipped, same_bits(before, local_bits(state)), step.loss


def test_a_step_without_a_valid_token_anywhere_is_skipped(ranks: Any) -> None:
    for skipped, untouched, loss in ranks(2).run(without_a_token):
        assert skipped
        assert untouched
        assert math.isnan(loss)


def spoiled_gradient() -> tuple[int, str]:
    state, plan = sharded(run_of("optimizer.clip_norm=0", IN_BACKWARD))
    with pytest.raises(TrainError) as raised:
        list(train(state, plan, loss=spoiled(lambda value: value + (value * 0).sqrt())))
    return state.step, str(raised.value)


def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks(ranks: Any) -> None:
    for step, said in ranks(3).run(spoiled_gradient):
        assert step == 1
        assert "step 2 is not finite" in said
        assert "--resume" in said


class InPieces(Regression):
    """The second use of the first layer is in a backward of its own, inside the other."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(checkpoint(self.layers[0], x, use_reentrant=True))


def in_pieces() -> str:
    state, plan = sharded(run_of("optimizer.clip_norm=0", IN_BACKWARD), model=InPieces)
    with pytest.raises(TrainError) as raised:
        list(train(state, plan, loss=mean_square))
    return str(raised.value)


def test_a_gradient_that_comes_in_pieces_is_refused_in_the_first_step(ranks: Any) -> None:
    assert "layers.0.linear.weight comes more than once" in ranks(1).run(in_pieces)[0]


# What it cannot go with

REFUSED = [
    (("optimizer.clip_norm=1.0",), "clipping needs the norm of all gradients before the first update"),
    (("precision.mode=fp16",), 'precision.mode = "fp16"'),
    (("fault_tolerance.on_spike=skip",), 'fault_tolerance.on_spike = "skip"'),
    (("offload.tier=optimizer:cpu",), "offload.tier"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_waits_for_the_whole_gradient_is_refused(settings: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError) as raised:
        run_of("optimizer.clip_norm=0", IN_BACKWARD, *settings)
    assert said in str(raised.value)


def test_accumulation_is_refused() -> None:
    run = run_of("optimizer.clip_norm=0", IN_BACKWARD, "train.microbatch=2")
    with pytest.raises(PlanError, match=r"train\.microbatch = 6"):
        Plan.from_run(run, world_size=2)
