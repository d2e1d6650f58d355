"""The highest moment of a sequence of allocations."""

from fullshard.dryrun.events import Allocate, Free, highest, live_after

EVENTS = [Allocate(1, 10), Allocate(2, 20), Free(1), Allocate(3, 5), Free(2), Free(3)]


def test_the_highest_moment_is_the_first_with_the_most_bytes():
    peak = highest(EVENTS)
    assert (peak.after, peak.bytes, peak.live) == (2, 30, {1: 10, 2: 20})
    assert highest([*EVENTS, Allocate(4, 30)]).after == 2


def test_what_was_there_before_counts():
    peak = highest(EVENTS, start=3)
    assert (peak.after, peak.live) == (4, {2: 20, 3: 5})
    assert highest(EVENTS, start=3, end=3).live == {2: 20}
    assert highest(EVENTS, start=len(EVENTS)).bytes == 0


def test_what_is_freed_is_gone():
    assert live_after(EVENTS) == {}
    assert live_after(EVENTS[:4]) == {2: 20, 3: 5}
