"""When turns that are alike repeat themselves, so that what is left of them can be added at once.

[Note: skipping]
A step is made of turns that are alike: blocks in forward and in backward, and microbatches. What a turn does
to the clocks depends on their differences alone. So once these are after a turn what they were some turns
ago, all further turns up to the last few take as long, and are added at once. Clocks are whole numbers, which
makes this exact. Three kinds of clock may differ all the same, since no later act can see them: those of the
reduction, where they lie before the compute stream's, for which each later reduction waits; those that no act
of the turn has touched; and the host's, as long as it is ahead, and will be.
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
    """The state at the end of a turn. `pending`: the units on their way, and when they will be there;
    `buffered`: those in each kind of the host's buffers, the last used last."""

    compute: int
    host: int
    gathers: tuple[int, ...]
    reduces: tuple[int, ...]
    sums: tuple[int, ...]
    pending: dict[int, int]
    buffered: tuple[tuple[int, ...], ...]
    slack: int


class _Cycle(NamedTuple):
    """From one state to one alike: so many turns and ticks. `behind`: how much of its lead the host loses,
    and `most`: how often it can."""

    turns: int
    length: int
    before: StreamSnapshot
    behind: int = 0
    most: int = NEVER


def raise_to_compute(streams: Streams, clocks: Sequence[str]) -> None:
    """Sets clocks to the compute stream's where they lie before it. See [Note: skipping] for when this is no
    change."""
    for clock in clocks:
        setattr(streams, clock, max(getattr(streams, clock), streams.compute))


def snapshot(streams: Streams, pending: Mapping[int, int], *, in_buffers: InBuffers) -> StreamSnapshot:
    """The state now."""
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
    """Adds as many of the `left` turns as can be told, to `streams`, `pending` and `in_buffers`; says how
    many.

    `marks`: after each turn so far; `stride`: how many units further on the next turn acts.
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
    """The last `turns` turns, if they led back to the state before them."""
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
