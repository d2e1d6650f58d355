"""Allocation and free events, in order of execution."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocation of one block."""

    block: int  # identifies the block
    size: int  # bytes
    stream: int = 0  # number of the stream that requests it


@dataclass(frozen=True, slots=True)
class Free:
    """Release of a block."""

    block: int


Event = Allocate | Free


@dataclass(frozen=True)
class Highest:
    """First moment with the most bytes alive."""

    after: int  # number of events before it
    live: dict[int, int]  # bytes of each live block

    @property
    def bytes(self) -> int:
        return sum(self.live.values())


def highest(events: Sequence[Event], *, start: int = 0, end: int | None = None) -> Highest:
    """Returns the moment of most live bytes between events `start` and `end`. Earlier blocks count too."""
    live = live_after(events[:start])
    total = most = sum(live.values())
    after = start
    for index, event in enumerate(events[start:end], start=start + 1):
        if isinstance(event, Allocate):
            live[event.block] = event.size
            total += event.size
        else:
            total -= live.pop(event.block)
        if total > most:
            most, after = total, index
    return Highest(after, live_after(events[:after]))


def live_after(events: Iterable[Event]) -> dict[int, int]:
    """Returns the bytes of each block that is alive after all of `events`."""
    live: dict[int, int] = {}
    for event in events:
        if isinstance(event, Allocate):
            live[event.block] = event.size
        else:
            del live[event.block]
    return live
