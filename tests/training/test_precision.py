"""Runs in bf16 and fp16, against plain unsharded loops of the same precision."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.models.decoder import DecoderModel
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.schedule import learning_rate_factor
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

STEPS, BATCH, LENGTH, VOCABULARY = 30, 24, 16, 32

# (ranks, microbatches a step of each rank, overrides)
Case = tuple[int, int, tuple[str, ...]]
CASES: dict[str, Case] = {
    "full_shard-2": (2, 2, ("sharding.strategy=full_shard",)),
    "shard_grad_op-3": (3, 1, ("sharding.strategy=shard_grad_op",)),
    "hybrid_shard-4": (4, 1, ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2")),
    "full_shard-3-last": (3, 4, ("sharding.strategy=full_shard", "train.gradient_sync=last_microbatch")),
    "full_shard-4-recompute": (4, 2, ("sharding.strategy=full_shard", "recompute.mode=full")),
    "hybrid_shard_zero2-4": (4, 2, ("sharding.strategy=hybrid_shard_zero2", "sharding.shard_degree=2")),
    "no_shard-2": (2, 3, ("sharding.strategy=no_shard",)),
    "zero1-3": (3, 2, ("sharding.strategy=zero1",)),
}


def cases(quick: Sequence[str]) -> list[Any]:
    """All cases; those but `quick` are for the long suite."""
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.long)
        for name, case in CASES.items()
    ]


def make_run(mode: str, overrides: Sequence[str] = ()) -> Run:
    return Run.load(
        overrides=[
            f"precision.mode={mode}",
            f"model.vocabulary={VOCABULARY}",
            "model.d_model=64",
            "model.d_ff=96",
            "model.layers=2",
            f"model.max_sequence={LENGTH}",
            f"data.sequence_length={LENGTH}",
            f"train.global_batch={BATCH}",
            f"train.steps={STEPS}",
            "schedule.warmup_steps=3",
            "optimizer.learning_rate=1e-2",
            "optimizer.eps=1e-6",
            *overrides,
        ]
    )


def progressions(step: int) -> dict[str, Tensor]:
    """A global batch that can be learnt: rows that count up by 1, 2 or 3, one token in ten another."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    tokens = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(0, VOCABULARY, tokens.shape, generator=generator)
    tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)
    labels = tokens[:, 1:].clone()
    for row in range(BATCH):
        labels[row, : row % 7] = -100  # so that microbatches differ in how many labels count
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


class Progressions:
    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[dict[str, Tensor]]:
        batch = progressions(step)
        for i in range(plan.accumulation):
            start = (i * plan.data_parallel_degree + rank) * plan.microbatch
            yield {name: tensor[start : start + plan.microbatch] for name, tensor in batch.items()}


def sharded_losses(run: Run) -> list[float]:
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    with torch.device("meta"):
        model: nn.Module = DecoderModel(run.decoder_config)
    model = shard(model, plan)
    steps = list(train(TrainState(model, build_optimizer(model, plan), data=Progressions()), plan))
    assert not any(step.skipped for step in steps)
    return [step.loss for step in steps]


@contextmanager
def one_thread() -> Iterator[None]:
    """Beside busy ranks, a second thread makes such small matrices slower, not quicker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
@one_thread()
def plain_losses(dtype: torch.dtype, microbatches: int) -> tuple[float, ...]:
    """One process: weights kept, gradients added up and updates made in fp32, everything else in `dtype`."""
    run = make_run("fp32")
    with torch.device("meta"):
        model: nn.Module = DecoderModel(run.decoder_config)
    model = materialize(model, seed=run.run.seed)
    section, names = run.optimizer, dict(model.named_parameters())
    groups = [
        {"params": [p for p in names.values() if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in names.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps)
    losses: list[float] = []
    for step in range(STEPS):
        tokens, labels = progressions(step).values()
        valid, mean = (labels != -100).sum().item(), 0.0
        for own, wanted in zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True):
            logits = torch.func.functional_call(model, {n: p.to(dtype) for n, p in names.items()}, (own,))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
            loss.backward()
            mean += loss.item() / valid
        for parameter in names.values():
            parameter.grad = parameter.grad / valid
        nn.utils.clip_grad_norm_(names.values(), section.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = section.learning_rate * learning_rate_factor(run.schedule, step=step, steps=STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return tuple(losses)


@cache
def five_bf16_runs() -> Tensor:
    """(5, steps): losses of unsharded runs that differ in nothing but the split of the batch."""
    return torch.tensor([plain_losses(torch.bfloat16, n) for n in (1, 2, 3, 4, 6)], dtype=torch.float64)


def assert_within_five_runs(losses: Sequence[float], *, times: float) -> None:
    """Within the range of the five runs, widened on either side by `times` their widest spread so far.

    The bare range of five would leave out one new run of three at each step. The spread begins at fp32's
    rounding, since nothing but the order of sums differs in the first forward, and grows from there: a run
    that rounds elsewhere leaves the range in its second step, before everything drifts apart.
    """
    five, own = five_bf16_runs(), torch.tensor(losses, dtype=torch.float64)
    low, high = five.min(0).values, five.max(0).values
    tolerance = times * (high - low).cummax(0).values + 1e-6 * high
    outside = torch.maximum(low - own, own - high) / tolerance
    assert own.shape == low.shape
    assert outside.max() <= 1, (int(outside.argmax()), outside)


def distance_to_fp32(losses: Sequence[float] | Tensor) -> float:
    """The widest over all steps."""
    exact = torch.tensor(plain_losses(torch.float32, 1), dtype=torch.float64)
    return float((torch.as_tensor(losses, dtype=torch.float64) - exact).abs().max())


def run_case(case: Case, ranks: Any, *, mode: str) -> list[float]:
    n, microbatches, overrides = case
    run = make_run(mode, [f"train.microbatch={BATCH // n // microbatches}", *overrides])
    first, *others = ranks(n).run(sharded_losses, run)
    assert all(other == first for other in others), "losses are the same on all ranks"
    assert first[-1] < 0.6 * first[0], "it learns"
    return first


def test_range_of_bf16_runs_excludes_fp32() -> None:
    """Or the tests below would say nothing. (Margins: 0.9 of the tolerance inside, 3.8 of it outside.)"""
    with pytest.raises(AssertionError):
        assert_within_five_runs(plain_losses(torch.float32, 1), times=2.0)


@pytest.mark.parametrize("case", cases(("full_shard-2",)))
def test_bf16_losses_are_near_the_range_of_unsharded_bf16_runs(case: Case, ranks: Any) -> None:
    assert_within_five_runs(run_case(case, ranks, mode="bf16"), times=1.25)


@pytest.mark.long
@pytest.mark.parametrize("case", cases(("full_shard-2",)))
def test_sums_in_bf16_widen_the_range_no_more_than_twice(case: Case, ranks: Any) -> None:
    assert_within_five_runs(run_case(case, ranks, mode="bf16_reduce"), times=2.0)


@pytest.mark.parametrize("case", cases(("full_shard-2",)))
def test_fp16_losses_are_nearer_to_fp32_than_bf16(case: Case, ranks: Any) -> None:
    """Three bits of mantissa more; a factor of 5 to 10 was seen."""
    assert 3 * distance_to_fp32(run_case(case, ranks, mode="fp16")) < distance_to_fp32(five_bf16_runs())


@pytest.mark.parametrize("case", cases(("full_shard-2",)))
def test_pure_bf16_losses_are_near_fp32(case: Case, ranks: Any) -> None:
    """The weights themselves have 8 bits; factors of 0.8 to 1.6 were seen."""
    assert distance_to_fp32(run_case(case, ranks, mode="bf16_pure")) < 3 * distance_to_fp32(five_bf16_runs())
