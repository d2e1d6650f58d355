"""Ranks that are not in the same step: noticed in that step, and by name."""

import re
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fullshard.distributed.unit_order import UnitEvents
from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.survival.fingerprint import WIDTH, StepFingerprint, find_mismatch, mismatch_error
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.training.runs import Pairs, Regression, mean_square, run_of, same_bits, sharded, whole


def agree(ranks: list[StepFingerprint], own: StepFingerprint) -> bool:
    """Computes the comparison of `check_same_fingerprints` without a process group."""
    columns = zip(*(one.summable_numbers(len(ranks)) for one in ranks), strict=True)
    return [sum(column) for column in columns] == [len(ranks) * n for n in own.summable_numbers(len(ranks))]


numbers = st.integers(min_value=0, max_value=2**40)
fingerprints = st.builds(StepFingerprint, step=numbers, collectives=numbers, settings=numbers, units=numbers)


@given(fingerprints, st.integers(min_value=1, max_value=100_000))
def test_equal_fingerprints_agree_at_any_number_of_ranks_without_rounding(
    one: StepFingerprint, n: int
) -> None:
    total = sum(int(number) for number in one.summable_numbers(n)[1::2])
    assert n * max(one.summable_numbers(n)) < 2**53
    assert float(n * total) == n * float(total)


@given(fingerprints, st.integers(1, 1000), st.integers(0, 3), st.integers(2, 64), st.data())
def test_a_rank_that_differs_in_anything_is_seen_by_all(
    one: StepFingerprint, by: int, where: int, n: int, data: Any
) -> None:
    values = [one.step, one.collectives, one.settings, one.units]
    values[where] += by
    ranks = [one] * n
    ranks[data.draw(st.integers(0, n - 1))] = StepFingerprint(*values)
    assert not any(agree(ranks, own) for own in set(ranks))


def test_numbers_with_the_mean_of_a_rank_differ() -> None:
    ranks = [StepFingerprint(step, 5, 7, 8) for step in (1, 2, 3)]
    assert not agree(ranks, ranks[1])
    assert len(ranks[0].summable_numbers(3)) == WIDTH


def mismatch_of(reported: dict[int, StepFingerprint], *, step: int) -> TrainError:
    events = UnitEvents((), array("q"))
    return mismatch_error(find_mismatch(reported, world_size=3, events=events, orders={}), step=step)


def test_the_error_names_the_difference_and_the_ranks() -> None:
    by_rank = {rank: StepFingerprint(step, 9, 7, 8) for rank, step in enumerate((4, 5, 4))}
    error = mismatch_of(by_rank, step=4)
    assert error.what == "the ranks are not in the same step (step 4): the number of the step differs."
    assert error.got == "rank 1: step 5; ranks 0, 2: step 4"
    silent = mismatch_of({1: by_rank[1]}, step=5)
    assert silent.got == "rank 1: step 5, 9 collectives; ranks 0, 2: in another collective"


def skip_a_step() -> tuple[int, str, str]:
    """Rank 1 counts its third step as done without taking it."""
    state, plan = sharded(run_of("train.steps=6"))
    said = ("", "")
    try:
        for step in train(state, plan, loss=mean_square):
            if step.index == 2 and dist.get_rank() == 1:
                state.step += 1
            if step.index == 5:
                break  # rank 1 would end the run a step before the others
    except TrainError as error:
        said = (error.what, str(error.got))
    return state.step, *said


def test_a_skipped_step_is_noticed_in_that_step_on_all_ranks(ranks: Any) -> None:
    results: list[Any] = []
    for _ in range(5):  # a rank that the machine stops for 5 s is taken for one in another collective
        results = ranks(3).run(skip_a_step)
        if not any("in another collective" in got for _, _, got in results):
            break
    assert [step for step, _, _ in results] == [2, 3, 2], "no step is finished after it"
    for rank, (_, what, got) in enumerate(results):
        number = 4 if rank == 1 else 3
        assert what.startswith(f"the ranks are not in the same step (step {number}): the number of the step")
        assert "rank 1: step 4" in got
        assert "ranks 0, 2: step 3" in got


class PairsThatAgree(Pairs):
    """Batches whose end is agreed on by an all-reduce, as large as the step's own; rank 1 leaves one out."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().microbatches(step, rank=rank, plan=plan)
        if (rank, step) != (1, 2):
            dist.all_reduce(torch.zeros(6 + WIDTH, dtype=torch.float64))


def skip_a_collective() -> None:
    """Rank 1 sends its step 3 into the sum of the batches of the others."""
    state, plan = sharded(run_of(), data=PairsThatAgree())
    list(train(state, plan, loss=mean_square))  # rank 0 does not answer at all, which takes its time


def test_a_skipped_collective_of_the_same_shape_is_noticed_in_that_step(ranks: Any) -> None:
    with pytest.raises(TrainError) as raised:
        ranks(2).run(skip_a_collective)
    assert "not in the same step (step 3)" in raised.value.what
    assert "rank 1: step 3" in str(raised.value.got)
    assert "rank 0: in another collective" in str(raised.value.got)


def collectives_on_one_rank_only(setting: str) -> str:
    """Rank 0 sends something to rank 1, which rank 2 has no part in."""
    state, plan = sharded(run_of(f"fault_tolerance.fingerprint={setting}"))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if dist.get_rank() < 2:
            (dist.send if dist.get_rank() == 0 else dist.recv)(torch.zeros(1), 1 - dist.get_rank())
        return mean_square(model, batch)

    try:
        list(train(state, plan, loss=loss))
    except TrainError as error:
        return str(error.got)
    return "finished"


@pytest.mark.parametrize(
    ("setting", "end"),
    [("all", "rank 2: {} collectives; ranks 0-1"), ("step", "finished"), ("none", "finished")],
)
def test_the_number_of_collectives_is_compared_unless_switched_off(
    setting: str, end: str, ranks: Any
) -> None:
    for said in ranks(3).run(collectives_on_one_rank_only, setting):
        assert re.sub(r"\d+ coll", "{} coll", said, count=1).startswith(end)


class OwnPath(Regression):
    """Leaves out a layer or a bias that is as large as the one that the other rank leaves out."""

    def __init__(self, skips: str) -> None:
        super().__init__()
        self.skips = skips
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        own = dist.get_rank()
        for index, layer in enumerate(self.layers):
            if self.skips != "a layer" or index != own:
                x = layer(x)
        return self.head(x) + (self.biases[own] if self.skips == "a bias" else sum(self.biases))


def train_on_own_path(skips: str, strategy: str) -> tuple[str, int, bool]:
    plan = Plan.from_run(run_of(f"sharding.strategy={strategy}"), world_size=2)
    model = shard(OwnPath(skips), plan)
    before = whole(model)
    state = TrainState(model, build_optimizer(model, plan), data=Pairs())
    try:
        list(train(state, plan, loss=mean_square))
    except TrainError as error:
        return str(error), state.step, same_bits(before, whole(model))
    return "finished", state.step, False


@pytest.mark.parametrize(
    ("skips", "strategy", "said"),
    [
        ("a layer", "full_shard", "rank 0: gathers layers.1; rank 1: gathers layers.0"),
        ("a layer", "shard_grad_op", "rank 0: gathers layers.1; rank 1: gathers layers.0"),
        (
            "a bias",
            "full_shard",
            "rank 0: reduces (root) without gradients of biases.1; rank 1: reduces (root)",
        ),
    ],
)
def test_ranks_that_run_other_modules_of_one_size_are_named_before_the_update(
    skips: str, strategy: str, said: str, ranks: Any
) -> None:
    for text, step, is_unchanged in ranks(2).run(train_on_own_path, skips, strategy):
        assert said in text
        assert step == 0
        assert is_unchanged
