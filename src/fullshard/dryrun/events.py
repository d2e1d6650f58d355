"""What an allocator is asked for, in order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocate:
    """`block` (a number that no other block has) of `size` bytes, wanted by the work of `stream`."""

    block: int
    size: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """`block` is not used any more."""

    block: int


Event = Allocate | Free


@dataclass(frozen=True)
class Highest:
    """The first moment with the most bytes alive: after how many events, and the blocks alive (bytes)."""

    after: int
    live: dict[int, int]

    @property
    def bytes(self) -> int:
        return sum(self.live.values())


def highest(events: Sequence[Event], *, start: int = 0, end: int | None = None) -> Highest:
    """The highest moment between the events `start` and `end`; all of the events before are taken in."""
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
    """The blocks that are alive after all of `events`, with their bytes."""
    live: dict[int, int] = {}
    for event in events:
        if isinstance(event, Allocate):
            live[event.block] = event.size
        else:
            del live[event.block]
    return live
