"""The allocator's laws, and cases that its rules settle by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.dryrun.allocator import LiveBlock, rounded, segment_bytes, simulate
from fullshard.dryrun.events import Allocate, Event, Free, highest

KIB, MIB = 1 << 10, 1 << 20
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 40 * MIB))


@st.composite
def sequences(draw: st.DrawFn, streams: int = 3) -> list[Event]:
    """Allocations on some streams; each block is freed once, or never."""
    events: list[Event] = []
    alive: list[int] = []
    for block in range(draw(st.integers(1, 40))):
        events.append(Allocate(block, draw(SIZES), stream=draw(st.integers(0, streams - 1))))
        alive.append(block)
        for _ in range(draw(st.integers(0, 2))):
            if alive:
                events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
    return events


def allocations(*sizes: int, stream: int = 0) -> list[Event]:
    return [Allocate(block, size, stream) for block, size in enumerate(sizes)]


@given(sequences())
def test_it_holds_what_it_gives_out_and_gives_out_what_is_asked(events):
    held = simulate(events)
    assert held.reserved >= held.allocated >= highest(events).bytes
    assert held.reserved % (2 * MIB) == 0
    assert held.allocated % 512 == 0


@given(sequences())
def test_when_all_is_freed_each_request_fits_again(events):
    """Whatever was split is joined: the segments stand there as the device gave them."""
    freed = {event.block for event in events if isinstance(event, Free)}
    asked = [event for event in events if isinstance(event, Allocate)]
    all_freed = [*events, *(Free(event.block) for event in asked if event.block not in freed)]
    held = simulate(all_freed)
    for event in asked:
        assert simulate([*all_freed, Allocate(-1, event.size, event.stream)]) == held


@given(sequences())
def test_streams_share_nothing(events):
    streams = {e.block: e.stream for e in events if isinstance(e, Allocate)}
    apart = [simulate([e for e in events if streams[e.block] == stream]).reserved for stream in range(3)]
    assert simulate(events).reserved == sum(apart)


@given(SIZES)
def test_one_request_is_one_segment(size):
    assert simulate(allocations(size)).reserved == segment_bytes(rounded(size))


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
    assert (rounded(size), segment_bytes(rounded(size))) == (block, segment)


def test_a_segment_is_filled_before_the_next():
    assert simulate(allocations(*[MIB] * 4)) == LiveBlock(4 * MIB, 4 * MIB)
    assert simulate(allocations(*[5 * MIB] * 4)) == LiveBlock(20 * MIB, 20 * MIB)
    assert simulate(allocations(*[5 * MIB] * 5)) == LiveBlock(25 * MIB, 40 * MIB)


def test_a_freed_block_is_used_again():
    assert simulate([*allocations(30 * MIB), Free(0), Allocate(1, 30 * MIB)]) == LiveBlock(30 * MIB, 30 * MIB)
    # Not for another stream, nor a small one for a large request.
    assert simulate([*allocations(30 * MIB), Free(0), Allocate(1, 30 * MIB, 1)]).reserved == 60 * MIB
    assert simulate([*allocations(MIB), Free(0), Allocate(1, 2 * MIB)]).reserved == 22 * MIB


def test_freed_neighbours_become_one_block():
    """Three of 10 MiB, split off a block of 30: 30 fits again when all are free, in any order."""
    whole = [*allocations(30 * MIB), Free(0)]
    thirds = [Allocate(block, 10 * MIB) for block in (1, 2, 3)]
    for order in [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)]:
        freed = [Free(block) for block in order]
        assert simulate([*whole, *thirds, *freed, Allocate(4, 30 * MIB)]).reserved == 30 * MIB
    assert simulate([*whole, *thirds, Free(1), Free(3), Allocate(4, 20 * MIB)]).reserved == 50 * MIB


def test_the_smallest_block_that_fits_is_taken():
    """Of 40 and 12 MiB free, 12 goes for 12: then 40 is there for 40."""
    events = [*allocations(40 * MIB, 12 * MIB), Free(0), Free(1)]
    assert simulate([*events, Allocate(2, 12 * MIB), Allocate(3, 40 * MIB)]).reserved == 52 * MIB


def test_a_large_block_is_given_whole_where_at_most_one_mebibyte_is_left():
    events = [*allocations(30 * MIB), Free(0)]
    whole = simulate([*events, Allocate(1, 29 * MIB), Allocate(2, 30 * MIB)])
    split = simulate([*events, Allocate(1, 29 * MIB - 512), Allocate(2, 30 * MIB)])
    assert whole == LiveBlock(60 * MIB, 60 * MIB)
    assert split == LiveBlock(59 * MIB - 512, 60 * MIB)


def test_fragments_make_it_hold_more_than_is_in_use():
    """Every other one of eight is freed: 40 MiB are free, and none of 11 fits."""
    eight = [*allocations(80 * MIB), Free(0), *(Allocate(block, 10 * MIB) for block in range(1, 9))]
    freed = [Free(block) for block in range(1, 9, 2)]
    assert simulate([*eight, *freed, Allocate(9, 11 * MIB)]) == LiveBlock(80 * MIB, 92 * MIB)
