"""The order of host and device: no wait between two steps, and the same numbers as with one."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.models.loss import next_token_loss
from fullshard.spec.plan import Plan
from fullshard.survival.spikes import WINDOW, RecentSteps
from fullshard.training.gradients import host_waits_before_each_update
from fullshard.training.loop import train
from tests.fakes.cuda import FakeCuda
from tests.fakes.data import Rows
from tests.fakes.device import FakeDevice
from tests.fakes.models import VOCABULARY, OddModel
from tests.training.runs import BATCH, Pairs, local_bits, mean_square, pairs, run_of, same_bits, sharded


# The number of waits in a step #
def waits_of_steps(more: tuple[str, ...], data: Any = None, loss: Any = mean_square) -> list[list[str]]:
    """The waits of each of six steps: from one `next` to the return of the following one."""
    with FakeCuda() as cuda:
        state, plan = sharded(run_of("train.microbatch=2", *more), data=data, device="cuda")
        return _waits(cuda, state, plan=plan, loss=loss)


def _waits(cuda: FakeCuda, state: Any, *, plan: Plan, loss: Any) -> list[list[str]]:
    steps, found = train(state, plan, loss=loss), []
    for _ in range(plan.run.train.steps):
        cuda.waits.clear()
        assert next(steps, None) is not None
        found.append([*cuda.waits])
    assert cuda.faults == []
    # The window of the norms before is moved to the device once.
    return [[one for one in found[0] if "_move_values_and_count_to" not in one], *found[1:]]


DEFAULTS = [
    (2, ()),
    (2, ("sharding.strategy=no_shard", "fault_tolerance.on_spike=skip")),
    (4, ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2", "train.microbatch=1")),
    (2, ("precision.mode=bf16_pure",)),
]


@pytest.mark.parametrize(("n", "more"), DEFAULTS)
def test_a_step_never_waits_for_the_device(n: int, more: tuple[str, ...], ranks: Any) -> None:
    assert ranks(n).run(waits_of_steps, more) == [[[]] * 6] * n


def waits_of_decoder() -> list[list[str]]:
    """Experts, a scalar, tied and frozen matrices, and the next-token loss."""
    run = run_of("data.sequence_length=9", "train.microbatch=2")
    with FakeCuda() as cuda:
        state, plan = sharded(run, model=OddModel, data=Rows(VOCABULARY), device="cuda")
        return _waits(cuda, state, plan=plan, loss=next_token_loss)


def test_a_step_of_the_next_token_loss_never_waits(ranks: Any) -> None:
    assert ranks(2).run(waits_of_decoder) == [[[]] * 6] * 2


def test_a_step_on_an_iterable_waits_for_no_more_than_the_comparison_of_the_first_rows(ranks: Any) -> None:
    data = [pairs(i, 2) for i in range(40)]
    for first, *others in ranks(2).run(waits_of_steps, (), data):
        assert all("all_gather_object" in wait for wait in first)
        assert others == [[]] * 5


@pytest.mark.parametrize(
    "more", [("fault_tolerance.on_spike=rollback",), ("optimizer.name=sgd",), ("precision.mode=fp16",)]
)
def test_the_strict_order_waits_once_for_each_decision(more: tuple[str, ...], ranks: Any) -> None:
    for waits in ranks(2).run(waits_of_steps, more):
        assert [len(step) for step in waits] == [1] * 6, waits


def adamw(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(2))], fused=True, **options)


def test_a_scheduler_of_torch_keeps_the_order_and_a_replaced_step_does_not() -> None:
    plan = Plan.from_run(run_of(), world_size=1)
    scheduled, replaced = adamw(), adamw()
    torch.optim.lr_scheduler.StepLR(scheduled, 3)
    assert "step" in vars(scheduled), "torch counts steps by a wrapper"
    replaced.step = wraps(type(replaced).step)(partial(type(replaced).step, replaced))
    assert [host_waits_before_each_update(one, plan) for one in (scheduled, replaced)] == [False, True]


# The same numbers #
class OneSpike(Pairs):
    """Batch 5 has targets far off, and those of batch 3 are not finite."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super().microbatches(step, rank=rank, plan=plan):
            yield x, y + {3: torch.nan, 5: 1000.0}.get(step, 0.0)


def numbers(device: str, more: tuple[str, ...]) -> tuple[list[Any], dict[str, Tensor], Any]:
    settings = ("train.steps=9", "fault_tolerance.on_spike=skip")
    state, plan = sharded(run_of(*settings, "optimizer.clip_norm=0.3", *more), data=OneSpike())
    state.recent = RecentSteps([1.0, 100.0] * (WINDOW // 4), [1.0, 100.0] * (WINDOW // 4))
    with FakeDevice() if device == "fake" else nullcontext():
        steps = list(train(state, plan, loss=mean_square))
        figures = [
            (s.index, str(s.loss), str(s.grad_norm), s.tokens, s.trained_tokens, s.skipped, s.spike)
            for s in steps
        ]
    return figures, local_bits(state), (state.trained_tokens, state.skipped, state.recent.losses)


@pytest.mark.parametrize(
    ("n", "more"),
    [
        (2, ()),
        (3, ("sharding.strategy=no_shard", "optimizer.options={amsgrad=true}")),
        (2, ("precision.mode=bf16", "optimizer.name=torch.optim.Adam", "sharding.strategy=zero1")),
        (2, ("precision.mode=bf16_pure",)),
    ],
)
def test_both_orders_train_the_same_bit_for_bit(n: int, more: tuple[str, ...], ranks: Any) -> None:
    strict = ranks(n).run(numbers, "cpu", more)
    for (figures, bits, counts), (own, own_bits, own_counts) in zip(
        strict, ranks(n).run(numbers, "fake", more), strict=True
    ):
        assert own == figures
        assert [index for index, *_, skipped, _ in own if skipped] == [4, 6]
        assert [index for index, *_, spike in own if spike] == [6]
        assert same_bits(own_bits, bits)
        assert own_counts == counts


def counts_in_the_loop() -> list[tuple[int, int, int]]:
    state, plan = sharded(run_of(), data=OneSpike())
    with FakeDevice():
        return [
            (state.step, state.trained_tokens, state.skipped) for _ in train(state, plan, loss=mean_square)
        ]


def test_the_state_of_a_yielded_step_includes_the_step(ranks: Any) -> None:
    counted = [(1, 48, 0), (2, 96, 0), (3, 144, 0), (4, 144, 1), (5, 192, 1), (6, 240, 1)]
    assert ranks(2).run(counts_in_the_loop) == [counted] * 2


def in_different_steps() -> tuple[int, list[str]]:
    """Rank 1 takes another batch than it should from step 2 on."""
    state, plan = sharded(run_of())
    steps, errors = train(state, plan, loss=mean_square), []
    with FakeDevice():
        next(steps)
        state.rows += BATCH * dist.get_rank()
        step = next(steps)
        for act in (lambda: step.loss, lambda: state.trained_tokens, state.values, lambda: next(steps)):
            with pytest.raises(TrainError) as raised:
                act()
            errors.append(raised.value.what)
    return step.index, errors


def test_ranks_in_different_steps_raise_before_they_save_or_take_another_step(ranks: Any) -> None:
    for index, errors in ranks(2).run(in_different_steps):
        assert index == 2
        assert len(set(errors)) == 1
        assert "step 2" in errors[0]


class Diverged(Pairs):
    """Every batch has targets that are not finite."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in super().microbatches(step, rank=rank, plan=plan):
            yield x, y + torch.nan


def steps_after_a_break() -> tuple[list[bool], str]:
    """Rank 1 is asked to stop before the first step, after which the loop breaks; the figures come later."""
    state, plan = sharded(run_of())
    with FakeDevice():
        for _ in train(state, plan, loss=mean_square, should_stop=lambda: dist.get_rank() == 1):
            break
        stopping = [step.stopping for step in train(state, plan, loss=mean_square)]
        state, plan = sharded(run_of("train.max_skipped_steps=2"), data=Diverged())
        for _ in train(state, plan, loss=mean_square):
            break
        with pytest.raises(TrainError) as raised:
            list(train(state, plan, loss=mean_square))
    return stopping, f"step {state.step}: {raised.value.what}"


def test_break_keeps_the_decision_of_the_step(ranks: Any) -> None:
    for stopping, error in ranks(2).run(steps_after_a_break):
        assert stopping == [True]
        assert error.startswith("step 3: 2 steps in a row"), "known one step after it was launched"


# The garbage collector #
def collector() -> list[bool]:
    """Returns whether the collector is on: in the loop, after a break, after an error, and after the end."""
    found = []
    state, plan = sharded(run_of())
    for _ in train(state, plan, loss=mean_square):
        found.append(gc.isenabled())
        break
    found.append(gc.isenabled())

    def fails(_model: nn.Module, _batch: object) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(train(state, plan, loss=fails))
    found.append(gc.isenabled())
    list(train(state, plan, loss=mean_square))
    return [*found, gc.isenabled()]


def collections() -> list[int]:
    """The generation of each collection in 100 steps."""
    seen: list[int] = []
    state, plan = sharded(run_of("train.steps=100"))
    state.step = 40
    gc.callbacks.append(
        note := lambda phase, info: seen.append(info["generation"]) if phase == "start" else None
    )
    try:
        list(train(state, plan, loss=mean_square))
    finally:
        gc.callbacks.remove(note)
    return seen


def test_garbage_is_collected_between_steps_only(ranks: Any) -> None:
    assert ranks(1).run(collector) == [[False, True, True, True]]
    assert ranks(2).run(collections) == [[1 if step in (50, 100) else 0 for step in range(41, 101)]] * 2
