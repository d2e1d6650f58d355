"""Gradients of parameters that only some microbatches use."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard.spec.run import Run
from tests.training.runs import Regression, mean_square, pairs, unsharded
from tests.training.test_step import gradient_of_a_step, unclipped

PATHS: dict[str, tuple[tuple[int, ...], bool]] = {
    "all": ((0, 1, 2), True),
    "two layers": ((0, 2), True),
    "no bias": ((0, 1), False),
}


def on_paths(paths: Sequence[str]) -> Callable[..., Tensor]:
    """A loss whose microbatches use other parameters, as with layer drop: alike on all ranks."""
    turn = itertools.cycle(paths)

    def loss(model: Regression, batch: tuple[Tensor, Tensor]) -> Tensor:
        layers, with_bias = PATHS[next(turn)]
        for index, layer in enumerate(model.layers):
            layer.forward = type(layer).forward.__get__(layer) if index in layers else lambda x: x
        head = model.head
        head.forward = lambda x: F.linear(x, head.weight, head.bias if with_bias else None)
        return mean_square(model, batch)

    return loss


def gradient_on_paths(run: Run, paths: Sequence[str]) -> dict[str, Tensor]:
    return gradient_of_a_step(run, on_paths(paths))[0]


@pytest.mark.parametrize("paths", list(itertools.permutations(PATHS))[::2])
def test_gradients_of_parameters_that_only_some_microbatches_use_are_summed_over_replicas(
    paths: Sequence[str], ranks: Any
) -> None:
    sharding = ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2")
    run = unclipped(1, *sharding)
    model, loss, (x, y) = unsharded(run), on_paths(paths), pairs(0)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 12)):
        (loss(model, (x[rows], y[rows])) / 3).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in ranks(4).run(gradient_on_paths, run, paths):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
