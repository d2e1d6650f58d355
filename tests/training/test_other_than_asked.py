"""Programs whose step would silently be other than written are refused, or what differs is logged."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import FullshardError
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.training import same_numbers
from tests.training.runs import (
    WIDTH,
    Layer,
    Pairs,
    Regression,
    logged,
    mean_square,
    pairs,
    run_of,
    sharded,
    unsharded,
    whole,
)

FULL = ("sharding.strategy=full_shard", "train.microbatch=6")


class ClampedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Clamped(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = ClampedLinear(WIDTH, 2)


class Codebook(Regression):
    """A frozen parameter that follows the inputs, written through `data`, which counts no changes."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.empty(2), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.code)

    def forward(self, x: Tensor) -> Tensor:
        self.code.data += x.mean()
        return super().forward(x)


class ViewOfLinear(nn.Linear):
    """Returns a view, whose hooks an addition in place loses."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:]


class AddsInPlace(Regression):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = ViewOfLinear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer.linear(x)
            y += x
            x = y
        return self.head(x)


class NormedLayer(Layer):
    """Keeps a value for the loss as an attribute, where FSDP2 does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept = self.norm(y).square().mean()
        return y


class KeepsNorms(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormedLayer() for _ in range(3))


def loss_with_kept_norms(model: nn.Module, batch: Any) -> Tensor:
    loss = mean_square(model, batch)
    return loss + sum(layer.kept for layer in model.layers)


def own_backward(model: nn.Module, batch: Any) -> Tensor:
    model(batch[0]).square().mean().backward()
    return mean_square(model, batch)


def error_of_a_step(model: type[nn.Module], loss: Callable[..., Any], *overrides: str) -> str:
    state, plan = sharded(run_of(*FULL, *overrides), model=model)
    with pytest.raises(FullshardError) as raised:
        next(iter(train(state, plan, loss=loss)))
    return str(raised.value)


BY_LAYER = 'sharding.units={names=["layers.*.linear"]}'
BY_UNIT = 'sharding.units={names=["layers.*"]}'
RECOMPUTED = 'recompute.mode="full"'
REFUSED: dict[str, tuple[type[nn.Module], Callable[..., Any], str, str]] = {
    "weight clamped in forward": (Clamped, mean_square, "run.seed=0", "changes a parameter in place"),
    "codebook changed in forward": (Codebook, mean_square, "run.seed=0", "changes a parameter in place"),
    "backward in the loss": (Regression, own_backward, "run.seed=0", "ran a backward pass of its own"),
    "output changed in place": (AddsInPlace, mean_square, BY_LAYER, "parameters are not gathered"),
    "kept norm": (KeepsNorms, loss_with_kept_norms, BY_UNIT, "parameters are not gathered"),
    "kept norm, recomputed": (KeepsNorms, loss_with_kept_norms, RECOMPUTED, "parameters are not gathered"),
}


@pytest.mark.filterwarnings("ignore")  # FSDP2 warns of views
@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_cannot_be_as_written_is_refused(case: str, ranks: Any) -> None:
    model, loss, override, message = REFUSED[case]
    for error in ranks(2).run(error_of_a_step, model, loss, override):
        assert message in error


class TwoScales(Regression):
    """Rank 0 uses one scalar, the other ranks the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.first)
        nn.init.ones_(self.second)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.second if dist.get_rank() else self.first)


def test_ranks_that_use_different_scalars_are_refused(ranks: Any) -> None:
    for error in ranks(2).run(error_of_a_step, TwoScales, mean_square):
        assert "rank 0: reduces scalars without gradients of second" in error


def error_of_frozen_parts_by_rank() -> str:
    state, plan = sharded(run_of(*FULL, "sharding.units.min_parameters=10000000"))
    state.model.layers[dist.get_rank()].linear.weight.requires_grad_(False)
    with pytest.raises(FullshardError) as raised:
        next(iter(train(state, plan, loss=mean_square)))
    return str(raised.value)


def test_ranks_that_freeze_different_parameters_are_refused(ranks: Any) -> None:
    for error in ranks(2).run(error_of_frozen_parts_by_rank):
        assert "rank 0: reduces (root) without gradients of layers.0.linear.weight" in error


def replaces_data(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data * 0.5


def replaces_a_parameter(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() * 0.5)


def adds_a_module(model: nn.Module) -> None:
    model.head.weight_of_more = nn.Linear(WIDTH, 2)


def changes_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight.data.mul_(0.5)


def moves_the_model(model: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def error_of_a_change(change: Callable[[nn.Module], None], evaluates: bool) -> str:
    """The error of the step, or the evaluation, behind a change of the sharded model, or nothing."""
    state, plan = sharded(run_of(*FULL, "train.steps=2"))
    try:
        for step in train(state, plan, loss=mean_square):
            if step.index == 1:
                change(state.model)
            if evaluates:
                with torch.no_grad():
                    state.model(pairs(0)[0])
    except FullshardError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("change", [replaces_data, replaces_a_parameter, adds_a_module])
def test_replaced_or_added_parameters_are_refused_after_sharding(
    change: Any, evaluates: bool, ranks: Any
) -> None:
    for error in ranks(2).run(error_of_a_change, change, evaluates):
        assert "not those that were sharded" in error
        assert "head.weight" in error


@pytest.mark.parametrize("change", [changes_in_place, moves_the_model])
def test_changes_that_shards_follow_are_kept(change: Any, ranks: Any) -> None:
    assert ranks(2).run(error_of_a_change, change, False) == ["", ""]


def messages_of_an_unfrozen_layer(dtype: torch.dtype) -> list[str]:
    run = run_of(*FULL, "precision.mode=bf16", "train.steps=1")
    plan, model = Plan.from_run(run, world_size=dist.get_world_size()), unsharded(run)
    model.layers.requires_grad_(False).to(dtype)
    shard(model, plan)
    model.requires_grad_(True)
    state = TrainState(model, torch.optim.AdamW(model.parameters()), data=Pairs())
    with logged() as messages:
        next(iter(train(state, plan, loss=mean_square)))
    return [message for message in messages if "lose small updates: layers.0.linear.weight" in message]


def test_parameters_that_are_unfrozen_in_half_precision_are_named(ranks: Any) -> None:
    for dtype, expected in ((torch.bfloat16, [1, 0]), (torch.float32, [0, 0])):
        assert [len(found) for found in ranks(2).run(messages_of_an_unfrozen_layer, dtype)] == expected


def messages_of_bf16_pure(own: bool) -> list[str]:
    state, plan = sharded(run_of(*FULL, "precision.mode=bf16_pure", "train.steps=1"))
    if own:
        state.optimizer = torch.optim.AdamW(state.model.parameters())
    with logged() as messages:
        next(iter(train(state, plan, loss=mean_square)))
    return messages


def test_an_optimizer_of_ones_own_that_rounds_to_nearest_is_logged(ranks: Any) -> None:
    for own in (True, False):
        for rank, messages in enumerate(ranks(2).run(messages_of_bf16_pure, own)):
            found = any("AdamW loses small updates" in message for message in messages)
            assert found == (own and rank == 0)


class Statistics(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def reset_buffers(self) -> None:
        self.mean.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().forward(x)


def messages_of_a_run(model: type[nn.Module], data: Any) -> list[str]:
    state, plan = sharded(run_of(*FULL, "train.steps=2"), model=model, data=data)
    with logged() as messages:
        list(train(state, plan, loss=mean_square))
    return messages


def test_buffers_that_differ_between_ranks_are_logged(ranks: Any) -> None:
    first, second = ranks(2).run(messages_of_a_run, Statistics, None)
    assert [text for text in first if "changes 1 buffers" in text and "mean" in text]
    assert not [text for text in second if "buffers" in text]
    assert not [text for text in ranks(2).run(messages_of_a_run, Regression, None)[0] if "buffers" in text]


def same_rows(own: bool) -> list[str]:
    offset = 6 * dist.get_rank() if own else 0
    batches = ((x[offset : offset + 6], y[offset : offset + 6]) for x, y in map(pairs, itertools.count()))
    return [text for text in messages_of_a_run(Regression, batches) if "first microbatch is the same" in text]


def test_equal_rows_on_all_ranks_are_reported(ranks: Any) -> None:
    assert [len(messages) for messages in ranks(2).run(same_rows, False)] == [1, 0]
    assert ranks(2).run(same_rows, True) == [[], []]


def of_norm_one(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.ndim == 2:
                parameter.data /= parameter.data.norm()


def test_hooks_of_a_fused_optimizer_see_whole_parameters(ranks: Any) -> None:
    model = unsharded(run_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    optimizer.register_step_post_hook(of_norm_one)
    mean_square(model, pairs(0)).backward()
    optimizer.step()
    expected = dict(model.named_parameters())
    for own in ranks(2).run(parameters_after_a_hooked_step):
        for name, value in own.items():
            torch.testing.assert_close(value, expected[name].detach(), atol=1e-5, rtol=1e-5)


def parameters_after_a_hooked_step() -> dict[str, Tensor]:
    settings = ("schedule.warmup_steps=0", "optimizer.weight_decay=0.0", "optimizer.clip_norm=0")
    state, plan = sharded(run_of(*FULL, *settings))
    state.optimizer.register_step_post_hook(of_norm_one)
    next(iter(train(state, plan, loss=mean_square)))
    return whole(state.model)


def changed_after_a_validation(strategy: str, validates: bool) -> dict[str, Tensor]:
    """Parameters after a step, a validation, changes of one parameter, and a step."""
    settings = (f"sharding.strategy={strategy}", "train.microbatch=6", "train.steps=2")
    state, plan = sharded(run_of(*settings))
    for step in train(state, plan, loss=mean_square):
        if step.index == 1:
            if validates:
                state.model.eval()
                with torch.no_grad():
                    state.model(pairs(0)[0])
                state.model.train()
            with torch.no_grad():
                state.model.get_parameter("head.weight").mul_(0.5)
            state.model.get_parameter("layers.0.linear.weight").requires_grad_(False)
    return whole(state.model)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_changes_after_a_validation_are_kept(strategy: str, ranks: Any) -> None:
    (expected, _), (found, _) = (
        ranks(2).run(changed_after_a_validation, strategy, own) for own in (False, True)
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def average_of_models(strategy: str, validates: bool) -> dict[str, Tensor]:
    """A second sharded model, which follows the first between steps, and may be evaluated after it."""
    run = run_of(f"sharding.strategy={strategy}", "train.microbatch=6", "train.steps=3")
    (state, plan), (other, _) = sharded(run), sharded(run)
    for _step in train(state, plan, loss=mean_square):
        with torch.no_grad():
            for slow, fast in zip(other.model.parameters(), state.model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.5)
            if validates:
                other.model(pairs(0)[0])
    return whole(other.model)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_second_model_may_be_changed_after_an_evaluation_of_it(strategy: str, ranks: Any) -> None:
    (expected, _), (found, _) = (
        ranks(2).run(average_of_models, strategy, evaluated) for evaluated in (False, True)
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Lookahead(torch.optim.Optimizer):
    """Averages with the weights of an optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": self.inner.state_dict()}


def test_state_of_an_optimizer_that_checkpoints_lack_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    TrainState(model, torch.optim.AdamW(model.parameters()))
    assert not caplog.records
    TrainState(model, Lookahead(torch.optim.SGD(model.parameters())))
    assert "but not inner, state_dict()['slow']" in caplog.text


class KeepsLists(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = [torch.zeros(2), torch.zeros(2)]


def test_state_that_a_checkpoint_cannot_hold_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    state = TrainState(model, KeepsLists(model.parameters()))
    state.optimizer.step()
    with pytest.raises(FullshardError, match="cannot hold the state of KeepsLists") as raised:
        state.tensors()
    assert raised.value.got == "state[weight]['factors'] is a list"


def losses_after_forwards(count: int) -> list[float]:
    """Losses of a decoder whose norm and head are one unit; forwards without gradients precede each step."""
    ranks = dist.get_world_size()
    run = same_numbers.make_run(model="decoder", ranks=ranks, strategy="full_shard")
    plan = Plan.from_run(run, world_size=ranks)
    model = shard(same_numbers.build("decoder", run), plan)
    data, tokens = same_numbers.Rows(same_numbers.VOCABULARY), torch.arange(8)
    state = TrainState(model, build_optimizer(model, plan), data=data)
    losses = list[float]()
    while state.step < 2:
        with torch.no_grad():
            values = [model(tokens.view(1, 8)) for _ in range(count)]
        assert all(torch.equal(value, values[0]) for value in values)
        losses.append(next(iter(train(state, plan))).loss)
    return losses


def test_forwards_without_gradients_leave_the_next_step_as_it_is(ranks: Any) -> None:
    """Also two in a row, in a unit of several modules."""
    expected, found = (ranks(2).run(losses_after_forwards, count) for count in (0, 2))
    assert found == expected
