"""Phases for any microbatch size, merged from recordings at two sizes.

An operation on twice as many sequences allocates either twice as much, or the same (a weight's gradient). So
two recordings define every change, and every running total, as a line over the microbatch. For any
microbatch, the highest moment of a phase is on the upper envelope of the lines of its running totals.
"""

from collections.abc import Sequence
from itertools import groupby

from fullshard.sharding.host_copy import Way
from fullshard.spec.model import Kernel, Launches, Line, Moment, Phase
from fullshard.tracing.allocations import Recorded
from fullshard.tracing.kernels import KernelLaunch

Recording = Sequence[Recorded]


class KernelIndex:
    """Index of the distinct kernels seen so far."""

    def __init__(self) -> None:
        self._index: dict[Kernel, int] = {}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._index)

    def launches(
        self, low: Sequence[KernelLaunch], *, high: Sequence[KernelLaunch], microbatch: int
    ) -> tuple[Launches, ...]:
        """Returns the number of launches per kernel, in order of first use.

        low, high: the same launches at `microbatch` and at one more sequence
        """
        counts: dict[int, int] = {}
        for a, b in zip(low, high, strict=True):
            kernel = Kernel(
                kind=a.kind,
                dtype=a.dtype,
                flops=_line(a.flops, b.flops, microbatch=microbatch),
                bytes=_line(a.bytes, b.bytes, microbatch=microbatch),
                causal=a.causal,
            )
            index = self._index.setdefault(kernel, len(self._index))
            counts[index] = counts.get(index, 0) + 1
        return tuple(Launches(kernel, times) for kernel, times in counts.items())


def merge_recordings(
    low: Recording, high: Recording, *, microbatch: int, table: KernelIndex
) -> tuple[Phase, ...]:
    """Returns phases for any microbatch from recordings at `microbatch` and at one more sequence.

    If `low` and `high` are the same recording, the sizes are those of `microbatch` only.
    """
    phases: list[Phase] = []
    state = Moment()
    for a, b in zip(low, high, strict=True):
        totals = _totals(state, low=a, high=b, microbatch=microbatch)
        state = totals[-1]
        phases.append(
            Phase(
                event=a.event,
                unit=a.unit,
                peaks=tuple(_envelope(totals[a.given :])),
                end=state,
                work=table.launches(a.work, high=b.work, microbatch=microbatch),
                fused=table.launches(a.fused, high=b.fused, microbatch=microbatch),
                out=_copies("out", low=a, high=b, microbatch=microbatch),
                back=_copies("back", low=a, high=b, microbatch=microbatch),
                waits=any(way == "wait" for way, _ in a.copies),
            )
        )
    return tuple(phases)


def same_structure(low: Recording, high: Recording) -> bool:
    """Returns whether both recordings are equal except for the sizes of tensors."""
    return [_form(one) for one in low] == [_form(one) for one in high]


def extrapolate(smaller: Recording, *, low: Recording, high: Recording) -> bool:
    """Returns whether lines through recordings of 2 (`low`) and 3 sequences (`high`) predict one of 1."""
    if not same_structure(low, smaller):
        return False
    return all(
        2 * a[1] - b[1] == c[1]
        for one, other, third in zip(low, high, smaller, strict=True)
        for a, b, c in zip(*([*phase.changes, *phase.copies] for phase in (one, other, third)), strict=True)
    )


def _form(recorded: Recorded) -> tuple[object, ...]:
    kinds = [(kind, size > 0) for kind, size in recorded.changes]
    work = [[(launch.kind, launch.dtype) for launch in some] for some in (recorded.work, recorded.fused)]
    ways = [way for way, _ in recorded.copies]
    return recorded.event, recorded.unit, recorded.given, kinds, work, ways


def _copies(way: Way, *, low: Recorded, high: Recorded, microbatch: int) -> tuple[Line, ...]:
    return tuple(
        _line(a, b, microbatch=microbatch)
        for (done, a), (_, b) in zip(low.copies, high.copies, strict=True)
        if done == way
    )


def _line(low: int, high: int, *, microbatch: int) -> Line:
    return Line(float(low - (high - low) * microbatch), float(high - low))


def _totals(state: Moment, *, low: Recorded, high: Recorded, microbatch: int) -> list[Moment]:
    """Returns the bytes alive before the first change and after each change."""
    totals = [state]
    for (kind, a), (_, b) in zip(low.changes, high.changes, strict=True):
        old, change = getattr(state, kind), _line(a, b, microbatch=microbatch)
        new = Line(old.fixed + change.fixed, old.per_sequence + change.per_sequence)
        state = state._replace(**{kind: new})
        totals.append(state)
    return totals


def _envelope(states: Sequence[Moment]) -> list[Moment]:
    """Returns the states that are the highest for some microbatch of 1 or more."""

    def sums(state: Moment) -> tuple[float, float]:
        return sum(line.per_sequence for line in state), sum(line.fixed for line in state)

    # Ordered by slope, with the highest of equal slope, each line must become the highest before the next.
    ordered = sorted(((*sums(state), i) for i, state in enumerate(states)), key=lambda one: (one[0], one[1]))
    steepest = [list(group)[-1] for _, group in groupby(ordered, key=lambda one: one[0])]
    kept: list[tuple[float, float, int]] = []
    for slope, fixed, index in steepest:
        while kept and _overtakes(kept, slope=slope, fixed=fixed):
            kept.pop()
        kept.append((slope, fixed, index))
    return [states[index] for _, _, index in kept]


def _overtakes(kept: list[tuple[float, float, int]], *, slope: float, fixed: float) -> bool:
    """Returns whether the last of `kept` is never the highest line, at 1 or more, beside a steeper line."""
    last_slope, last_fixed, _ = kept[-1]
    meets = (last_fixed - fixed) / (slope - last_slope)
    if meets <= 1:
        return True
    if len(kept) == 1:
        return False
    before_slope, before_fixed, _ = kept[-2]
    return meets <= (before_fixed - last_fixed) / (last_slope - before_slope)
