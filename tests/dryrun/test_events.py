"""The highest moment of a sequence of allocations."""

from fullshard.dryrun.events import AllocateEvent, FreeEvent, compute_peak_moment, live_block_sizes_after

EVENTS = [
    AllocateEvent(1, 10),
    AllocateEvent(2, 20),
    FreeEvent(1),
    AllocateEvent(3, 5),
    FreeEvent(2),
    FreeEvent(3),
]


def test_the_highest_moment_is_the_first_with_the_most_bytes():
    peak = compute_peak_moment(EVENTS)
    assert (peak.event_count, peak.live_bytes, peak.live) == (2, 30, {1: 10, 2: 20})
    assert compute_peak_moment([*EVENTS, AllocateEvent(4, 30)]).event_count == 2


def test_what_was_there_before_counts():
    peak = compute_peak_moment(EVENTS, start=3)
    assert (peak.event_count, peak.live) == (4, {2: 20, 3: 5})
    assert compute_peak_moment(EVENTS, start=3, end=3).live == {2: 20}
    assert compute_peak_moment(EVENTS, start=len(EVENTS)).live_bytes == 0


def test_what_is_freed_is_gone():
    assert live_block_sizes_after(EVENTS) == {}
    assert live_block_sizes_after(EVENTS[:4]) == {2: 20, 3: 5}
