"""Allocation and free events, in order of execution."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AllocateEvent:
    """Allocation of one block."""

    block: int  # identifies the block
    size: int  # bytes
    stream: int = 0  # number of the stream that requests it


@dataclass(frozen=True, slots=True)
class FreeEvent:
    """Release of a block."""

    block: int


Event = AllocateEvent | FreeEvent


@dataclass(frozen=True)
class PeakMoment:
    """First moment with the most bytes alive."""

    event_count: int  # events before the moment
    live: dict[int, int]  # bytes of each live block

    @property
    def live_bytes(self) -> int:
        return sum(self.live.values())


def compute_peak_moment(events: Sequence[Event], *, start: int = 0, end: int | None = None) -> PeakMoment:
    """Returns the moment of most live bytes between events `start` and `end`. Earlier blocks count too."""
    live = live_block_sizes_after(events[:start])
    total = most = sum(live.values())
    after = start
    for index, event in enumerate(events[start:end], start=start + 1):
        if isinstance(event, AllocateEvent):
            live[event.block] = event.size
            total += event.size
        else:
            total -= live.pop(event.block)
        if total > most:
            most, after = total, index
    return PeakMoment(after, live_block_sizes_after(events[:after]))


def live_block_sizes_after(events: Iterable[Event]) -> dict[int, int]:
    """Returns the bytes of each block that is alive after all of `events`."""
    live: dict[int, int] = {}
    for event in events:
        if isinstance(event, AllocateEvent):
            live[event.block] = event.size
        else:
            del live[event.block]
    return live
