"""Saved activations on the host: host memory and duration of their copies.

[Note: activations on the host]
See [Note: moving activations] in `sharding.activations`. Copies out are issued when a block's forward ends;
computing waits for them at the end of the next such block's forward. Copies back are issued when a block's
backward begins, for the block before, where computing waits for them. So a block's copies are free as long as
they fit beside the computing of one period of blocks:

    exposed = max(0, bytes / host rate - computing of one period)        each way, each block

They share the host link with the copies of an offload target, in order of issue.

Host memory holds the activations of one microbatch for all blocks except the last. Torch allocates pinned
memory in powers of two, so each storage is rounded up to one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fullshard.planner.offload import host_copy_rate
from fullshard.planner.unit_costs import ticks
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import Phase
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import ActivationTerms


class Moved(NamedTuple):
    """Copies of activations that begin in a phase."""

    out: int  # ticks of copies to the host
    back: int  # ticks of copies from the host
    waits: bool  # the phase waits for the copies that began before


def moved_of(phases: Sequence[Phase], plan: Plan, *, hardware: Hardware) -> tuple[Moved, ...]:
    """Returns the copies of each phase, if any has one. Raises PlanError if the copy rate is not known."""
    if not moves(phases):
        return ()
    each = host_copy_rate(hardware, 'recompute.mode = "offload"') * plan.tensor_parallel

    def of(phase: Phase) -> Moved:
        out, back = (sum(line.at(plan.microbatch) for line in lines) for lines in (phase.out, phase.back))
        return Moved(ticks(out / each), ticks(back / each), phase.waits)

    return tuple(map(of, phases))


def moves(phases: Sequence[Phase]) -> bool:
    """Returns whether any of `phases` copies activations to or from the host."""
    return any(phase.out or phase.back for phase in phases)


def activation_terms(
    plan: Plan, phases: Sequence[Phase], *, turns: Sequence[int], hardware: Hardware
) -> ActivationTerms:
    """Returns the host bytes and copy seconds of one rank. `turns`: times that each phase runs per
    microbatch.
    """
    held = copied = 0
    for phase, times in zip(phases, turns, strict=True):
        for line in phase.out:
            size = round(line.at(plan.microbatch) / plan.tensor_parallel)
            held += times * (1 << max(0, size - 1).bit_length())
            copied += times * size
    copied *= plan.accumulation
    rate = hardware.host_bytes_per_second
    return ActivationTerms(
        host_bytes=held,
        copied_bytes=copied,
        copy_seconds=2 * copied / rate if rate else 0.0,
        host_capacity_bytes=plan.run.offload.host_bytes or hardware.host_memory_bytes,
    )
