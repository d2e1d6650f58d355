"""fitted(hardware, steps): the hardware under which predicted steps come nearest to measured ones.

[Note: fitting by whole steps]
A rate measured alone is not the rate that an operation gets in a step: caches are full of other things, fresh
memory must be mapped, the interpreter runs between two launches. So a few whole steps are measured too, and
what was measured alone is scaled by as few factors as kinds of work, such that

    sum over steps of log(predicted / measured)² + PRIOR · sum over factors of log(factor)²

is least. The second part keeps a factor at 1 that no step says anything of.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fullshard.planner.step_time import step_seconds
from fullshard.spec.hardware import CollectiveRate, Hardware, Link, slower
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import DeviceType, Plan

PRIOR = 0.01
# Host times measured alone may be nothing; what is nothing no factor changes.
_LEAST_LAUNCH, _LEAST_UNIT = 1e-6, 2e-5
# What is first supposed that ranks wait for each other; on GPUs they are queued long before.
_FIRST_WAIT: dict[DeviceType, float] = {"cpu": 5e-4, "cuda": 1e-6}
_FIRST_STEP, _LAST_STEP = math.log(1.5), math.log(1.02)
_BOUND = math.log(16)


class StepSample(NamedTuple):
    """A step that was measured. Seconds."""

    spec: ModelSpec
    plan: Plan
    seconds: float


class RateFactors(NamedTuple):
    """By what each kind of work takes longer in a step than alone. `watched`: how much longer the host takes
    to launch what selective recompute watches, in launches; `waiting`: for each other, over a first guess.
    """

    compute: float = 1.0
    memory: float = 1.0
    optimizer: float = 1.0
    launch: float = 1.0
    unit: float = 1.0
    collective: float = 1.0
    watched: float = 1.0
    waiting: float = 1.0


class Fit(NamedTuple):
    """`errors`: predicted over measured, less 1, of each step, after the fit; `before`, without it."""

    hardware: Hardware
    factors: RateFactors
    errors: tuple[float, ...]
    errors_before: tuple[float, ...]


def fitted(hardware: Hardware, steps: Sequence[StepSample]) -> Fit:
    """See [Note: fitting by whole steps]. Coordinate search from what was measured alone."""

    def cost(point: Sequence[float]) -> float:
        scaled_by = scaled(hardware, RateFactors(*map(math.exp, point)))
        errors = sum(math.log1p(error) ** 2 for error in _errors(scaled_by, steps))
        return errors + PRIOR * sum(value**2 for value in point)

    best = _descend(cost, [0.0] * len(RateFactors._fields)) if steps else [0.0] * len(RateFactors._fields)
    factors = RateFactors(*map(math.exp, best))
    found = scaled(hardware, factors)
    return Fit(found, factors, tuple(_errors(found, steps)), tuple(_errors(hardware, steps)))


def scaled(hardware: Hardware, factors: RateFactors) -> Hardware:
    """The hardware on which each kind of work takes so much longer."""
    rates = hardware.rates
    launch = max(rates.launch_seconds, _LEAST_LAUNCH) * factors.launch
    updated = rates.model_copy(
        update={
            "matmul": {dtype: slower(curve, factors.compute) for dtype, curve in rates.matmul.items()},
            "attention": {d: slower(curve, factors.compute) for d, curve in rates.attention.items()},
            "attention_backward": {
                d: slower(curve, factors.compute) for d, curve in rates.attention_backward.items()
            },
            "memory": slower(rates.memory, factors.memory),
            "optimizer": slower(rates.optimizer, factors.optimizer),
            "launch_seconds": launch,
            "watched_seconds": launch * factors.watched,
            "unit_seconds": max(rates.unit_seconds, _LEAST_UNIT) * factors.unit,
        }
    )
    across = None if hardware.across is None else _slower_link(hardware, hardware.across, factors=factors)
    within = _slower_link(hardware, hardware.within, factors=factors)
    return hardware.model_copy(update={"rates": updated, "within": within, "across": across})


def _errors(hardware: Hardware, steps: Sequence[StepSample]) -> list[float]:
    return [step_seconds(s.spec, s.plan, hardware).total / s.seconds - 1 for s in steps]


def _slower_link(hardware: Hardware, link: Link, *, factors: RateFactors) -> Link:
    wait = {"wait_seconds": _FIRST_WAIT[hardware.device] * factors.waiting}

    def in_a_step(rate: CollectiveRate) -> CollectiveRate:
        return rate.slower(factors.collective).model_copy(update=wait)

    return link.model_copy(
        update={
            "all_gather": in_a_step(link.all_gather),
            "reduce_scatter": in_a_step(link.reduce_scatter),
            "all_reduce": in_a_step(link.all_reduce),
        }
    )


def _descend(cost: Callable[[Sequence[float]], float], start: list[float]) -> list[float]:
    """Along one coordinate after the other, in steps that shrink where none helps."""
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
