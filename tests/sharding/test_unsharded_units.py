"""Units that no rank shards are reduced to the gradients of a plain module."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fullshard.sharding.apply import shard
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.training.runs import run_of

WIDTH = 10
WIDE = 1700  # a matrix takes 11 MiB, so that three of them fill a bucket and one is left


class SharedGradients(nn.Module):
    """A module of whose parameters autograd gives two gradients in the same memory, and one none.

    Only if `shares`: autograd itself adds up wrongly when it accumulates into such gradients (torch 2.13).
    """

    def __init__(self, *, shares: bool = True) -> None:
        super().__init__()
        self.factor = 1 if shares else 2
        self.first = nn.Parameter(torch.randn(WIDTH * WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH * WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        second = self.second.view(WIDTH, WIDTH)
        matrix = self.first.view(WIDTH, WIDTH) + (second if self.factor == 1 else self.factor * second)
        return x @ matrix * self.scale


def run_in(precision: str) -> Run:
    settings = ("sharding.strategy=no_shard", "sharding.units.policy=size")
    return run_of(*settings, f"precision.mode={precision}")


def loss(model: nn.Module, *, rank: int, microbatch: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + microbatch))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def gradients(precision: str, microbatches: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each parameter's gradient as (reduced by FSDP2, mean over ranks of plain modules)."""
    torch.manual_seed(0)
    plain, ranks = SharedGradients(shares=microbatches == 1), dist.get_world_size()
    model = shard(copy.deepcopy(plain), Plan.from_run(run_in(precision), world_size=ranks))
    assert isinstance(model, FSDPModule)
    for number in range(microbatches):
        model.set_requires_gradient_sync(number == microbatches - 1)
        loss(model, rank=dist.get_rank(), microbatch=number).backward()
    reduced = {name: p.grad for name, p in model.named_parameters()}
    expected = {name: torch.zeros(p.shape) for name, p in plain.named_parameters()}
    plain.to(torch.float32 if precision == "fp32" else torch.bfloat16)
    for rank in range(ranks):
        for number in range(microbatches):
            plain.zero_grad()
            loss(plain, rank=rank, microbatch=number).backward()
            for name, parameter in plain.named_parameters():
                expected[name] += 0 if parameter.grad is None else parameter.grad.float() / ranks
    assert reduced.pop("unused") is None
    return {
        name: (value.full_tensor(), expected[name])
        for name, value in reduced.items()
        if isinstance(value, DTensor)
    }


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_reduce"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_means_over_ranks_also_where_they_share_memory(
    world_size, precision, microbatches, ranks
):
    tolerance = {"fp32": 1e-5, "bf16": 1e-5, "bf16_reduce": 2e-2}[precision]  # where microbatches are summed
    for found in ranks(world_size).run(gradients, precision, microbatches):
        assert set(found) == {"first", "second", "scale"}
        for name, (reduced, expected) in found.items():
            difference = (reduced - expected).norm() / expected.norm()
            assert difference < tolerance, (name, difference)
