"""Recordings of a mixture whose experts more ranks divide, derived from recordings of two numbers of ranks.

Of E ranks, each gets as many rows as it sends. So with another E, a rank does the same operations, and only
these tensors have other sizes:

weights and gradients of experts, and numbers per expert    in proportion to 1/E
numbers per rank, and rows of each expert                   in proportion to E

A size that falls from few to many ranks is taken as a + b/E, one that grows as a + b E, and one that stays
as it is. A launch that reads or writes tensors of both kinds is off by a few bytes per expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fullshard.spec.model import UntracedSettings
from fullshard.spec.plan import Plan
from fullshard.tracing.allocations import PhaseRecord
from fullshard.tracing.kernels import KernelLaunch
from fullshard.tracing.recordings import MicrobatchRecording, SettingRecording, SettingsRecorder

Interpolate = Callable[[float, float], int]


@dataclass(frozen=True)
class ModelRecordings:
    """Holds what was recorded of a model.

    derived_for: the plan that derived recordings are for; None if they are for that of `recorder`
    """

    recorder: SettingsRecorder
    settings: tuple[SettingRecording, ...]
    untraced: tuple[UntracedSettings, ...] = ()
    derived_for: Plan | None = None

    @property
    def plan(self) -> Plan:
        return self.derived_for or self.recorder.plan


def derive_recordings(few: ModelRecordings, many: ModelRecordings, *, plan: Plan) -> ModelRecordings:
    """Returns recordings for `plan`, in which the number of ranks that divide experts is between the two.

    few, many: recordings of the same structure; `many` has only the smaller microbatches of kept settings
    """
    degrees = (few.plan.expert_parallel, many.plan.expert_parallel, plan.expert_parallel)

    def interpolate(low: float, high: float) -> int:
        return round(interpolate_size(low, high, degrees=degrees))

    kept = (one for one in few.settings if one.kept)
    settings = [
        _derive_setting(a, b.low, interpolate=interpolate) for a, b in zip(kept, many.settings, strict=True)
    ]
    return replace(few, settings=tuple(settings), derived_for=plan)


def interpolate_size(low: float, high: float, *, degrees: tuple[int, int, int]) -> float:
    """Returns a size with `degrees[2]` ranks, from those with `degrees[0]` and with more, `degrees[1]`."""
    few, many, degree = degrees
    if low > high:
        return high + (low - high) * (1 / degree - 1 / many) / (1 / few - 1 / many)
    return low + (high - low) * (degree - few) / (many - few)


def _derive_setting(
    few: SettingRecording, many: MicrobatchRecording, *, interpolate: Interpolate
) -> SettingRecording:
    low = _derive_microbatch(few.low, (few.low, many), interpolate=interpolate)
    high = (
        low if few.high is few.low else _derive_microbatch(few.high, (few.low, many), interpolate=interpolate)
    )
    return replace(few, low=low, high=high)


def _derive_microbatch(
    own: MicrobatchRecording,
    ends: tuple[MicrobatchRecording, MicrobatchRecording],
    *,
    interpolate: Interpolate,
) -> MicrobatchRecording:
    """Returns `own`, of the fewest ranks, for more. `ends`: a microbatch for the fewest and the most."""

    def derive(all_of: Callable[[MicrobatchRecording], Sequence[PhaseRecord]]) -> list[PhaseRecord]:
        phases = zip(all_of(own), all_of(ends[0]), all_of(ends[1]), strict=True)
        return [_derive_phase(a, (low, high), interpolate=interpolate) for a, low, high in phases]

    return replace(
        own,
        recording=derive(lambda one: one.recording),
        accumulating=derive(lambda one: one.accumulating),
    )


def _derive_phase(
    own: PhaseRecord, ends: tuple[PhaseRecord, PhaseRecord], *, interpolate: Interpolate
) -> PhaseRecord:
    low, high = ends

    def sizes(*of: Sequence[tuple[str, int]]) -> list[int]:
        return [a + interpolate(b, c) - b for (_, a), (_, b), (_, c) in zip(*of, strict=True)]

    def launches(*of: Sequence[KernelLaunch]) -> list[KernelLaunch]:
        return [
            a._replace(
                flops=a.flops + interpolate(b.flops, c.flops) - b.flops,
                bytes=a.bytes + interpolate(b.bytes, c.bytes) - b.bytes,
                pieces=a.pieces + interpolate(b.pieces, c.pieces) - b.pieces,
                rows=a.rows * interpolate(b.rows, c.rows) / b.rows if b.rows else 0.0,
            )
            for a, b, c in zip(*of, strict=True)
        ]

    changes = sizes(own.changes, low.changes, high.changes)
    copies = sizes(own.copies, low.copies, high.copies)
    return replace(
        own,
        changes=[(kind, size) for (kind, _), size in zip(own.changes, changes, strict=True)],
        copies=[(way, size) for (way, _), size in zip(own.copies, copies, strict=True)],
        work=launches(own.work, low.work, high.work),
        fused=launches(own.fused, low.fused, high.fused),
    )
