"""Warns of units whose size makes sharding inefficient."""

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from fullshard.quantities import format_bytes
from fullshard.sharding.units import Unit
from fullshard.spec.plan import ITEMSIZE, Plan

# A ring of N ranks gathers in N - 1 hops. Each hop takes a latency, and the time of one rank's share of the
# bytes (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
# With 5 µs per hop and the 50 GB/s of a 400 Gb/s link, latency is half of the time at 5 µs · 50 GB/s = 250 kB
# per rank, and more than half below.
LEAST_BYTES_A_RANK = 256 * 1024
# Below this share, most of the model stays sharded while a unit is gathered.
LARGEST_SHARE = 0.5
# Smaller models are trials, and train with any units.
LEAST_MODEL_BYTES = 64 * 1024**2
# A few small units cost only a few latencies per step.
FEW_UNITS = 8


class UnitSizeWarning(UserWarning):
    """Warning of units that are too small to be worth their collectives, or too large to save memory."""


def warn_of_unit_sizes(units: Sequence[Unit], plan: Plan, *, stacklevel: int) -> None:
    """Issues the messages of `unit_size_messages` as UnitSizeWarnings, on rank 0 only."""
    if dist.get_rank() == 0:
        for finding in unit_size_messages(units, plan):
            warnings.warn(finding, UnitSizeWarning, stacklevel=stacklevel + 1)


def unit_size_messages(units: Sequence[Unit], plan: Plan) -> list[str]:
    """Returns messages about units whose size is inefficient under `plan`; none for a model below 64 MiB.

    Too small: each rank gives less than 256 KiB to the all-gather, for most units and for at least 8. Too
    large: a unit is more than half of the model, although units are resharded after use.
    """
    gathered = {unit: _gathered_unit_bytes(unit, plan) for unit in units if unit.parameters}
    if sum(gathered.values()) < LEAST_MODEL_BYTES:
        return []
    return [*_small_units_messages(gathered, plan), *_large_unit_messages(gathered, plan)]


def _small_units_messages(gathered: dict[Unit, int], plan: Plan) -> list[str]:
    degrees = {unit: unit.settings(plan).shard_degree for unit in gathered}
    shares = {unit: gathered[unit] / degree for unit, degree in degrees.items() if degree > 1}
    small = {unit: share for unit, share in shares.items() if share < LEAST_BYTES_A_RANK}
    if len(small) < FEW_UNITS or len(small) <= len(shares) / 2:
        return []
    least = min(small, key=lambda unit: small[unit])
    return [
        f"{len(small)} of {len(shares)} units are small: each of {plan.shard_degree} ranks gives less than "
        f"{format_bytes(LEAST_BYTES_A_RANK)} to an all-gather ({least.name}, the smallest: "
        f"{format_bytes(small[least])}), so that latency outweighs bytes. Larger units (sharding.units) or "
        'fewer ranks to shard over (strategy = "hybrid_shard" with a shard_degree) would communicate faster.'
    ]


def _large_unit_messages(gathered: dict[Unit, int], plan: Plan) -> list[str]:
    total = sum(gathered.values())
    return [
        f"the unit {unit.name} is {format_bytes(count)} of the model's {format_bytes(total)} "
        f"({count / total:.0%}), and every rank holds it whole while it computes: sharding over "
        f"{plan.shard_degree} ranks saves little of the peak. Smaller units would save more: "
        'sharding.units.policy = "size", or "names".'
        for unit, count in gathered.items()
        if count > LARGEST_SHARE * total and plan.shard_degree > 1 and plan.reshard_after_forward is not False
    ]


def _gathered_unit_bytes(unit: Unit, plan: Plan) -> int:
    itemsize = ITEMSIZE[unit.settings(plan).precision.param]
    return sum(
        parameter.numel() * (itemsize if parameter.is_floating_point() else parameter.itemsize)
        for parameter in unit.parameters.values()
    )
