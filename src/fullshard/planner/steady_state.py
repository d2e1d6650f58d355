"""Detection of repeated turns in a simulation, so that the remaining ones can be added at once.

[Note: skipping]
A step consists of similar turns: blocks in forward and in backward, and microbatches. The effect of a turn on
the clocks depends only on their differences. If the differences after a turn equal those some turns ago, all
further turns except the last few take as long, and are added at once. Clocks are whole numbers, so this is
exact. Three kinds of clock may differ, because no later event can see them:

- reduction clocks that are behind the compute stream's, since every later reduction waits for that;
- clocks that no event of the turn has touched;
- the host's clock, as long as the host is ahead and stays ahead.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fullshard.planner.offload_streams import InBuffers
from fullshard.planner.streams import Streams

NEVER = 1 << 62
REDUCE_CLOCKS = (
    "reduce",
    "all_reduce",
    "reduce_input_free",
    "host_out",
    "last_gradient_out",
    "previous_gradient_out",
    "host_sum",
    "activation_copy",
)
GATHER_CLOCKS = (
    "copy_in",
    "gather",
    "network",
    "hpz_network",
    "copied_out",
    "disk",
    "updating",
    "host_in",
    "fetched",
)
_LONGEST_CYCLE = 4
_SUMS = (
    "computed",
    "copied",
    "waited_all_gather",
    "waited_reduce_scatter",
    "waited_all_reduce",
    "waited_host",
    "idle",
    "sent",
    "shards_read",
)


class StreamSnapshot(NamedTuple):
    """State at the end of a turn."""

    compute: int  # clock of the compute stream
    host: int  # clock of the host
    gathers: tuple[int, ...]  # clocks named in GATHER_CLOCKS
    reduces: tuple[int, ...]  # clocks named in REDUCE_CLOCKS
    sums: tuple[int, ...]  # accumulated durations
    pending: dict[int, int]  # units in flight, and when they arrive
    # units in each kind of the host's buffers, the most recently used last
    buffered: tuple[tuple[int, ...], ...]
    slack: int  # the least lead of the host over the turn


class _Cycle(NamedTuple):
    """Turns that lead from one state to an equal one."""

    turns: int  # number of turns
    length: int  # ticks
    before: StreamSnapshot  # the state before them
    behind: int = 0  # ticks of its lead that the host loses per cycle
    most: int = NEVER  # number of cycles for which it stays ahead


def raise_to_compute(streams: Streams, clocks: Sequence[str]) -> None:
    """Raises clocks that are behind the compute stream's to it.

    See [Note: skipping] for when this changes nothing.
    """
    for clock in clocks:
        setattr(streams, clock, max(getattr(streams, clock), streams.compute))


def snapshot(streams: Streams, pending: Mapping[int, int], *, in_buffers: InBuffers) -> StreamSnapshot:
    """Returns the current state."""
    return StreamSnapshot(
        streams.compute,
        streams.host,
        tuple(getattr(streams, clock) for clock in GATHER_CLOCKS),
        tuple(getattr(streams, clock) for clock in REDUCE_CLOCKS),
        tuple(getattr(streams, name) for name in _SUMS),
        dict(pending),
        tuple(tuple(units) for units in in_buffers.kinds),
        streams.slack,
    )


def skip_repeated(  # signature: all that a turn changes
    streams: Streams,
    marks: Sequence[StreamSnapshot],
    *,
    left: int,
    stride: int,
    pending: dict[int, int],
    in_buffers: InBuffers,
) -> int:
    """Adds those of the `left` turns that are known to repeat, to `streams`, `pending` and `in_buffers`.

    Returns the number of turns added.

    marks: the state after each turn so far.
    stride: number of units by which the next turn moves on.
    """
    for turns in range(1, min(_LONGEST_CYCLE, len(marks) - 1, left) + 1):
        cycle = _cycle(marks, turns, stride=stride)
        if cycle is not None:
            break
    else:
        return 0
    times = min(left // cycle.turns, cycle.most)
    before, now = cycle.before, marks[-1]
    streams.slack = min(streams.slack, streams.slack - times * cycle.behind)
    for names, old, new in (
        (GATHER_CLOCKS, before.gathers, now.gathers),
        (REDUCE_CLOCKS, before.reduces, now.reduces),
        (_SUMS, before.sums, now.sums),
        (("compute", "host"), before[:2], now[:2]),
    ):
        for name, one, other in zip(names, old, new, strict=True):
            setattr(streams, name, other + times * (other - one))
    shift, grown = times * stride * cycle.turns, times * cycle.length
    pending.clear()
    pending.update({unit + shift: at + grown if at else 0 for unit, at in now.pending.items()})
    for units, old, new in zip(in_buffers.kinds, before.buffered, now.buffered, strict=True):
        units[:] = new if old == new else (unit + shift for unit in new)
    return times * cycle.turns


def _cycle(marks: Sequence[StreamSnapshot], turns: int, *, stride: int) -> _Cycle | None:
    """Returns the last `turns` turns as a cycle if they led back to the state before them, else None."""
    before, now = marks[-1 - turns], marks[-1]
    length = now.compute - before.compute
    if any(new - old not in (0, length) for old, new in zip(before.gathers, now.gathers, strict=True)):
        return None
    if any(new - old != length for old, new in zip(before.reduces, now.reduces, strict=True)):
        return None
    shift = stride * turns
    pending = {unit + shift: at + length if at else 0 for unit, at in before.pending.items()}
    kinds = zip(before.buffered, now.buffered, strict=True)
    follows = all(new in (old, tuple(unit + shift for unit in old)) for old, new in kinds)
    if now.pending != pending or not follows:
        return None
    behind = (now.host - before.host) - length
    if behind == 0:
        return _Cycle(turns, length, before)
    slack = min(mark.slack for mark in marks[len(marks) - turns :])
    if slack < 0:
        return None
    most = slack // behind if behind > 0 else NEVER
    return _Cycle(turns, length, before, behind=behind, most=most) if most else None
