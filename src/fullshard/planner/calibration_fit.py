"""Fit of the hardware's rates to measured steps.

[Note: fitting by whole steps]
A rate measured alone differs from the rate of the same operation in a step: caches hold other data, fresh
memory must be mapped, and the interpreter runs between two launches. So a few whole steps are measured too.
The rates of each kind of work are divided by one factor. The factors minimise

    sum over steps of log(predicted / measured)² + PRIOR · sum over factors of log(factor)²

The second sum keeps a factor at 1 if no step depends on that factor.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fullshard.planner.step_time import predict_terms
from fullshard.spec.hardware import CollectiveRate, Hardware, Link, curve_with_slowdown
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType, Plan

PRIOR = 0.01
# Host times measured alone may be 0, which no factor can change. A launch takes several times as long in a
# model as in a loop over one operation: 6 to 9 us on the core of an EPYC.
_LEAST_LAUNCH, _LEAST_UNIT = 5e-6, 2e-5
# First guess of the time that ranks wait for each other; on GPUs collectives are queued long before.
_FIRST_WAIT: dict[DeviceType, float] = {"cpu": 5e-4, "cuda": 1e-6}
# First guess of the host's time to exchange tensors beside the collective, and to wait for the other ranks.
_FIRST_EXCHANGE: dict[DeviceType, float] = {"cpu": 2e-4, "cuda": 5e-5}
_WHOLE = ("fp32", "tf32")
_FIRST_STEP, _LAST_STEP = math.log(1.5), math.log(1.02)
_BOUND = math.log(16)


class StepSample(NamedTuple):
    """A measured step: its model, its plan, and its duration in `seconds`."""

    spec: ModelSpec
    plan: Plan
    seconds: float


class RateSlowdowns(NamedTuple):
    """Factors by which each kind of work takes longer in a step than measured alone."""

    compute: float = 1.0
    half: float = 1.0  # compute in half precision and in fp8, in addition
    memory: float = 1.0
    optimizer: float = 1.0
    launch: float = 1.0
    unit: float = 1.0
    collective: float = 1.0
    watched: float = 1.0  # extra host time per launch watched by selective recompute, in launches
    recomputed: float = 1.0  # extra host time per launch where blocks are recomputed, in half launches
    exchange: float = 1.0  # extra host time of exchanges of ranks that share work, relative to a first guess
    waiting: float = 1.0  # time that ranks wait for each other, relative to a first guess


class FitResult(NamedTuple):
    """Result of a fit of rates to measured steps."""

    hardware: Hardware  # the scaled hardware
    factors: RateSlowdowns  # factors by which its rates were slowed down
    errors: tuple[float, ...]  # for each step, predicted / measured - 1 on the scaled hardware


def fit_rates(hardware: Hardware, steps: Sequence[StepSample]) -> FitResult:
    """Slows down the rates of `hardware` to match measured `steps`. See [Note: fitting by whole steps]."""

    def fit_error(point: Sequence[float]) -> float:
        scaled_by = slow_down_hardware(hardware, RateSlowdowns(*map(math.exp, point)))
        errors = sum(math.log1p(error) ** 2 for error in _relative_errors(scaled_by, steps))
        return errors + PRIOR * sum(value**2 for value in point)

    factors = RateSlowdowns(*map(math.exp, _coordinate_search(fit_error, [0.0] * len(RateSlowdowns._fields))))
    found = slow_down_hardware(hardware, factors)
    return FitResult(found, factors, tuple(_relative_errors(found, steps)))


def slow_down_hardware(hardware: Hardware, factors: RateSlowdowns) -> Hardware:
    """Returns `hardware` with each kind of work slowed down by its factor."""
    rates = hardware.rates
    launch = max(rates.launch_seconds, _LEAST_LAUNCH) * factors.launch

    def slowdown(dtype: str) -> float:
        return factors.compute * (1.0 if dtype in _WHOLE else factors.half)

    computing = {
        kind: {dtype: curve_with_slowdown(c, slowdown(dtype)) for dtype, c in getattr(rates, kind).items()}
        for kind in ("matmul", "attention", "attention_backward")
    }
    operands = {dtype: rate / slowdown(dtype) for dtype, rate in rates.matmul_operands.items()}
    updated = rates.model_copy(
        update={
            **computing,
            "matmul_operands": operands,
            "memory": curve_with_slowdown(rates.memory, factors.memory),
            "optimizer": curve_with_slowdown(rates.optimizer, factors.optimizer),
            "launch_seconds": launch,
            "watched_seconds": launch * factors.watched,
            "recomputed_seconds": launch / 2 * factors.recomputed,
            "model_parallel_seconds": _FIRST_EXCHANGE[hardware.device] * factors.exchange,
            "unit_seconds": max(rates.unit_seconds, _LEAST_UNIT) * factors.unit,
        }
    )
    across = None if hardware.across is None else _slow_down_link(hardware, hardware.across, factors=factors)
    within = _slow_down_link(hardware, hardware.within, factors=factors)
    return hardware.model_copy(update={"rates": updated, "within": within, "across": across})


def _relative_errors(hardware: Hardware, steps: Sequence[StepSample]) -> list[float]:
    return [predict_terms(s.spec, s.plan, hardware).total / s.seconds - 1 for s in steps]


def _slow_down_link(hardware: Hardware, link: Link, *, factors: RateSlowdowns) -> Link:
    wait = {"wait_seconds": _FIRST_WAIT[hardware.device] * factors.waiting}

    def slow_down_collective(rate: CollectiveRate) -> CollectiveRate:
        return rate.with_slowdown(factors.collective).model_copy(update=wait)

    return link.model_copy(
        update={kind: slow_down_collective(rate) for kind, rate in link.known_rates.items()}
    )


def _coordinate_search(cost: Callable[[Sequence[float]], float], start: list[float]) -> list[float]:
    """Minimises `cost` along one coordinate at a time. The step is halved when no step of its size helps."""
    point, least, step = list(start), cost(start), _FIRST_STEP
    while step > _LAST_STEP:
        helped = False
        for at in range(len(point)):
            for way in (step, -step):
                tried = [*point]
                tried[at] = min(_BOUND, max(-_BOUND, tried[at] + way))
                reached = cost(tried)
                if reached < least:
                    point, least, helped = tried, reached, True
                    break
        step = step if helped else step / 2
    return point
