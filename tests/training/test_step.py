"""One step: denominators, the true norm, and what is skipped."""

import gc
import itertools
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.errors import TrainError
from fullshard.models.loss import next_token_loss
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import Step, train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import count_computed_tokens, run_step
from tests.fakes.data import Rows, global_batch
from tests.fakes.device import FakeDevice
from tests.fakes.models import VOCABULARY, OddModel
from tests.parallel.operations import CountOperations
from tests.training.runs import (
    BATCH,
    Pairs,
    Regression,
    local_bits,
    mean_square,
    meta,
    pairs,
    run_of,
    same_bits,
    sharded,
    unsharded,
    whole,
)

SGD = ("optimizer.name=sgd", "optimizer.weight_decay=0.0", "schedule.warmup_steps=0")

# Denominators: an unclipped step of SGD at rate 1 moves the parameters by the gradient.


def gradient_of_a_step(run: Run, loss: Callable[..., Any]) -> tuple[dict[str, Tensor], Step]:
    state, plan = sharded(run)
    before = whole(state.model)
    step = next(iter(train(state, plan, loss=loss)))
    after = whole(state.model)
    return {name: before[name] - after[name] for name in before}, step


def plain_gradient(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def unclipped(microbatch: int, *more: str) -> Run:
    return run_of(
        *SGD,
        "optimizer.clip_norm=0",
        "optimizer.learning_rate=1.0",
        "train.steps=1",
        f"train.microbatch={microbatch}",
        *more,
    )


def counted_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(sum, count) over rows whose first target is positive."""
    x, y = batch
    counted = (y[:, 0] > 0).float()
    return ((model(x) - y).square().sum(1) * counted).sum(), counted.sum()


@pytest.mark.parametrize(("n", "microbatch"), [(1, 3), (2, 2), (3, 1), (3, 4)])
def test_sum_is_divided_by_count_over_ranks_and_microbatches(n: int, microbatch: int, ranks: Any) -> None:
    run = unclipped(microbatch)
    x, y = pairs(0)
    counts = (y[:, 0] > 0).view(-1, microbatch).sum(1)
    assert len(set(counts.tolist())) > 1, "microbatches that differ in what counts"
    assert microbatch > 2 or 0 in counts, "and one in which nothing does"
    model = unsharded(run)
    total, count = counted_rows(model, (x, y))
    expected = plain_gradient(total / count, model)
    mean = (total / count).item()
    for gradient, step in ranks(n).run(gradient_of_a_step, run, counted_rows):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        assert step.loss == pytest.approx(mean, rel=1e-5)
        assert (step.tokens, step.trained_tokens) == (run.tokens_per_step, count)


def mean_of_counted_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    total, count = counted_rows(model, batch)
    return total / count.clamp(min=1)


def test_a_mean_is_averaged_over_microbatches(ranks: Any) -> None:
    run = unclipped(2)
    model = unsharded(run)
    means = [
        mean_of_counted_rows(model, batch) for batch in zip(*(t.split(2) for t in pairs(0)), strict=True)
    ]
    mean = torch.stack(means).mean()
    expected = plain_gradient(mean, model)
    for gradient, step in ranks(3).run(gradient_of_a_step, run, mean_of_counted_rows):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        assert step.loss == pytest.approx(mean.item(), rel=1e-5)
        assert (step.tokens, step.trained_tokens) == (run.tokens_per_step, None)


# The true norm #
class OddWithUnused(OddModel):
    """Also a matrix that no loss depends on."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.unused = nn.Linear(3, 4)


class MixedOdd(OddModel):
    """Experts, scalar, frozen matrices, untied head."""

    def __init__(self) -> None:
        super().__init__(mixture=True)


def norm_run(*more: str) -> Run:
    return run_of(*SGD, "data.sequence_length=9", "optimizer.clip_norm=0.05", "train.steps=1", *more)


def norm_and_parameters(run: Run, model: type[nn.Module]) -> tuple[float, dict[str, Tensor]]:
    state, plan = sharded(run, model=model, data=Rows(VOCABULARY))
    (step,) = train(state, plan)
    return step.grad_norm, whole(state.model)


UNSHARDED_HEAD = 'sharding.units.overrides=[{match="*head*", strategy="no_shard"}]'
UNSHARDED_LAYER = 'sharding.units.overrides=[{match="layers.1", strategy="no_shard"}]'


@pytest.mark.parametrize(
    ("n", "model", "more"),
    [
        (3, OddWithUnused, (UNSHARDED_LAYER,)),
        (2, MixedOdd, (UNSHARDED_HEAD, "train.microbatch=2")),
        (3, MixedOdd, ("sharding.strategy=no_shard", UNSHARDED_HEAD)),
        (4, MixedOdd, (UNSHARDED_HEAD, "sharding.strategy=hybrid_shard_zero2", "sharding.shard_degree=2")),
        (4, MixedOdd, (UNSHARDED_HEAD, "train.microbatch=1")),
    ],
)
def test_norm_and_clipping_equal_unsharded(
    n: int, model: type[nn.Module], more: tuple[str, ...], ranks: Any
) -> None:
    run = norm_run(*more)
    plain = unsharded(run, model)
    batch = global_batch(0, sequences=12, length=9, vocabulary=VOCABULARY)
    total, count = next_token_loss(plain, batch)
    (total / count).backward()
    norm = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.05)
    assert norm > 0.1, "it is clipped"
    torch.optim.SGD(plain.parameters(), lr=run.optimizer.learning_rate).step()
    for grad_norm, parameters in ranks(n).run(norm_and_parameters, run, model):
        assert grad_norm == pytest.approx(float(norm), rel=1e-5)
        torch.testing.assert_close(parameters, dict(plain.named_parameters()), rtol=1e-5, atol=1e-7)


def norm_in_pure_bf16() -> float:
    run = run_of("precision.mode=bf16_pure", 'sharding.units.names=["0"]')
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(nn.Sequential(nn.Linear(5, 7, bias=False)), plan)
    state = TrainState(model, build_optimizer(model, plan), data=[torch.ones(6, 5)])
    (step,) = train(state, plan, loss=lambda m, x: m(x).float().sum() / len(x))
    return step.grad_norm


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16(ranks: Any) -> None:
    """35 ones: √35 = 5.916, which bf16 would have as 5.906."""
    assert ranks(2).run(norm_in_pure_bf16) == pytest.approx([35**0.5] * 2, rel=1e-6)


def norms_with_half_an_optimizer() -> list[float]:
    """The optimizer holds the first layer alone, at a rate that changes nothing."""
    run = run_of(*SGD, "optimizer.clip_norm=0", "optimizer.learning_rate=1e-12")
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    model = shard(meta(Regression), plan)
    optimizer = torch.optim.SGD(model.get_submodule("layers.0").parameters(), lr=0.0)
    state = TrainState(model, optimizer, data=[pairs(0)] * 3)
    return [step.grad_norm for step in train(state, plan, loss=mean_square)]


def test_gradients_that_the_optimizer_does_not_hold_do_not_add_up(ranks: Any) -> None:
    first, *later = ranks(1).run(norms_with_half_an_optimizer)[0]
    assert later == pytest.approx([first, first])


# What is skipped #
def poisoned(kind: str, *, at_call: int) -> Callable[..., Any]:
    """`mean_square`, but for one call on the last rank."""
    calls = itertools.count(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = mean_square(model, batch)
        if next(calls) != at_call or dist.get_rank() != dist.get_world_size() - 1:
            return value
        if kind == "gradient":
            return value + (value * 0).sqrt()  # adds 0, whose gradient is 0 / 0
        if kind == "loss":
            return value + torch.inf  # whose gradient is as before
        return value * {"nan": torch.nan, "inf": torch.inf}[kind]

    return loss


def poisoned_in_the_second_step(kind: str, more: tuple[str, ...]) -> dict[str, Any]:
    state, plan = sharded(run_of("train.steps=4", "train.microbatch=2", *more))
    skipped, touched, before = [], [], local_bits(state)
    for step in train(state, plan, loss=poisoned(kind, at_call=2 * plan.accumulation)):
        after = local_bits(state)
        skipped.append(step.skipped)
        touched.append(not same_bits(before, after))
        before = after
    counts = state.step, state.skipped, state.trained_tokens
    return {"skipped": skipped, "touched": touched, "counts": counts, "final": whole(state.model)}


def without_the_second_step(more: tuple[str, ...]) -> dict[str, Tensor]:
    state, plan = sharded(run_of("train.steps=4", "train.microbatch=2", *more))
    for step in (0, 2, 3):
        state.step = step
        batches = Pairs().microbatches(step, rank=dist.get_rank(), plan=plan)
        run_step(state, plan, microbatches=batches, loss=mean_square)
    return whole(state.model)


@pytest.mark.parametrize(
    ("kind", "n", "more"),
    [
        ("nan", 3, ()),
        ("inf", 2, ("optimizer.name=sgd", "optimizer.options={momentum=0.9}")),
        ("gradient", 3, ("sharding.strategy=no_shard",)),
        ("loss", 2, ("precision.mode=bf16_pure",)),
    ],
)
def test_step_that_is_not_finite_is_skipped_on_all(
    kind: str, n: int, more: tuple[str, ...], ranks: Any
) -> None:
    expected = ranks(n).run(without_the_second_step, more)
    for rank, result in enumerate(ranks(n).run(poisoned_in_the_second_step, kind, more)):
        assert result["skipped"] == [False, True, False, False]
        assert result["touched"] == [True, False, True, True], "parameters and optimizer, bit for bit"
        assert result["counts"] == (4, 1, 3 * BATCH * 4), "a loss that is a mean counts all tokens"
        assert same_bits(result["final"], expected[rank]), "the data went on, and nothing else"


def always_nan(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    bad = dist.get_rank() == 1
    return mean_square(model, batch) * (torch.nan if bad else 1.0)


def run_to_the_error(device: str) -> tuple[list[int], int, int, str, str | None]:
    state, plan = sharded(run_of("train.steps=30", "train.max_skipped_steps=3"))
    state.step = 4
    yielded = []
    with FakeDevice() if device == "fake" else nullcontext(), pytest.raises(TrainError) as raised:
        yielded.extend(step.index for step in train(state, plan, loss=always_nan))
    return yielded, state.step, state.skipped, raised.value.what, raised.value.got


@pytest.mark.parametrize(("device", "last"), [("cpu", 7), ("fake", 8)])
def test_run_stops_on_all_ranks_after_skipped_steps(device: str, last: int, ranks: Any) -> None:
    """Steps 5, 6 and 7 are skipped. A host ahead of its device reads that of 7 after launching 8."""
    what = "3 steps in a row had a loss or gradient norm that is not finite."
    which = "the loss was not finite on rank 1 alone of 3, in samples 76 to 79 of the run's order"
    got = f"loss nan, gradient norm nan; in the last of them, {which}"
    expected = [*range(5, last + 1)], last, last - 4, what, got
    assert ranks(3).run(run_to_the_error, device) == [expected] * 3


def nothing_counts(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).float().sum() * 0, 0


def run_without_labels() -> str:
    state, plan = sharded(run_of("train.steps=30", "train.max_skipped_steps=3"))
    with pytest.raises(TrainError) as raised:
        list(train(state, plan, loss=nothing_counts))
    return raised.value.what


def test_steps_without_labels_end_a_run_with_that_reason(ranks: Any) -> None:
    assert ranks(2).run(run_without_labels) == ["3 steps in a row had nothing to train on."] * 2


def step_without_a_token() -> tuple[Step, bool, float]:
    state, plan = sharded(run_of("precision.mode=fp16"))
    before = local_bits(state)
    step = next(iter(train(state, plan, loss=nothing_counts)))
    return step, same_bits(before, local_bits(state)), state.loss_scale.scale


def test_a_step_without_a_valid_token_anywhere_is_skipped(ranks: Any) -> None:
    """Weight decay and momentum would move the parameters; the loss scale has nothing to learn from it."""
    for step, untouched, scale in ranks(2).run(step_without_a_token):
        assert step.skipped
        assert untouched
        assert math.isnan(step.loss)
        assert (step.trained_tokens, scale) == (0, 65536.0)


# Accumulation


def all_reduces(microbatch: int) -> int:
    state, plan = sharded(
        run_of(
            "sharding.strategy=no_shard",
            "train.gradient_sync=every_microbatch",
            "train.steps=2",
            f"train.microbatch={microbatch}",
        )
    )
    steps = train(state, plan, loss=mean_square)
    next(steps)
    with CountOperations() as counted:
        next(steps)
    return counted.total("allreduce")


def test_replicas_are_reduced_once_a_step(ranks: Any) -> None:
    """Not once a microbatch (pytorch's own default): the four units' gradients, and the step's own sums."""
    for microbatch in (6, 2):
        assert ranks(2).run(all_reduces, microbatch) == [5, 5]


# What a step leaves behind


FOREACH = ("optimizer.name=torch.optim.Adam", "optimizer.options={foreach=true}")


def count_live() -> tuple[int, int]:
    gc.collect()
    everything = gc.get_objects()
    return len(everything), sum(issubclass(type(one), Tensor) for one in everything)


def live_objects(more: tuple[str, ...]) -> list[tuple[int, int]]:
    """(objects, tensors) after steps 10 and 60."""
    state, plan = sharded(run_of("train.steps=60", "train.microbatch=2", *more))
    counts: list[tuple[int, int]] = []
    for step in train(state, plan, loss=mean_square):
        if step.index in (10, 60):
            time.sleep(0.5)
            counts.append(count_live())
    deadline = time.monotonic() + 60
    while counts[1][1] > counts[0][1] and time.monotonic() < deadline:
        time.sleep(0.5)  # gloo's thread may let go of a tensor last
        counts[1] = count_live()
    return counts


def specs_are_leaked() -> bool:
    """Returns whether torch leaks the spec of each plain scalar among DTensors, as 2.11 does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded_ones = [distribute_tensor(torch.ones(4), mesh, [Shard(0)])]

    def specs() -> int:
        torch._foreach_mul_(sharded_ones, torch.ones(()))
        gc.collect()
        return sum(type(one).__name__ == "DTensorSpec" for one in gc.get_objects())

    specs()  # what is cached is made
    return specs() < specs()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="fused"),
        pytest.param(FOREACH, id="foreach", marks=pytest.mark.long),
        pytest.param(("precision.mode=bf16_pure",), id="bf16_pure", marks=pytest.mark.long),
    ],
)
def test_no_objects_pile_up_from_step_to_step(more: tuple[str, ...], ranks: Any) -> None:
    """A few may: interned, cached. One a step would be 50. pytorch#188174."""
    if ranks(1).run(specs_are_leaked) == [True]:
        pytest.skip("this torch leaks the spec of a plain scalar among DTensors")
    for (objects, tensors), (objects_later, tensors_later) in ranks(2).run(live_objects, more):
        assert tensors_later == tensors
        assert objects_later - objects < 20


# Tokens #
ROWS, LENGTH = 4, 16
IDS = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
IMAGES, CLASSES = torch.zeros(ROWS, 3, 8, 8), torch.zeros(ROWS, dtype=torch.int64)


def count(batch: Any, *, length: int = LENGTH) -> int:
    settings = [f"data.sequence_length={length}", f"train.microbatch={ROWS}", f"train.global_batch={ROWS}"]
    return count_computed_tokens(batch, Plan.from_run(Run.load(overrides=settings), world_size=1))


@pytest.mark.parametrize(
    "batch",
    [
        {"labels": torch.full_like(IDS, -100), "tokens": IDS},
        {"labels": IDS[:, :3], "decoder_input_ids": IDS[:, :3], "input_ids": IDS},
        {"tokens": IDS.view(1, -1), "labels": IDS.view(1, -1)},
        {"pixel_values": torch.zeros(99, 12), "labels": CLASSES},
        {"x": IMAGES, "y": CLASSES},
        (IDS, IDS),
        (IMAGES, CLASSES),
        ["a text", "another"],
    ],
)
def test_a_microbatch_of_the_plans_size_counts_as_in_the_plan(batch: Any):
    assert count(batch) == ROWS * LENGTH


@pytest.mark.parametrize(
    "batch", [{"input_ids": IDS, "pixel_values": IMAGES}, (IMAGES, CLASSES), (IDS, CLASSES)]
)
def test_samples_that_are_no_sequences_count_as_one_each(batch: Any):
    assert count(batch, length=1) == ROWS


def test_other_rows_and_lengths_count_as_they_are():
    assert count({"tokens": IDS[:3, :5]}) == count({"input_ids": IDS[:3, :5]}) == count((IDS[:3, :5],)) == 15
    assert count({"x": IMAGES[:3]}) == 3 * LENGTH
