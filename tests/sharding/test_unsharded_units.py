"""Units that no rank shards are used and reduced in place, with the gradients of a plain module."""

import copy
from typing import Any, cast

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


class Block(nn.Linear):
    def forward(self, x: Tensor, *, adds_bias: bool = True) -> Tensor:
        return super().forward(x) if adds_bias else x @ self.weight


class Blocks(nn.Module):
    """Blocks of two buckets. The last block also runs first, without its bias: its weight's gradient is late.

    frozen: the matrix of block 0; rare: used on rank 0 only; unused: on no rank
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDE, WIDE) for _ in range(5)])
        self.blocks[0].weight.requires_grad_(False)
        self.rare, self.unused = nn.Parameter(torch.randn(WIDE)), nn.Parameter(torch.randn(WIDE))

    def forward(self, x: Tensor, *, is_rare: bool) -> Tensor:
        x = self.blocks[4](x, adds_bias=False)
        for block in self.blocks:
            x = block(x.sin())
        return x * self.rare if is_rare else x


def backward_of_blocks(model: nn.Module, *, rank: int, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    x = torch.randn(2, WIDE, generator=generator).requires_grad_()  # for FSDP2 to see backward end
    model(x, is_rare=rank == 0).square().mean().backward()


def differences_over_buckets(microbatches: int) -> tuple[dict[str, float | None], list[int]]:
    """Returns how far each gradient of the third step is from the mean, and the buckets' bytes.

    Rank 0 keeps the gradients of the second step, whose buffers only the other ranks use again.
    """
    torch.manual_seed(0)
    plain, ranks = Blocks(), dist.get_world_size()
    plan = Plan.from_run(run_in("fp32"), world_size=ranks)
    model = shard(copy.deepcopy(plain), plan, units=lambda _, module: isinstance(module, nn.Linear))
    assert isinstance(model, FSDPModule)
    kept, copies = list[Tensor](), list[Tensor]()
    for step in range(3):
        if step == 2 and dist.get_rank() == 0:
            kept = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
            copies = [gradient.clone() for gradient in kept]
        model.zero_grad()
        for number in range(microbatches):
            model.set_requires_gradient_sync(number == microbatches - 1)
            backward_of_blocks(model, rank=dist.get_rank(), microbatch=number + 3 * step)
    assert all(torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True))
    buffers = cast(Any, model).gradient_buffers()
    for rank in range(ranks):
        for number in range(microbatches):
            backward_of_blocks(plain, rank=rank, microbatch=number + 6)
    found = dict[str, float | None]()
    for (name, parameter), own in zip(plain.named_parameters(), model.parameters(), strict=True):
        if not isinstance(own.grad, DTensor):
            found[name] = None
            continue
        assert parameter.grad is not None
        mean = parameter.grad / ranks
        found[name] = ((own.grad.full_tensor() - mean).norm() / mean.norm()).item()
    return found, [buffer.nbytes for buffer in buffers]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_over_several_buckets_are_means_over_ranks(microbatches, ranks):
    for found, sizes in ranks(2).run(differences_over_buckets, microbatches):
        assert len(sizes) == 2
        assert {name for name, one in found.items() if one is None} == {"blocks.0.weight", "unused"}
        assert max(one for one in found.values() if one is not None) < 1e-5


def sums_and_buffers() -> list[tuple[bool, bool]]:
    """Returns for two backwards, cleared in between and not, (is the sum of both, same buffer)."""
    model, found = shard(SharedGradients(), Plan.from_run(run_in("fp32"), world_size=2)), []
    for _ in range(2):  # from the second on, the buffer is in memory that the ranks share
        model.zero_grad()
        loss(model, rank=0, microbatch=0).backward()
    first = [p.grad.full_tensor().clone() for p in model.parameters() if isinstance(p.grad, DTensor)]
    for clears in (True, False):
        before = cast(Any, model).gradient_buffers()[0].data_ptr()
        if clears:
            model.zero_grad()
        loss(model, rank=0, microbatch=0).backward()
        second = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
        sums = all(torch.allclose(b, a if clears else 2 * a) for a, b in zip(first, second, strict=True))
        found.append((sums, cast(Any, model).gradient_buffers()[0].data_ptr() == before))
    return found


def test_a_bucket_is_used_again_unless_its_gradients_are_still_there(ranks):
    assert ranks(2).run(sums_and_buffers) == [[(True, True), (True, False)]] * 2


def shares_memory_while_it_computes(precision: str) -> list[bool]:
    """Returns for each parameter whether the model computes with the memory of its shard."""
    plan = Plan.from_run(run_in(precision), world_size=dist.get_world_size())
    model = shard(SharedGradients(), plan)
    shards = [p.to_local().untyped_storage().data_ptr() for p in model.parameters() if isinstance(p, DTensor)]
    used = list[int]()
    handle = model.register_forward_pre_hook(lambda module, _: used.clear())

    class Probe(nn.Module):
        def forward(self) -> None:
            used.extend(p.untyped_storage().data_ptr() for p in model.parameters())

    model.forward = lambda: Probe()()  # called within FSDP2's hooks
    model()
    handle.remove()
    return [one == other for one, other in zip(shards, used, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_used_where_they_are_unless_they_are_cast(world_size, ranks):
    assert all(all(found) for found in ranks(world_size).run(shares_memory_while_it_computes, "fp32"))
    assert not any(any(found) for found in ranks(world_size).run(shares_memory_while_it_computes, "bf16"))
