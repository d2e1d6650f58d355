"""train(state, plan): what it yields, when it ends, and that it can be left and entered again."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.training.evaluate import mean_loss
from fullshard.training.loop import Step, train
from tests.fakes.device import FakeDevice
from tests.fakes.sampling import sampled
from tests.training.runs import (
    BATCH,
    Pairs,
    local_bits,
    logged,
    mean_square,
    pairs,
    run_of,
    same_bits,
    sharded,
)

Batch = tuple[Tensor, Tensor]


def batches(count: int, *, rows: int = 2) -> list[Batch]:
    return [pairs(i, rows) for i in range(count)]


def indices(steps: Iterator[Step]) -> list[int]:
    return [step.index for step in steps]


# Figures #
def figures() -> tuple[list[Step], tuple[int, int, int]]:
    state, plan = sharded(run_of("train.microbatch=2", "schedule.kind=constant"))
    steps = list(train(state, plan, loss=mean_square))
    return steps, (state.step, state.trained_tokens, state.skipped)


def test_step_has_its_figures(ranks: Any) -> None:
    """A regression, with batches that are tuples, and a loss that is a mean."""
    first, second = ranks(2).run(figures)
    assert first[1] == (6, 6 * BATCH * 4, 0)
    for one, other in zip(first[0], second[0], strict=True):
        assert (one.loss, one.grad_norm, one.tokens) == (other.loss, other.grad_norm, other.tokens)
        assert 0 <= one.data_seconds < one.seconds
    assert [step.index for step in first[0]] == [1, 2, 3, 4, 5, 6]
    assert [step.learning_rate for step in first[0]] == pytest.approx([0.005, *[0.01] * 5])
    assert not any(step.skipped or step.stopping for step in first[0])
    assert first[0][0].tokens == BATCH * 4, "a row counts as data.sequence_length"


# Data #
def without_data() -> list[str]:
    state, plan = sharded(run_of())
    said = []
    for data in (None, 5):
        state.data = data
        with pytest.raises(TrainError) as raised:
            next(iter(train(state, plan, loss=mean_square)))
        said.append(str(raised.value))
    return said


def test_no_data_is_refused(ranks: Any) -> None:
    absent, number = ranks(1).run(without_data)[0]
    assert "there is no data to train on" in absent
    assert "got: int" in number


def uneven(counts: tuple[int, ...], microbatch: int) -> tuple[list[int], str]:
    count = counts[dist.get_rank()]
    state, plan = sharded(run_of(f"train.microbatch={microbatch}", "train.steps=30"), data=batches(count))
    with logged() as messages:
        seen = indices(train(state, plan, loss=mean_square))
    return seen, " ".join(one for one in messages if "the data ended" in one)


@pytest.mark.parametrize(
    ("counts", "microbatch", "steps", "message"),
    [
        # one microbatch a step: the shortest has three
        ((5, 3, 4), 4, 3, "the data ended after step 3 of 30, first on rank 1."),
        # two a step: the shortest ends in the middle of its third
        ((7, 7, 5), 2, 2, "the data ended after step 2 of 30, first on rank 2."),
        ((2, 2, 2), 4, 2, "the data ended after step 2 of 30, first on all ranks."),
    ],
)
def test_end_of_the_data_ends_the_run_on_all_ranks(
    counts: tuple[int, ...], microbatch: int, steps: int, message: str, ranks: Any
) -> None:
    found = ranks(3).run(uneven, counts, microbatch)
    assert [seen for seen, _ in found] == [list(range(1, steps + 1))] * 3
    assert found[0][1].startswith(message)
    assert [said for _, said in found[1:]] == ["", ""]


def no_step_in_it(counts: tuple[int, ...]) -> str:
    state, plan = sharded(run_of("train.steps=30"), data=batches(counts[dist.get_rank()]))
    with pytest.raises(TrainError) as raised:
        list(train(state, plan, loss=mean_square))
    return str(raised.value)


def test_an_iterable_without_one_step_is_refused_on_all_ranks(ranks: Any) -> None:
    for said in ranks(3).run(no_step_in_it, (4, 0, 4)):
        assert "not enough for one step" in said
        assert "got: 0 microbatches on rank 1" in said


def used_up() -> list[int]:
    state, plan = sharded(run_of("train.steps=30"), data=iter(list(batches(2))))
    seen = indices(train(state, plan, loss=mean_square))
    with pytest.raises(TrainError, match="used up before"):
        list(train(state, plan, loss=mean_square))
    return seen


def test_an_iterator_that_was_used_up_is_refused(ranks: Any) -> None:
    assert ranks(1).run(used_up) == [[1, 2]]


class Recorder:
    """Batches that note which steps were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Batch]:
        self.asked.append((step, rank))
        yield from Pairs().microbatches(step, rank=rank, plan=plan)


def asked_for() -> list[tuple[int, int]]:
    data = Recorder()
    state, plan = sharded(run_of("train.steps=5"), data=data)
    state.step = 2
    list(train(state, plan, loss=mean_square))
    return data.asked


def test_a_source_is_asked_for_the_step_that_the_state_is_at(ranks: Any) -> None:
    assert ranks(2).run(asked_for) == [[(step, rank) for step in (2, 3, 4)] for rank in (0, 1)]


# Leaving and entering #
def stopped_on_rank_one(device: str, *more: str) -> tuple[list[tuple[int, bool]], int]:
    state, plan = sharded(run_of("train.steps=20", *more))
    asked = iter(range(20))

    def should_stop() -> bool:
        return next(asked) == 3 and dist.get_rank() == 1

    with FakeDevice() if device == "fake" else nullcontext():
        iterator = train(state, plan, loss=mean_square, should_stop=should_stop)
        steps = [(step.index, step.stopping) for step in iterator]
    return steps, state.step


@pytest.mark.parametrize(
    ("device", "more", "last"), [("cpu", (), 4), ("fake", ("optimizer.name=sgd",), 4), ("fake", (), 5)]
)
def test_stop_on_one_rank_ends_all_ranks(device: str, more: tuple[str, ...], last: int, ranks: Any) -> None:
    """It is asked for before step 4. A host that does not wait for the device reads that one step later."""
    steps = [(index, index == last) for index in range(1, last + 1)]
    assert ranks(3).run(stopped_on_rank_one, device, *more) == [(steps, last)] * 3


def in_pieces(kind: str, lengths: tuple[int, ...]) -> tuple[list[int], dict[str, Tensor]]:
    """A run of six steps, broken out of after each of `lengths` steps."""
    plain = batches(12) if kind == "list" else iter(batches(12))
    state, plan = sharded(run_of("train.microbatch=3"), data=Pairs() if kind == "source" else plain)
    seen: list[int] = []
    for length in (*lengths, 100):
        for count, step in enumerate(train(state, plan, loss=mean_square), start=1):
            seen.append(step.index)
            if count == length:
                break
    return seen, local_bits(state)


@pytest.mark.parametrize("kind", sampled(["source", "list", "iterator"], here=["source", "iterator"]))
def test_interrupted_loop_continues_bitwise(kind: str, ranks: Any) -> None:
    straight = ranks(2).run(in_pieces, kind, ())
    pieces = ranks(2).run(in_pieces, kind, (1, 3))
    for (seen, bits), (expected, expected_bits) in zip(pieces, straight, strict=True):
        assert seen == expected == [1, 2, 3, 4, 5, 6]
        assert same_bits(bits, expected_bits)


def epochs() -> list[list[int]]:
    """Uneven over ranks, so that the longer one has some left when the epoch ends."""
    state, plan = sharded(run_of("train.steps=20"), data=batches(4 + dist.get_rank(), rows=6))
    firsts: list[float] = []
    seen = []
    for _ in range(3):
        steps = list(train(state, plan, loss=count_calls))
        firsts.append(steps[0].loss)
        seen.append([step.index for step in steps])
    assert firsts == [firsts[0]] * 3, "every epoch begins with the same batch"
    return seen


def count_calls(model: nn.Module, batch: Batch) -> Tensor:
    """The mean of the batch, by which the test knows the batch."""
    return batch[0].mean() + 0 * mean_square(model, batch)


def test_data_that_has_ended_begins_anew(ranks: Any) -> None:
    assert ranks(2).run(epochs) == [[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]] * 2


def finished() -> list[int]:
    state, plan = sharded(run_of("train.steps=2"))
    return [*indices(train(state, plan, loss=mean_square)), *indices(train(state, plan, loss=mean_square))]


def test_a_finished_run_takes_no_more_steps(ranks: Any) -> None:
    assert ranks(1).run(finished) == [[1, 2]]


def modes(*, root: bool) -> list[list[bool]]:
    """Modes of a layer that the user froze, and of another, in each step of a loop that evaluates by itself,
    validates, and fails to validate."""
    state, plan = sharded(run_of("train.steps=4"))
    frozen, other = state.model.get_submodule("layers.0"), state.model.get_submodule("layers.1")
    frozen.eval()
    state.model.training = root
    seen: list[list[bool]] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            seen.append([frozen.training, other.training])
        return mean_square(model, batch)

    for step in train(state, plan, loss=loss):
        if step.index == 1:
            state.model.eval()
        elif step.index == 2:
            mean_loss(state.model, [pairs(0)], loss=loss)
        elif step.index == 3:
            with suppress(TrainError):
                mean_loss(state.model, [pairs(0)], loss=lambda *_: None)  # type: ignore[arg-type,return-value]
    return seen


@pytest.mark.parametrize("root", [True, False], ids=["training", "evaluation"])
def test_modules_keep_their_modes_unless_the_model_is_in_evaluation_mode(root: bool, ranks: Any) -> None:
    assert ranks(1).run(partial(modes, root=root)) == [[[not root, True]] * 4]


def freezes_in_the_loop() -> list[bool]:
    state, plan = sharded(run_of("train.steps=3"))
    layer = state.model.get_submodule("layers.0")
    seen = []
    for _ in train(state, plan, loss=mean_square):
        seen.append(layer.training)
        layer.eval()
    return seen


def test_a_module_that_the_loop_sets_to_eval_stays_in_eval(ranks: Any) -> None:
    assert ranks(1).run(freezes_in_the_loop) == [[True, False, False]]


def backward_between_steps() -> None:
    state, plan = sharded(run_of())
    for _ in train(state, plan, loss=mean_square):
        mean_square(state.model, pairs(0)).backward()


def test_gradients_from_outside_of_a_step_are_refused(ranks: Any) -> None:
    with pytest.raises(TrainError, match="gradients before step 2"):
        ranks(1).run(backward_between_steps)


def autocast(place: str) -> list[float]:
    def context(own: str) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if own == place else nullcontext()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with context("in the loss"):
            return mean_square(model, batch)

    state, plan = sharded(run_of("train.microbatch=2", "optimizer.learning_rate=0.1"))
    with context("around the loop"):
        return [step.grad_norm for step in train(state, plan, loss=loss)]


def test_autocast_around_the_loop_casts_the_weights_of_each_step(ranks: Any) -> None:
    around, within = (ranks(2).run(autocast, place)[0] for place in ("around the loop", "in the loss"))
    assert around == pytest.approx(within, rel=1e-2)


def train_with_half_an_optimizer() -> list[str]:
    state, plan = sharded(run_of("train.steps=4"))
    layer = state.model.get_submodule("layers.0.linear")
    layer.requires_grad_(False)
    state.optimizer.param_groups = [
        group | {"params": [p for p in group["params"] if p.requires_grad]}
        for group in state.optimizer.param_groups
    ]
    logged = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(f"step {state.step}: {record.getMessage()}")
    logging.getLogger("fullshard").addHandler(handler)
    for step in train(state, plan, loss=mean_square):
        layer.requires_grad_(step.index == 2)
    logging.getLogger("fullshard").removeHandler(handler)
    return logged


def test_a_parameter_that_is_unfrozen_without_the_optimizer_is_logged(ranks: Any) -> None:
    (logged,) = ranks(1).run(train_with_half_an_optimizer)
    assert [text.rpartition(": ")[::2] for text in logged] == [
        (
            "step 2: trainable parameters that are not in the optimizer are never updated",
            "layers.0.linear.weight, layers.0.linear.bias",
        )
    ]


def train_with_a_hook_of_a_shard() -> None:
    state, plan = sharded(run_of())
    next(state.model.parameters()).register_hook(lambda gradient: gradient)
    next(train(state, plan, loss=mean_square))


def test_a_gradient_hook_that_is_never_called_is_refused(ranks: Any) -> None:
    with pytest.raises(TrainError, match="gradient hooks"):
        ranks(1).run(train_with_a_hook_of_a_shard)
