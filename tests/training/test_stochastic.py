"""Stochastic rounding, and the AdamW that keeps everything in bf16."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.offload.rounding import RoundingSeed, random_halfwords, round_stochastically
from fullshard.training.low_bit_adamw import StochasticAdamW


def rounded(exact: Tensor, *, seed: int = 0) -> Tensor:
    out = torch.empty(exact.shape, dtype=torch.bfloat16)
    halfwords = random_halfwords(RoundingSeed(seed), exact.numel(), step=1, device=exact.device)[0]
    round_stochastically(exact.clone(), out=out, halfwords=halfwords)
    return out


def every_bf16() -> Tensor:
    return torch.arange(1 << 16).to(torch.int32).bitwise_left_shift(16).view(torch.float32)


def test_stochastic_rounding_keeps_values_that_bf16_can_hold() -> None:
    values = every_bf16()
    finite = values[values.isfinite()]
    assert torch.equal(rounded(finite).float(), finite)
    assert torch.equal(rounded(finite).view(torch.int16), finite.bfloat16().view(torch.int16))  # -0 too


def test_infinities_and_nans_survive() -> None:
    infinities = torch.tensor([math.inf, -math.inf]).repeat(1000)
    assert torch.equal(rounded(infinities).float(), infinities)
    # The payload of the second lies in the half that is cut.
    nans = torch.tensor([0x7FC00000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32).repeat(1000)
    assert rounded(nans).isnan().all()


def test_a_rounded_value_is_one_of_the_two_neighbours() -> None:
    exact = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) * 10
    down = exact.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
    up = down.view(torch.int32).add(1 << 16).view(torch.float32)
    got = rounded(exact).float()
    assert ((got == down) | (got == up)).all()
    assert (got == down).any()
    assert (got == up).any()


@pytest.mark.parametrize("value", [1.001, -1.001, 1.0 + 2**-16, 3.14159, -1e-30, 1e30, 2e-39, 255.9])
def test_the_mean_of_many_roundings_is_the_exact_value(value: float) -> None:
    """Within five standard errors of a coin that falls up with probability p."""
    n = 100_000
    exact = torch.tensor(value)
    down = exact.view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32).double()
    up = exact.view(torch.int32).bitwise_and(-(1 << 16)).add(1 << 16).view(torch.float32).double()
    p = float((exact.double() - down) / (up - down))
    share_up = float((rounded(exact.expand(n).contiguous()).double() == up).double().mean())
    assert abs(share_up - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-12


def test_consecutive_seeds_give_independent_noise() -> None:
    """Steps and parameters differ in their seeds alone."""
    n = 2000
    half_way = torch.full((16,), 1 + 2**-8)
    up = torch.stack([(rounded(half_way, seed=seed) > 1).double() for seed in range(n)])  # (seeds, 16)
    signs = 2 * up - 1
    assert (signs.mean(0).abs() < 5 / math.sqrt(n)).all()
    assert ((signs[1:] * signs[:-1]).mean(0).abs() < 5 / math.sqrt(n)).all()
    neighbours = (signs[:, 1:] * signs[:, :-1]).mean()
    assert abs(float(neighbours)) < 5 / math.sqrt(15 * n)


# The optimizer #
def descend(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, steps: int) -> None:
    """Down ½ ‖x - 3‖²."""
    for _ in range(steps):
        parameter.grad = (parameter.detach().float() - 3).to(parameter.dtype)
        optimizer.step()


def start(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.full((256,), 2.0, dtype=dtype))


def test_stochastic_rounding_follows_fp32_where_rounding_to_nearest_stands_still() -> None:
    """A step of 1e-3 is an eighth of half the gap between bf16 values above 2."""
    fp32, nearest, stochastic = start(torch.float32), start(torch.bfloat16), start(torch.bfloat16)
    for parameter, optimizer in (
        (fp32, torch.optim.AdamW([fp32], lr=1e-3, weight_decay=0.0)),
        (nearest, torch.optim.AdamW([nearest], lr=1e-3, weight_decay=0.0)),
        (stochastic, StochasticAdamW([stochastic], lr=1e-3)),
    ):
        descend(optimizer, parameter, steps=300)
    assert (nearest == 2).all()
    moved = float(fp32.detach().mean()) - 2
    assert moved > 0.2
    assert float(stochastic.detach().float().mean()) - 2 == pytest.approx(moved, rel=0.05)


def test_in_fp32_it_is_adamw() -> None:
    ours, theirs = start(torch.float32), start(torch.float32)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    descend(StochasticAdamW([ours], **options), ours, steps=20)
    descend(torch.optim.AdamW([theirs], **options), theirs, steps=20)
    torch.testing.assert_close(ours, theirs)


def equal_rows() -> Tensor:
    """This rank's half of a parameter whose rows are all alike, after a step."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(2, 512, dtype=torch.bfloat16), mesh, [Shard(0)]))
    parameter.grad = torch.ones_like(parameter.detach())
    StochasticAdamW([parameter], lr=1e-3).step()
    assert isinstance(parameter, DTensor)
    return parameter.detach().to_local()


def test_shards_are_rounded_independently(ranks: Any) -> None:
    first, second = ranks(2).run(equal_rows)
    assert 0.1 < (first != second).float().mean() < 0.9
