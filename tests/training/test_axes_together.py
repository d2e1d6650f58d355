"""Ranks that share matmuls, share sequences and divide experts, all at once: the numbers of one rank."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fullshard.checkpoint import save
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.training.state import TrainState
from tests.training.meshes import BF16, load_whole, parameters_of, state_of_run, train_and_save
from tests.training.same_numbers import assert_same_numbers, build, make_run, train_sharded

LENGTH, MIXTURE = 16, "mixture_decoder"


class Axes(NamedTuple):
    """Ranks that share each matmul, that share each sequence, and that divide experts."""

    tensor: int
    context: int
    expert: int


ALONE = Axes(1, 1, 1)

# ranks, axes, model, strategy, and what differs from the default
OFFLOADED = ["offload.tier=params+optimizer:cpu"]
CASES: list[tuple[int, Axes, str, str, dict[str, Any]]] = [
    (4, Axes(2, 1, 1), MIXTURE, "full_shard", {}),
    (4, Axes(2, 1, 2), MIXTURE, "shard_grad_op", {"recompute": "full"}),
    (4, Axes(2, 1, 2), "biased_mixture_decoder", "no_shard", {}),
    (4, Axes(4, 1, 2), "plain_mixture_decoder", "zero1", {"accumulation": (2, "last_microbatch")}),
    (4, Axes(1, 4, 2), MIXTURE, "hybrid_shard", {}),
    (4, Axes(2, 1, 4), MIXTURE, "full_shard", {"extra": OFFLOADED}),
    (8, Axes(2, 1, 2), MIXTURE, "hpz", {}),
    (8, Axes(2, 2, 4), MIXTURE, "full_shard", {"recompute": "selective", "loss_chunk": 4}),
]


def run_of(ranks: int, axes: Axes, model: str, strategy: str, **more: Any) -> Any:
    return make_run(model=model, ranks=ranks, strategy=strategy, length=LENGTH, **axes._asdict(), **more)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_numbers(case: tuple[Any, ...], ranks: Callable[..., Any]) -> None:
    count, axes, model, strategy, more = case
    run = run_of(count, axes, model, strategy, **more)
    assert_same_numbers(model, ranks(count).run(train_sharded, model, run), length=LENGTH)


CROSS = [
    (axes, strategy)
    for axes in itertools.starmap(Axes, itertools.product((1, 2, 4), repeat=3))
    if axes.tensor * axes.context <= 8
    for strategy in ("full_shard", "shard_grad_op", "hybrid_shard")
]
RECOMPUTE = ("none", "full", "every", "selective")


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(CROSS)), ids=[str(one) for one in CROSS])
def test_the_same_numbers_in_the_full_cross(index: int, ranks: Callable[..., Any]) -> None:
    """Recompute and accumulation go round."""
    axes, strategy = CROSS[index]
    more = {
        "recompute": RECOMPUTE[index % 4],
        "accumulation": ((1, "every_microbatch"), (3, "last_microbatch"))[index % 5 % 2],
    }
    model = MIXTURE if axes.tensor < 4 else "plain_mixture_decoder"  # 30 columns of its shared expert
    run = run_of(8, axes, model, strategy, **more)
    assert_same_numbers(model, ranks(8).run(train_sharded, model, run), length=LENGTH)


def state_of(axes: Axes, *extra: str) -> tuple[TrainState, Plan]:
    """A fresh state on this world's ranks."""
    count = dist.get_world_size()
    return state_of_run(MIXTURE, run_of(count, axes, MIXTURE, "full_shard", extra=extra))


def initial_values(axes: Axes) -> dict[str, Tensor]:
    return parameters_of(state_of(axes)[0])


def test_initial_values_do_not_depend_on_the_mesh(ranks: Callable[..., Any]) -> None:
    run = run_of(1, ALONE, MIXTURE, "full_shard")
    expected = dict(materialize(build(MIXTURE, run), seed=run.run.seed).named_parameters())
    for axes in (Axes(2, 2, 1), Axes(2, 1, 4), Axes(1, 2, 2)):
        for values in ranks(4).run(initial_values, axes):
            assert all(torch.equal(values[name], expected[name]) for name in expected), axes


def saved_again(axes: Axes, source: Path | None, target: Path) -> dict[str, Tensor]:
    """Loads, or without a source trains two steps; saves, and returns all that was saved, whole."""
    state, plan = state_of(axes, BF16)
    if source is None:
        return train_and_save(state, plan, target)
    found = load_whole(state, source)
    save(state, target, plan=plan)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_passes_through_any_meshes_unchanged(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Weights and moments, bit for bit; torch.distributed.checkpoint alone reads them from any."""
    chain = (Axes(2, 2, 1), Axes(1, 4, 1), Axes(2, 1, 4), Axes(1, 1, 2), ALONE)
    written, source = dict[str, Tensor](), None
    for index, axes in enumerate(chain):
        target = tmp_path / str(index)
        for values in ranks(4).run(saved_again, axes, source, target):
            written = written or values
            for name, value in written.items():
                assert torch.equal(values[name], value), (axes, name)
        plain = {name: torch.empty_like(value) for name, value in written.items()}
        dcp.load(plain, checkpoint_id=next(target.glob("**/.metadata")).parent, no_dist=True)
        assert all(torch.equal(plain[name], value) for name, value in written.items()), axes
        source = target
    assert sum(name.startswith("optimizer.") for name in written) >= 2
