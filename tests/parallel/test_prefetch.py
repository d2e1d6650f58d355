"""How many units are gathered at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.collectives import DirectAllGather
from fullshard.training.shard import shard
from tests.fakes.architectures import WIDTH, Block
from tests.fakes.plans import plan_of

BLOCKS = 6


class CountedGather(DirectAllGather):
    def __init__(self, gathers: list[int]) -> None:
        self.gathers = gathers

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False):
        self.gathers[0] += 1
        return super().__call__(output_tensor, input_tensor, group, async_op)


class AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, record: Callable[[], None]) -> Tensor:
        ctx.record = record
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.record()
        return gradient, None


class Marked(Block):
    """Says when its forward begins, and when its backward does."""

    def __init__(self, counts: list[int], gathers: list[int]) -> None:
        super().__init__()
        self.counts, self.gathers = counts, gathers

    def record(self) -> None:
        self.counts.append(self.gathers[0])

    def forward(self, x: Tensor) -> Tensor:
        self.record()
        return AtBackward.apply(super().forward(x), self.record)


def gathered_at_once(*settings: str) -> tuple[list[int], list[int]]:
    """Units gathered, or being so, when each block begins its forward; and (the last first) its backward."""
    gathers, counts = [0], list[int]()
    with torch.device("meta"):
        model = nn.Sequential(*(Marked(counts, gathers) for _ in range(BLOCKS)))
    shard(model, plan_of(dist.get_world_size(), *settings))
    for block in model:
        assert isinstance(block, FSDPModule)
        block.set_custom_all_gather(CountedGather(gathers))
    model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    assert gathers == [2 * BLOCKS]
    # Each block that was done before has been freed.
    forward = [count - i for i, count in enumerate(counts[:BLOCKS])]
    backward = [count - BLOCKS - i for i, count in enumerate(counts[BLOCKS:])]
    return forward, backward


def ahead(depth: int) -> list[int]:
    return [min(1 + depth, BLOCKS - i) for i in range(BLOCKS)]


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        (("prefetch.mode=none",), 0, 0),
        (
            ("prefetch.mode=implicit",),
            0,
            1,
        ),  # in forward it is a matter of streams, of which the CPU has none
        (("prefetch.mode=explicit",), 1, 1),
        (("prefetch.mode=explicit", "prefetch.forward=3", "prefetch.backward=2"), 3, 2),
        (("prefetch.mode=explicit", "prefetch.forward=0", "prefetch.backward=9"), 0, 9),
    ],
)
def test_units_gathered_ahead(settings: tuple[str, ...], forward: int, backward: int, ranks: Any) -> None:
    for seen in ranks(2).run(gathered_at_once, *settings):
        assert seen == (ahead(forward), ahead(backward))
