"""The engine's order on a few units, with every tick worked out by hand."""

from dataclasses import replace

import pytest

from fullshard.planner.predict.fsdp_time import StreamClocks, UnitCost
from fullshard.planner.predict.phases import MicrobatchSchedule, ScheduledPhase, ScheduleSegment
from fullshard.planner.predict.simulate import EventOrderSettings, MicrobatchWork, StepSimulation
from fullshard.spec.model import Event

FREE = ("copy_in", "cast_gradient", "settle_again", "add_partial", "all_reduce")
TRUE = ("has_parameters", "is_trained", "is_sharded", "reshards", "gathers_in_backward")
FALSE = ("is_replicated", "shares_wires")
# Gathers and scatters take 10 ticks, copies 1.
UNIT = UnitCost(
    **dict.fromkeys(TRUE, True),
    **dict.fromkeys(FALSE, False),
    **dict.fromkeys((*FREE, "keep_unsynced", "keep_again"), 0),
    **dict.fromkeys(("gather", "scatter"), 10),
    **dict.fromkeys(("copy_out", "pack"), 1),
)
Act = tuple[Event, int]


def played(cost: UnitCost, *acts: Act, computing: int, last: int = 10) -> StreamClocks:
    """The streams after `acts` of four units, of which the last takes `last` to gather.

    Each `pre_*` is followed by `computing` ticks, and the host takes none.
    """
    units = 4
    steps = tuple(ScheduledPhase(event, unit, unit, i) for i, (event, unit) in enumerate(acts))
    order = tuple((unit - 1,) for unit in range(units))
    program = MicrobatchSchedule((ScheduleSegment(steps),), (1,) * len(steps), tuple(range(units)), order)
    work = MicrobatchWork(
        program, tuple((computing if event.startswith("pre") else 0, 0) for event, _ in acts)
    )
    streams = StreamClocks(serial=False)
    policy = EventOrderSettings(keeps=False, syncs=True, act=0)
    costs = (*[cost] * (units - 1), replace(cost, gather=last))
    StepSimulation(streams, costs, policy).simulate_step(work, accumulating=work, accumulation=1)
    return streams


def forward(*units: int) -> list[Act]:
    return [act for unit in units for act in (("pre_forward", unit), ("post_forward", unit))]


def backward(*units: int) -> list[Act]:
    return [act for unit in units for act in (("pre_backward", unit), ("post_backward", unit))]


def test_forward_gathers_the_next_unit_while_one_computes():
    """Gathers at 0, 10 and 20; each is copied out and computed on before the next is there."""
    streams = played(UNIT, *forward(0, 1, 2), computing=3)
    assert streams.compute == 30 + 1 + 3
    assert streams.waited_all_gather == 10 + (20 - 14) + (30 - 24)


def test_forward_has_at_most_two_gather_buffers():
    """The last of four gathers waits for the second's copy-out, which is done at 2 + 1 + 20 + 1."""
    streams = played(replace(UNIT, gather=2), *forward(0, 1, 2, 3), computing=20, last=60)
    assert streams.compute == 24 + 60 + 1 + 20


def test_backward_gathers_next_unit_after_copy_out():
    """One is gathered from 0 to 10 and copied out at 11; from there on the other is."""
    streams = played(replace(UNIT, is_trained=False), *backward(1, 0), computing=3)
    assert streams.compute == 11 + 10 + 1 + 3


def test_one_reduce_scatter_is_waited_for_before_the_next_gradients_are_packed():
    """Computed at 3, packed at 4, sent until 14; the second, computed at 7, is packed at 15."""
    free = replace(UNIT, gather=0, copy_out=0)
    streams = played(free, *backward(1, 0), ("end_backward", -1), computing=3)
    assert streams.compute == 15 + 10
    assert streams.waited_reduce_scatter == (14 - 7) + (25 - 15)


def test_an_all_reduce_passes_beside_the_next_reduce_scatter_unless_it_shares_its_wires():
    free = replace(UNIT, gather=0, copy_out=0, is_replicated=True, all_reduce=10)
    apart = played(free, *backward(1, 0), ("end_backward", -1), computing=3)
    assert apart.compute == 25 + 10
    same = played(replace(free, shares_wires=True), *backward(1, 0), ("end_backward", -1), computing=3)
    assert same.compute == 4 + 10 + 10 + 10 + 10


@pytest.mark.parametrize("issue", [0, 4, 11])
def test_waits_of_the_host_expose_the_launches_after_them(issue: int):
    """The host launches while the device computes, except what comes after it has waited for the device."""
    ends: list[int] = []
    for waits in (0, 1, 3):
        streams = StreamClocks(serial=False)
        streams.run_kernels_between_waits(8, issue=0, waits=0)
        streams.run_kernels_between_waits(8, issue=issue, waits=waits)
        assert streams.compute - streams.idle == 16
        ends.append(streams.compute)
    assert ends == sorted(ends)
    assert (ends[0] == ends[-1]) == (issue <= 8)
