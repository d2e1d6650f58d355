"""A run that stops and goes on is the run that did not stop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import load, save
from fullshard.spec.plan import Plan
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.training.same_numbers import STRATEGIES, build, make_run

STEPS = 8


def train_part(
    directory: Path, *, strategy: str, until: int, extra: list[str], model_name: str = "odd_tied"
) -> tuple[list[float], dict[str, Tensor]]:
    """Goes on from the newest checkpoint, if there is one, to step `until`; saves. Losses, whole weights."""
    world_size = dist.get_world_size()
    run = make_run(
        model=model_name, ranks=world_size, strategy=strategy, extra=[f"train.steps={STEPS}", *extra]
    )
    plan = Plan.from_run(run, world_size=world_size)
    torch.manual_seed(123 + until)  # what stood in the generator before must not matter
    model = shard(build(model_name, run), plan)
    state = TrainState(model, build_optimizer(model, plan), data=Rows(VOCABULARY))
    resumed = load(state, directory, missing_ok=True)
    if not resumed:
        torch.manual_seed(5 + dist.get_rank())
    losses: list[float] = []
    steps = train(state, plan)
    while state.step < until:
        losses.append(next(steps).loss)
        losses[-1] += torch.rand(()).item() * 1e-9  # moves the random state, and shows it
    if until < STEPS:
        save(state, directory, plan=plan)
    whole = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    return losses, whole


def run_parts(
    ranks: Callable[..., Any],
    directory: Path,
    parts: list[tuple[int, str, int]],
    *extra: str,
    model: str = "odd_tied",
) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """Each part: (ranks, strategy, last step). Every rank's losses, all parts joined; the last weights."""
    curves: list[list[float]] = []
    weights: list[dict[str, Tensor]] = []
    for world_size, strategy, until in parts:
        results = ranks(world_size).run(part, directory, strategy, until, list(extra), model)
        losses = [losses for losses, _ in results]
        # A rank that was not there before has no curve of its own yet: all ranks have the same losses.
        before = curves[0] if curves else []
        curves = [(curves[rank] if rank < len(curves) else before) + own for rank, own in enumerate(losses)]
        weights = [whole for _, whole in results]
    return curves, weights


def part(directory: Path, strategy: str, until: int, extra: list[str], model: str) -> Any:
    return train_part(directory, strategy=strategy, until=until, extra=extra, model_name=model)


PRECISIONS = ("fp32", "bf16", "bf16_reduce", "fp16", "bf16_pure")


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [pytest.param("full_shard", "fp32", marks=pytest.mark.long), ("hybrid_shard", "bf16")],
)
def test_the_same_ranks_go_on_bitwise(
    strategy: str, precision: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    assert_bitwise(ranks, tmp_path, strategy, precision)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_ranks_go_on_bitwise_in_the_full_cross(
    strategy: str, precision: str, ranks: Callable[..., Any], tmp_path: Path
) -> None:
    assert_bitwise(ranks, tmp_path, strategy, precision)


def assert_bitwise(ranks: Callable[..., Any], path: Path, strategy: str, precision: str) -> None:
    n = 4 if STRATEGIES[strategy] else 2
    mode = f"precision.mode={precision}"
    whole_curve, whole = run_parts(ranks, path / "whole", [(n, strategy, STEPS)], mode)
    parts = [(n, strategy, 3), (n, strategy, 7), (n, strategy, STEPS)]
    curve, stopped = run_parts(ranks, path / "parts", parts, mode)
    assert curve == whole_curve
    for name, tensor in stopped[0].items():
        assert torch.equal(tensor, whole[0][name]), name


@pytest.mark.parametrize(
    "parts",
    [
        [(2, "full_shard", 2), (3, "full_shard", 4), (1, "full_shard", 7), (4, "full_shard", STEPS)],
        pytest.param(
            [(2, "full_shard", 3), (2, "no_shard", 6), (4, "hybrid_shard", STEPS)], marks=pytest.mark.long
        ),
        [(4, "hpz", 3), (3, "zero1", 6), (4, "hybrid_shard_zero2", STEPS)],
    ],
    ids=["ranks 2→3→1→4", "full→no→hybrid", "hpz→zero1→hybrid_zero2"],
)
def test_other_ranks_and_strategies_go_on_alike(
    parts: list[tuple[int, str, int]], ranks: Callable[..., Any], tmp_path: Path
) -> None:
    whole_curve, whole = run_parts(ranks, tmp_path / "whole", [(1, "no_shard", STEPS)])
    curve, moved = run_parts(ranks, tmp_path / "parts", parts)
    assert curve[0] == pytest.approx(whole_curve[0], rel=1e-5)
    for name, tensor in moved[0].items():
        error = (tensor - whole[0][name]).norm() / whole[0][name].norm()
        assert error <= 1e-5, name
