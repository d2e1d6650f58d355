"""A run whose sequences are divided over ranks computes what an unsharded one computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard.checkpoint import load, save
from fullshard.spec.run import Run
from fullshard.training.loop import train
from tests.training.meshes import parameters_of, state_of_run, whole
from tests.training.same_numbers import assert_same_numbers, make_run, train_sharded

LENGTH = 16

# ranks, context, model, strategy, and what differs from the default
CASES: list[tuple[int, int, str, str, dict[str, Any]]] = [
    (2, 2, "decoder", "full_shard", {}),
    (2, 2, "tied_decoder", "no_shard", {"recompute": "full"}),
    (4, 2, "tied_decoder", "shard_grad_op", {"accumulation": (2, "last_microbatch")}),
    (4, 4, "decoder", "hybrid_shard", {"recompute": "selective", "loss_chunk": 4}),
    (4, 2, "decoder", "zero1", {"accumulation": (2, "every_microbatch"), "units": "size"}),
    (3, 3, "decoder", "full_shard", {"length": 12}),
]


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(case: tuple[Any, ...], ranks: Callable[..., Any]) -> None:
    count, context, model, strategy, more = case
    settings = {"length": LENGTH} | more
    run = make_run(model=model, ranks=count, strategy=strategy, context=context, **settings)
    assert_same_numbers(model, ranks(count).run(train_sharded, model, run), length=settings["length"])


def train_until(directory: Path, run: Run, until: int) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Resumes from the newest checkpoint, trains to step `until`, and saves.

    Returns losses, whole weights, and AdamW's first moments as they were loaded.
    """
    state, plan = state_of_run("tied_decoder", run)
    load(state, directory, missing_ok=True)
    losses: list[float] = []
    loaded = [whole(one["exp_avg"]) for one in state.optimizer.state.values()]
    steps = train(state, plan)
    while state.step < until:
        losses.append(next(steps).loss)
    save(state, directory, plan=plan)
    return losses, parameters_of(state), loaded


def test_a_checkpoint_loads_with_any_number_of_ranks_that_share_sequences(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Bit by bit, there and back; a run that resumes on the same ranks is the run that did not stop."""
    shapes = [(4, 2), (2, 1), (4, 4), (4, 2)]
    runs = [
        make_run(model="tied_decoder", ranks=n, strategy="full_shard", context=context, length=LENGTH)
        for n, context in shapes
    ]
    losses, weights, _ = ranks(4).run(train_until, tmp_path / "parts", runs[0], 2)[0]
    for (n, _), run in zip(shapes[1:], runs[1:], strict=True):
        more, again, _ = ranks(n).run(train_until, tmp_path / "parts", run, 2)[0]
        assert not more
        assert all(torch.equal(again[name], one) for name, one in weights.items())
    more, weights, moments = ranks(4).run(train_until, tmp_path / "parts", runs[0], 4)[0]
    expected, unstopped, _ = ranks(4).run(train_until, tmp_path / "whole", runs[0], 4)[0]
    assert losses + more == expected
    assert all(torch.equal(weights[name], one) for name, one in unstopped.items())
    assert any(one.any() for one in moments)
