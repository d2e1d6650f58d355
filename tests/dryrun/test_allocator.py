"""The allocator's laws, and cases that its rules settle by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.dryrun.allocator import (
    AllocatorPeak,
    new_segment_bytes,
    rounded_block_bytes,
    simulate_allocator,
)
from fullshard.dryrun.events import AllocateEvent, Event, FreeEvent, compute_peak_moment

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB))


@st.composite
def sequences(draw: st.DrawFn, streams: int = 3) -> list[Event]:
    """Allocations on some streams; each block is freed once, or never."""
    events: list[Event] = []
    alive: list[int] = []
    for block in range(draw(st.integers(1, 40))):
        events.append(AllocateEvent(block, draw(SIZES), stream=draw(st.integers(0, streams - 1))))
        alive.append(block)
        for _ in range(draw(st.integers(0, 2))):
            if alive:
                events.append(FreeEvent(alive.pop(draw(st.integers(0, len(alive) - 1)))))
    return events


def allocations(*sizes: int, stream: int = 0) -> list[Event]:
    return [AllocateEvent(block, size, stream) for block, size in enumerate(sizes)]


@given(sequences())
def test_it_holds_what_it_gives_out_and_gives_out_what_is_asked(events):
    held = simulate_allocator(events)
    assert held.reserved >= held.allocated >= compute_peak_moment(events).live_bytes
    assert held.reserved % (2 * MIB) == 0
    assert held.allocated % 512 == 0


@given(sequences())
def test_when_all_is_freed_each_request_fits_again(events):
    """Whatever was split is joined: the segments stand there as the device gave them."""
    freed = {event.block for event in events if isinstance(event, FreeEvent)}
    asked = [event for event in events if isinstance(event, AllocateEvent)]
    all_freed = [*events, *(FreeEvent(event.block) for event in asked if event.block not in freed)]
    held = simulate_allocator(all_freed)
    for event in asked:
        assert simulate_allocator([*all_freed, AllocateEvent(-1, event.size, event.stream)]) == held


@given(sequences())
def test_streams_share_nothing(events):
    streams = {e.block: e.stream for e in events if isinstance(e, AllocateEvent)}
    apart = [
        simulate_allocator([e for e in events if streams[e.block] == stream]).reserved for stream in range(3)
    ]
    assert simulate_allocator(events).reserved == sum(apart)


@given(SIZES)
def test_one_request_is_one_segment(size):
    assert simulate_allocator(allocations(size)).reserved == new_segment_bytes(rounded_block_bytes(size))


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_requests_are_rounded_to_blocks_and_segments(size, block, segment):
    assert (rounded_block_bytes(size), new_segment_bytes(rounded_block_bytes(size))) == (block, segment)


def test_a_segment_is_filled_before_the_next():
    assert simulate_allocator(allocations(*[MIB] * 4)) == AllocatorPeak(4 * MIB, 4 * MIB)
    assert simulate_allocator(allocations(*[5 * MIB] * 4)) == AllocatorPeak(20 * MIB, 20 * MIB)
    assert simulate_allocator(allocations(*[5 * MIB] * 5)) == AllocatorPeak(25 * MIB, 40 * MIB)


def test_a_freed_block_is_used_again():
    assert simulate_allocator(
        [*allocations(30 * MIB), FreeEvent(0), AllocateEvent(1, 30 * MIB)]
    ) == AllocatorPeak(30 * MIB, 30 * MIB)
    # Not for another stream, nor a small one for a large request.
    assert (
        simulate_allocator([*allocations(30 * MIB), FreeEvent(0), AllocateEvent(1, 30 * MIB, 1)]).reserved
        == 60 * MIB
    )
    assert (
        simulate_allocator([*allocations(MIB), FreeEvent(0), AllocateEvent(1, 2 * MIB)]).reserved == 22 * MIB
    )


def test_freed_neighbours_become_one_block():
    """Three of 10 MiB, split off a block of 30: 30 fits again when all are free, in any order."""
    whole = [*allocations(30 * MIB), FreeEvent(0)]
    thirds = [AllocateEvent(block, 10 * MIB) for block in (1, 2, 3)]
    for order in [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)]:
        freed = [FreeEvent(block) for block in order]
        assert simulate_allocator([*whole, *thirds, *freed, AllocateEvent(4, 30 * MIB)]).reserved == 30 * MIB
    assert (
        simulate_allocator([*whole, *thirds, FreeEvent(1), FreeEvent(3), AllocateEvent(4, 20 * MIB)]).reserved
        == 50 * MIB
    )


def test_the_smallest_block_that_fits_is_taken():
    """Of 40 and 12 MiB free, 12 goes for 12: then 40 is there for 40."""
    events = [*allocations(40 * MIB, 12 * MIB), FreeEvent(0), FreeEvent(1)]
    assert (
        simulate_allocator([*events, AllocateEvent(2, 12 * MIB), AllocateEvent(3, 40 * MIB)]).reserved
        == 52 * MIB
    )


def test_a_large_block_is_given_whole_where_at_most_one_mebibyte_is_left():
    events = [*allocations(30 * MIB), FreeEvent(0)]
    whole = simulate_allocator([*events, AllocateEvent(1, 29 * MIB), AllocateEvent(2, 30 * MIB)])
    split = simulate_allocator([*events, AllocateEvent(1, 29 * MIB - 512), AllocateEvent(2, 30 * MIB)])
    assert whole == AllocatorPeak(60 * MIB, 60 * MIB)
    assert split == AllocatorPeak(59 * MIB - 512, 60 * MIB)


def test_fragments_make_it_hold_more_than_is_in_use():
    """Every other one of eight is freed: 40 MiB are free, and none of 11 fits."""
    eight = [*allocations(80 * MIB), FreeEvent(0), *(AllocateEvent(block, 10 * MIB) for block in range(1, 9))]
    freed = [FreeEvent(block) for block in range(1, 9, 2)]
    assert simulate_allocator([*eight, *freed, AllocateEvent(9, 11 * MIB)]) == AllocatorPeak(
        80 * MIB, 92 * MIB
    )
