"""Saved activations on the host: what they take of it, and how long their copies are under way.

[Note: activations on the host]
See [Note: moving activations] in `sharding.activations`. Copies out are issued when a block's forward ends,
and computing waits for them at the end of the next such block's; copies back are issued when a block's
backward begins, for the block before, where computing will wait for them. So of what one block saved, both
take nothing as long as they pass beside one period of blocks:

    exposed = max(0, bytes / host rate - computing of one period)        each way, each block

They share the wires with the copies of a tier, in the order in which they are issued.

host      what all blocks but the last have saved, of one microbatch. Torch's pinned memory comes in powers of
          two, and so each storage is rounded up to one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fullshard.errors import PlanError
from fullshard.planner.unit_costs import ticks
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import Phase
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import ActivationTerms


class Moved(NamedTuple):
    """Ticks of copies to the host and from it that begin in a phase. `waits`: for those that began before."""

    out: int
    back: int
    waits: bool


def moved_of(phases: Sequence[Phase], plan: Plan, *, hardware: Hardware) -> tuple[Moved, ...]:
    """Of each phase; nothing at all where none moves anything.

    Raises PlanError where `hardware` does not say how fast copies are.
    """
    if not moves(phases):
        return ()
    rate = hardware.host_bytes_per_second
    if rate is None:
        raise PlanError(
            f"{hardware.name}: how fast its host is is not known.",
            got='recompute.mode = "offload", no host_bytes_per_second',
            fix="fullshard calibrate there, or a hardware.toml with host_bytes_per_second",
        )

    each = rate * plan.tensor_parallel

    def of(phase: Phase) -> Moved:
        out, back = (sum(line.at(plan.microbatch) for line in lines) for lines in (phase.out, phase.back))
        return Moved(ticks(out / each), ticks(back / each), phase.waits)

    return tuple(map(of, phases))


def moves(phases: Sequence[Phase]) -> bool:
    """Whether any of `phases` moves what was saved."""
    return any(phase.out or phase.back for phase in phases)


def activation_terms(
    plan: Plan, phases: Sequence[Phase], *, turns: Sequence[int], hardware: Hardware
) -> ActivationTerms:
    """What the plan's `phases`, each so many `turns` a microbatch, take of one rank's host."""
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
