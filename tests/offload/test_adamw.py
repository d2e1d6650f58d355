"""The streamed AdamW: torch's own bit for bit, and what moments in bf16 change."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fullshard.errors import OffloadError
from fullshard.offload.adamw import StreamingAdamW
from fullshard.offload.rounding import AdamOptions
from fullshard.offload.state import OffloadedState
from fullshard.offload.store import HostMemoryStore
from fullshard.spec.groups import ShardSizes, group_shards
from fullshard.training.low_bit_adamw import StochasticAdamW

SIZES = {"a": (643, 5), "b": (5,), "c": (1,), "d": (40, 33)}
BF16 = torch.bfloat16
EPSILON = 2.0**-7  # a bf16 that is rounded at random is off by less than this part of its value
OPTIONS = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


class InMemory:
    """The part of `OffloadedState` that the optimizer uses, for whole parameters without a model."""

    def __init__(
        self, parameters: Mapping[str, Tensor], *, moments: torch.dtype | None, sub_group_parameters: int
    ) -> None:
        self.names_of = {parameter: name for name, parameter in parameters.items()}
        held = [
            ShardSizes(n, p.numel(), p.numel(), str(p.dtype).removeprefix("torch."))
            for n, p in parameters.items()
        ]
        self.groups = group_shards(held, sub_group_parameters=sub_group_parameters)
        self.store = HostMemoryStore(self.groups, moments=moments, pinned=False)
        self.names = tuple(parameters)
        for name, parameter in parameters.items():
            self.parameter_state_tensors(name)["master"].copy_(parameter.detach())

    def parameter_state_tensors(self, name: str) -> dict[str, Tensor]:
        found = self.store.read_parameter_state(name)
        assert found is not None
        shape = next(one.shape for one, own in self.names_of.items() if own == name)
        return {key: part.view(shape) for key, part in found._asdict().items()}

    def start_update(self, function: Callable[..., None], *, release: Callable[[str], None]) -> None:
        for group, parts in self.store.stream_for_update():
            function(group, parts)
        for name in self.names:
            release(name)

    def wait_for_update(self, *, to_load: bool = False) -> None: ...


def parameters_of(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SIZES.items()
    }


def groups_of(parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Two groups with different options."""
    first, *others = parameters.values()
    return [
        {"params": [first], "lr": 3e-2, "betas": (0.8, 0.99), "eps": 1e-6},
        {"params": others, "weight_decay": 0.0},
    ]


def streaming(
    parameters: Mapping[str, nn.Parameter],
    *,
    moments: torch.dtype | None = None,
    sub_group_parameters: int = 1,
    options: AdamOptions = OPTIONS,
    seed: int = 0,
) -> StreamingAdamW:
    return StreamingAdamW(
        groups_of(parameters) if options is OPTIONS else parameters.values(),
        cast(
            OffloadedState, InMemory(parameters, moments=moments, sub_group_parameters=sub_group_parameters)
        ),
        gradients=None,
        defaults=options,
        seed=seed,
    )


def reference(parameters: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    lr, *betas, eps, decay = OPTIONS
    return torch.optim.AdamW(
        groups_of(parameters), lr=lr, betas=tuple(betas), eps=eps, weight_decay=decay, fused=True
    )


def give_gradients(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Sets gradients; in some steps one parameter has none."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, one in enumerate(parameters.values()):
        gradient = torch.randn(one.shape, generator=generator).to(one.dtype)
        one.grad = None if step % 3 == i else gradient


def same_as(streamed: StreamingAdamW, other: torch.optim.Optimizer) -> bool:
    """Values, moments and counts of all parameters."""
    pairs = zip(parameters_in(streamed), parameters_in(other), strict=True)
    return all(same_state(streamed, one, other, their) for one, their in pairs)


def same_state(streamed: StreamingAdamW, one: Tensor, other: torch.optim.Optimizer, their: Tensor) -> bool:
    own, expected = dict(streamed.state.get(one, {})), other.state[their]
    outside = streamed.offloaded.parameter_state_tensors(streamed.offloaded.names_of[one])
    own |= {key: outside[key] for key in ("exp_avg", "exp_avg_sq") if own}
    return (
        torch.equal(outside["master"], their.detach())
        and own.keys() == expected.keys()
        and all(torch.equal(own[key], expected[key]) for key in own)
    )


def parameters_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


# The same bits


@pytest.mark.parametrize("sub_group_parameters", [1, 2048, 10**6])
def test_the_streamed_update_is_torchs_bit_for_bit(sub_group_parameters: int) -> None:
    """With groups of other options, a schedule, a closure, scaled and missing gradients."""
    ours, theirs = parameters_of(0), parameters_of(0)
    streamed, other = streaming(ours, sub_group_parameters=sub_group_parameters), reference(theirs)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step) for one in (streamed, other)]
    for step in range(12):
        factor = 0.37 if step % 4 == 1 else 1.0  # holds for one step
        if factor != 1.0:
            streamed.gradient_factor = factor
        other.grad_scale = torch.tensor(1 / factor)  # by which torch's fused kernel divides
        for parameters, optimizer in ((ours, streamed), (theirs, other)):
            give_gradients(parameters, step)
            assert optimizer.step(lambda step=step: float(step)) == step
            optimizer.zero_grad()
            assert all(one.grad is None for one in parameters.values())
        for schedule in schedules:
            schedule.step()
        assert same_as(streamed, other)


@pytest.mark.parametrize("most", [4096, 100])
def test_bf16_masters_are_rounded_as_without_a_tier(most: int) -> None:
    """Holds for shards that are cut, and for whole ones."""
    ours, theirs = parameters_of(0, BF16), parameters_of(0, BF16)
    streamed = streaming(ours, sub_group_parameters=most, seed=5)
    lr, *betas, eps, decay = OPTIONS
    other = StochasticAdamW(
        groups_of(theirs), lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=decay, seed=5
    )
    assert len(streamed.offloaded.groups) > 1
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        streamed.step()
        other.step()
        assert same_as(streamed, other)


def test_a_state_dict_is_refused() -> None:
    optimizer = streaming(parameters_of(0))
    for use in (optimizer.state_dict, partial(optimizer.load_state_dict, {})):
        with pytest.raises(OffloadError, match="state_dict"):
            use()


# Moments in bf16


def one_step(
    first: Tensor, second: Tensor, gradient: Tensor, *, moments: torch.dtype | None, seed: int = 0
) -> tuple[dict[str, Tensor], AdamOptions]:
    """The third update of values that are zero, from these moments."""
    options = AdamOptions(lr=1.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    parameter = nn.Parameter(torch.zeros(gradient.shape))
    optimizer = streaming(
        {"a": parameter}, moments=moments, sub_group_parameters=10**6, options=options, seed=seed
    )
    state = optimizer.offloaded.parameter_state_tensors("a")
    state["exp_avg"].copy_(first)
    state["exp_avg_sq"].copy_(second)
    optimizer.state[parameter] = {"step": torch.tensor(2.0)}
    parameter.grad = gradient.clone()
    optimizer.step()
    return state, options


NUMBERS = st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=40), st.integers(0, 2**31))
@settings(max_examples=60)
def test_a_step_with_bf16_moments_is_off_by_a_known_part_of_the_rate(
    numbers: list[tuple[float, float, float]], seed: int
) -> None:
    """Moments m(1+δ), v(1+δ') are kept for m, v, with |δ|, |δ'| < ε = 2^-7. The update of the next step, with
    m' = β₁m + (1-β₁)g and v' = β₂v + (1-β₂)g², is lr · m̂'/(√v̂' + eps). Its numerator is off by β₁|m|ε/c₁ at
    most, with c₁ = 1-β₁^t, and v' by a factor within 1 ± ε, so the update is off by

        lr / (√v̂' + eps) / √(1-ε) · (β₁|m|ε/c₁ + (1 - √(1-ε)) |m̂'|)

    at most: of a parameter whose gradients are alike (m̂' = √v̂'), 1.5 ε = 1.2 % of lr.
    """
    first, root, gradient = (torch.tensor(column) for column in zip(*numbers, strict=True))
    second = root.square()
    kept, options = one_step(
        rounded_at_random(first, seed), rounded_at_random(second, seed + 1), gradient, moments=BF16, seed=seed
    )
    exact, _ = one_step(first, second, gradient, moments=None)
    c1, c2 = 1 - options.beta1**3, 1 - options.beta2**3
    denominator = (exact["exp_avg_sq"].double() / c2).sqrt() + options.eps
    numerator = exact["exp_avg"].double().abs() / c1
    shrunk = math.sqrt(1 - EPSILON)
    off = options.beta1 * first.double().abs() * EPSILON / c1 + (1 - shrunk) * numerator
    bound = options.lr * off / denominator / shrunk
    rounding = 1e-5 * (numerator + first.double().abs()) / denominator  # of fp32
    assert bool(((kept["master"] - exact["master"]).double().abs() <= bound + rounding).all())


def rounded_at_random(exact: Tensor, seed: int) -> Tensor:
    """One of the two bf16 around each, by a coin of its own."""
    down = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32)
    up = ((exact.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32)
    coin = torch.rand(exact.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where((down == exact) | coin, down, up)


def test_bf16_moments_are_right_in_the_mean() -> None:
    """Over N seeds: within 5 σ, with σ <= ulp / 2√N. To nearest they would be off by up to ulp / 2."""
    seeds, size = 400, 300
    generator = torch.Generator().manual_seed(0)
    first, gradient = torch.randn(2, size, generator=generator).bfloat16().float()
    second = torch.rand(size, generator=generator).bfloat16().float() + 0.01
    second = second.bfloat16().float()
    exact, _ = one_step(first, second, gradient, moments=None)
    sums = {key: torch.zeros(size, dtype=torch.float64) for key in ("exp_avg", "exp_avg_sq")}
    for seed in range(seeds):
        kept, _ = one_step(first, second, gradient, moments=BF16, seed=seed)
        assert kept["exp_avg"].dtype is BF16
        # The values are of moments before they are rounded.
        torch.testing.assert_close(kept["master"], exact["master"], rtol=1e-6, atol=1e-7)
        for key, total in sums.items():
            total += kept[key].double()
    for key, total in sums.items():
        value = exact[key].double()
        ulp = torch.exp2(value.abs().log2().floor() - 7)
        assert bool(((total / seeds - value).abs() <= 5 * ulp / 2 / math.sqrt(seeds)).all()), key


def test_random_bits_depend_on_seed_and_parameter() -> None:
    def kept(*, seed: int, steps: int = 1) -> list[Tensor]:
        parameters = {name: nn.Parameter(torch.zeros(500)) for name in ("a", "b")}
        optimizer = streaming(parameters, moments=BF16, sub_group_parameters=10**6, seed=seed)
        for _ in range(steps):
            for one in parameters.values():
                one.grad = torch.linspace(0.1, 1, 500)
            optimizer.step()
        return [
            optimizer.offloaded.parameter_state_tensors(name)["exp_avg_sq"].clone() for name in parameters
        ]

    assert all(map(torch.equal, kept(seed=1), kept(seed=1)))
    assert not torch.equal(kept(seed=1)[1], kept(seed=2)[1])
    alike = kept(seed=1)
    assert not torch.equal(alike[0], alike[1])
