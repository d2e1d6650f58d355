"""Phases for any microbatch size, merged from recordings at two sizes.

An operation on twice as many sequences allocates either twice as much, or the same (a weight's gradient). So
two recordings define every change, and every running total, as a line over the microbatch. For any
microbatch, the highest moment of a phase is on the upper envelope of the lines of its running totals.
"""

from collections.abc import Container, Sequence
from itertools import groupby

from fullshard.parallel.activation_offload import Way
from fullshard.planner.describe.allocations import PhaseRecord
from fullshard.planner.describe.kernels import KernelLaunch
from fullshard.spec.model import Kernel, KernelIndexAndCount, LinearInMicrobatch, LiveTensorBytes, TracePhase

Recording = Sequence[PhaseRecord]


class KernelIndex:
    """Index of the distinct kernels seen so far."""

    def __init__(self) -> None:
        self._index: dict[Kernel, int] = {}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self._index)

    def count_launches(
        self, low: Sequence[KernelLaunch], *, high: Sequence[KernelLaunch], microbatch: int
    ) -> tuple[KernelIndexAndCount, ...]:
        """Returns the number of launches per kernel, in order of first use.

        low, high: the same launches at `microbatch` and at one more sequence
        """
        counts: dict[int, int] = {}
        for a, b in zip(low, high, strict=True):
            kernel = Kernel(
                kind=a.kind,
                dtype=a.dtype,
                flops=_line_over_microbatch(a.flops, b.flops, microbatch=microbatch),
                bytes=_line_over_microbatch(a.bytes, b.bytes, microbatch=microbatch),
                causal=a.causal,
                backward=a.backward,
                unaligned=a.unaligned,
                axis=a.axis,
                head_dim=a.head_dim,
                pieces=_line_over_microbatch(a.pieces, b.pieces, microbatch=microbatch),
                rows=_line_over_microbatch(a.rows, b.rows, microbatch=microbatch),
                received=a.received,
            )
            index = self._index.setdefault(kernel, len(self._index))
            counts[index] = counts.get(index, 0) + 1
        return tuple(KernelIndexAndCount(kernel, times) for kernel, times in counts.items())


def merge_recordings(
    low: Recording,
    high: Recording,
    *,
    microbatch: int,
    table: KernelIndex,
    compiled_units: Container[int] = (),
) -> tuple[TracePhase, ...]:
    """Returns phases for any microbatch from recordings at `microbatch` and at one more sequence.

    If `low` and `high` are the same recording, the sizes are those of `microbatch` only. Phases of
    `compiled_units` launch sequences of elementwise operations as one kernel.
    """
    phases: list[TracePhase] = []
    state = LiveTensorBytes()
    for a, b in zip(low, high, strict=True):
        is_compiled = a.unit in compiled_units
        totals = _running_memory_totals(state, low=a, high=b, microbatch=microbatch)
        state = totals[-1]
        phases.append(
            TracePhase(
                event=a.event,
                unit=a.unit,
                peaks=tuple(_upper_envelope(totals[a.event_change_count :])),
                end=state,
                work=table.count_launches(
                    a.fused if is_compiled else a.work,
                    high=b.fused if is_compiled else b.work,
                    microbatch=microbatch,
                ),
                out=_host_copy_lines("out", low=a, high=b, microbatch=microbatch),
                back=_host_copy_lines("back", low=a, high=b, microbatch=microbatch),
                waits=any(way == "wait" for way, _ in a.copies),
            )
        )
    return tuple(phases)


def has_same_structure(low: Recording, high: Recording) -> bool:
    """Returns whether both recordings are equal except for the sizes of tensors."""
    return [_phase_structure(one) for one in low] == [_phase_structure(one) for one in high]


def can_extrapolate_to_smaller(smaller: Recording, *, low: Recording, high: Recording) -> bool:
    """Returns whether lines through recordings of 2 (`low`) and 3 sequences (`high`) predict one of 1."""
    if not has_same_structure(low, smaller):
        return False
    return all(
        2 * a[1] - b[1] == c[1]
        for one, other, third in zip(low, high, smaller, strict=True)
        for a, b, c in zip(*([*phase.changes, *phase.copies] for phase in (one, other, third)), strict=True)
    )


def _phase_structure(recorded: PhaseRecord) -> tuple[object, ...]:
    kinds = [(kind, size > 0) for kind, size in recorded.changes]
    lists = (recorded.work, recorded.fused)
    work = [[(one.kind, one.dtype, one.backward) for one in launches] for launches in lists]
    ways = [way for way, _ in recorded.copies]
    return recorded.event, recorded.unit, recorded.event_change_count, kinds, work, ways


def _host_copy_lines(
    way: Way, *, low: PhaseRecord, high: PhaseRecord, microbatch: int
) -> tuple[LinearInMicrobatch, ...]:
    return tuple(
        _line_over_microbatch(a, b, microbatch=microbatch)
        for (done, a), (_, b) in zip(low.copies, high.copies, strict=True)
        if done == way
    )


def _line_over_microbatch(low: float, high: float, *, microbatch: int) -> LinearInMicrobatch:
    return LinearInMicrobatch(float(low - (high - low) * microbatch), float(high - low))


def _running_memory_totals(
    state: LiveTensorBytes, *, low: PhaseRecord, high: PhaseRecord, microbatch: int
) -> list[LiveTensorBytes]:
    """Returns the bytes alive before the first change and after each change."""
    totals = [state]
    for (kind, a), (_, b) in zip(low.changes, high.changes, strict=True):
        old, change = getattr(state, kind), _line_over_microbatch(a, b, microbatch=microbatch)
        new = LinearInMicrobatch(old.fixed + change.fixed, old.per_sequence + change.per_sequence)
        state = state._replace(**{kind: new})
        totals.append(state)
    return totals


def _upper_envelope(states: Sequence[LiveTensorBytes]) -> list[LiveTensorBytes]:
    """Returns the states that are the highest for some microbatch of 1 or more."""
    lines = (
        (sum(line.per_sequence for line in state), sum(line.fixed for line in state), index)
        for index, state in enumerate(states)
    )
    # Ordered by slope, with the highest of equal slope, each line must become the highest before the next.
    ordered = sorted(lines, key=lambda one: one[:2])
    steepest = [list(group)[-1] for _, group in groupby(ordered, key=lambda one: one[0])]
    kept: list[tuple[float, float, int]] = []
    for slope, fixed, index in steepest:
        while kept and _is_last_line_never_highest(kept, slope=slope, fixed=fixed):
            kept.pop()
        kept.append((slope, fixed, index))
    return [states[index] for _, _, index in kept]


def _is_last_line_never_highest(kept: list[tuple[float, float, int]], *, slope: float, fixed: float) -> bool:
    """Returns whether the last of `kept` is never the highest line, at 1 or more, beside a steeper line."""
    last_slope, last_fixed, _ = kept[-1]
    meets = (last_fixed - fixed) / (slope - last_slope)
    if meets <= 1:
        return True
    if len(kept) == 1:
        return False
    before_slope, before_fixed, _ = kept[-2]
    return meets <= (before_fixed - last_fixed) / (last_slope - before_slope)
