"""Lets recordings of a few blocks and of two microbatch sizes describe all blocks and all sizes.

[Note: repeated blocks]
Blocks repeat with a period: one block, or several if only some of them recompute or have the same attention.
If only the first blocks recompute, these are one run of blocks, and the others another.
Two periods are kept in front and two or more behind. The inner ones of these have the same neighbours as a
block in the middle, and can be compared with each other. Blocks before them that are different, such as the
first, dense ones of a mixture of experts, are all kept.

[Note: microbatch sizes]
An operation on twice as many sequences allocates either twice as much, or the same (a weight's gradient). So
two recordings define every change, and every running total, as a line over the microbatch. For any
microbatch, the highest moment of a phase is on the upper envelope of the lines of its running totals.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

from torch import nn

from fullshard.parallel.units import Unit
from fullshard.planner.describe.operations import KernelLaunch, PhaseRecord
from fullshard.spec.model import (
    Kernel,
    KernelIndexAndCount,
    LinearInMicrobatch,
    LiveTensorBytes,
    RepeatedUnits,
    TracePhase,
)
from fullshard.spec.plan import Plan
from fullshard.torch_private.tensors import registered_modules

_LONGEST_PERIOD = 8  # blocks; models that alternate do so by 2 to 6
# Attributes that count blocks; otherwise equal blocks differ in them.
_COUNTS = ("idx", "index", "number", "layer_id", "block_id", "depth")


@dataclass(frozen=True)
class BlockTruncation:
    """Units removed from a model, and the remaining ones that represent them."""

    removed_units: frozenset[str] = frozenset()  # names of the removed units
    repeats: tuple[RepeatedUnits, ...] = ()  # the periods that represent them, as unit indices of the trace
    border: int | None = None  # see `MicrobatchTrace.border`
    recomputed: int | None = None  # remaining ones of `recompute.blocks`; None if there is no such limit


@dataclass(frozen=True)
class _RunOfBlocks:
    """Consecutive blocks of one ModuleList, all or none of which are among `recompute.blocks`."""

    container: nn.ModuleList
    signatures: list[Any]  # of all blocks in the container
    start: int
    end: int
    first: int  # blocks from `first` on repeat, counted from `start`
    period: int

    @property
    def dropped(self) -> range:
        """The blocks to remove, by their index in the container."""
        kept, count, period = self.first + 4 * self.period, self.end - self.start, self.period
        last = self.end - 2 * period - (count - kept) % period
        return range(self.start + self.first + 2 * period, last)

    @property
    def template(self) -> range:
        """The blocks that represent those to remove."""
        return range(self.start + self.first + self.period, self.start + self.first + 2 * self.period)

    def is_continued_by(self, other: "_RunOfBlocks") -> bool:
        """Returns whether the blocks of `other` come next, and follow the same period."""
        begin = self.start + (self.first or self.period)
        later = range(begin, other.end - 2 * self.period)
        return (
            (self.container, self.end, self.period) == (other.container, other.start, other.period)
            and other.first == 0
            and all(self.signatures[at] == self.signatures[at + self.period] for at in later)
        )


def truncate_repeated_blocks(
    model: nn.Module, units: Sequence[Unit], *, blocks: Sequence[nn.Module], plan: Plan
) -> BlockTruncation:
    """Removes repeated blocks from their ModuleLists in place, without renaming the others. Returns which.

    Equal blocks have the same classes, shapes, settings and overrides. The caller checks in the trace that
    they also do the same. There are no `repeats` if blocks share a unit, or run in another order.
    """
    limit = plan.run.recompute.blocks
    runs = _find_runs_to_shorten(model, units, blocks=blocks, plan=plan)
    left_out, dropped, templates = set[str](), set[nn.Module](), list[tuple[list[str], _RunOfBlocks]]()
    for run in runs:
        own = list(run.container)
        inside = (_names_of_units_inside(own[at], units) for at in run.template)
        templates.append(([name for some in inside for name in some], run))
        dropped.update(own[at] for at in run.dropped)
        left_out.update(name for at in run.dropped for name in _names_of_units_inside(own[at], units))
    for run in runs:
        for key, block in list(run.container.named_children()):
            if block in dropped:
                del registered_modules(run.container)[key]
    repeats = _build_repeated_units(templates, units=units, left_out=left_out)
    borders = (at for at, (run, other) in enumerate(pairwise(runs)) if repeats and run.is_continued_by(other))
    return BlockTruncation(
        frozenset(left_out),
        repeats,
        border=next(borders, None),
        recomputed=None if limit is None else sum(block not in dropped for block in blocks[:limit]),
    )


def _find_runs_to_shorten(
    model: nn.Module, units: Sequence[Unit], *, blocks: Sequence[nn.Module], plan: Plan
) -> list[_RunOfBlocks]:
    """Returns the runs that have blocks to remove, of ModuleLists of recompute blocks alone."""
    owner = {module: unit for unit in units for module in unit.modules}
    places, limit = {block: at for at, block in enumerate(blocks)}, plan.run.recompute.blocks
    found: list[_RunOfBlocks] = []
    for container in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        own = list(container)
        if len(own) < 2 or any(module not in places for module in own):
            continue
        signatures = [_block_signature(block, at, owner=owner) for at, block in enumerate(own)]
        border = len(own) if limit is None else sum(places[block] < limit for block in own)
        for start, end in ((0, border), (border, len(own))):
            repeating = _find_first_and_period(signatures[start:end])
            if repeating is not None:
                run = _RunOfBlocks(container, signatures, start, end, *repeating)
                found += [run] if run.dropped else []
    return found


def _build_repeated_units(
    templates: Sequence[tuple[list[str], _RunOfBlocks]], *, units: Sequence[Unit], left_out: set[str]
) -> tuple[RepeatedUnits, ...]:
    kept = [unit.name for unit in units if unit.name not in left_out]
    found: list[RepeatedUnits] = []
    for names, run in templates:
        indices = sorted(kept.index(name) for name in names)
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            return ()  # blocks share a unit, or run out of order: the caller sees that units are missing
        times = 1 + len(run.dropped) // run.period
        repeat = RepeatedUnits(first=indices[0], units=len(indices), times=times, blocks=run.period)
        found.append(repeat)
    return tuple(found)


def _names_of_units_inside(block: nn.Module, units: Sequence[Unit]) -> list[str]:
    inside = set(block.modules())
    return [unit.name for unit in units if all(module in inside for module in unit.modules)]


def _find_first_and_period(signatures: Sequence[Any]) -> tuple[int, int] | None:
    """Returns (first, period) with the fewest blocks to keep, or None if signatures do not repeat.

    From block `first` on, signatures repeat after `period` blocks. The last period may differ; and the first,
    if there is no block before it: behind different blocks, the end of a block's backward may differ.
    """
    periods = range(1, _LONGEST_PERIOD + 1)
    choices = sorted(product(range(_LONGEST_PERIOD), periods), key=lambda one: (one[0] + 4 * one[1], one[0]))
    for first, period in choices:
        later = range(first or 2 * period, len(signatures) - period)
        if all(signatures[at] == signatures[first + period + (at - first) % period] for at in later):
            return first, period
    return None


def _block_signature(block: nn.Module, at: int, *, owner: dict[nn.Module, Unit]) -> Any:
    """Returns everything that distinguishes one block from another, except its position and its values."""
    modules: list[Any] = []
    for name, module in block.named_modules():
        own = [
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        ]
        settings = [one for one in vars(module).items() if isinstance(one[1], (bool, int, float, str))]
        plain = sorted(
            (key, value)
            for key, value in settings
            if key != "training" and not key.endswith(_COUNTS) and (key, value) != ("layer", at)
        )
        unit = owner.get(module)
        override = None if unit is None else (unit.override, unit.keep_until_backward, unit.is_block)
        modules.append((name, type(module), own, plain, override))
    return modules


Recording = Sequence[PhaseRecord]
_Line = Callable[[float, float], LinearInMicrobatch]


class KernelIndex:
    """Index of the distinct kernels seen so far; with `keep_all`, of all launches as kernels of their own."""

    def __init__(self, *, keep_all: bool = False) -> None:
        self.keep_all = keep_all
        self._index: dict[tuple[Kernel, int], int] = {}

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel, _ in self._index)

    def index_and_count_launches(
        self, low: Sequence[KernelLaunch], high: Sequence[KernelLaunch], *, line: _Line
    ) -> tuple[KernelIndexAndCount, ...]:
        """Returns the number of launches per kernel, in order of first use.

        low, high: the same launches at a microbatch and at one more sequence
        line: makes the line over microbatches through two sizes
        """
        counts: dict[int, int] = {}
        for a, b in zip(low, high, strict=True):
            sizes = ("flops", "bytes", "pieces", "rows")
            lines: dict[str, Any] = {name: line(getattr(a, name), getattr(b, name)) for name in sizes}
            kernel = Kernel(**a._asdict() | lines)
            count = len(self._index)
            index = self._index.setdefault((kernel, count if self.keep_all else 0), count)
            counts[index] = counts.get(index, 0) + 1
        return tuple(KernelIndexAndCount(kernel, times) for kernel, times in counts.items())


def merge_recordings(
    low: Recording,
    high: Recording,
    *,
    low_microbatch: int,
    table: KernelIndex,
    compiled_units: Container[int] = (),
) -> tuple[TracePhase, ...]:
    """Returns phases for any microbatch from recordings at `low_microbatch` and at one more sequence.

    If `low` and `high` are the same recording, the sizes are those of `low_microbatch` only. Phases of
    `compiled_units` launch sequences of elementwise operations as one kernel. If `table` keeps all, a phase
    has all its moments as `peaks`, not only the highest.
    """
    phases: list[TracePhase] = []
    state, line = LiveTensorBytes(), partial(_line_over_microbatch, low_microbatch=low_microbatch)
    for a, b in zip(low, high, strict=True):
        totals = _running_memory_totals(state, low=a, high=b, line=line)
        state, totals = totals[-1], totals[a.event_change_count :]
        work = (a.fused, b.fused) if a.unit in compiled_units else (a.work, b.work)
        copies = [(way, line(one, other)) for (way, one), (_, other) in zip(a.copies, b.copies, strict=True)]
        phases.append(
            TracePhase(
                event=a.event,
                unit=a.unit,
                peaks=tuple(totals if table.keep_all else _upper_envelope(totals)),
                end=state,
                work=table.index_and_count_launches(*work, line=line),
                out=tuple(size for way, size in copies if way == "out"),
                back=tuple(size for way, size in copies if way == "back"),
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


def _line_over_microbatch(low: float, high: float, *, low_microbatch: int) -> LinearInMicrobatch:
    return LinearInMicrobatch(float(low - (high - low) * low_microbatch), float(high - low))


def _running_memory_totals(
    state: LiveTensorBytes, *, low: PhaseRecord, high: PhaseRecord, line: _Line
) -> list[LiveTensorBytes]:
    totals = [state]
    for (kind, a), (_, b) in zip(low.changes, high.changes, strict=True):
        old, change = getattr(state, kind), line(a, b)
        new = LinearInMicrobatch(old.fixed + change.fixed, old.per_sequence + change.per_sequence)
        state = state._replace(**{kind: new})
        totals.append(state)
    return totals


def _upper_envelope(states: Sequence[LiveTensorBytes]) -> list[LiveTensorBytes]:
    """Returns the states that are the highest for some microbatch of 1 or more, of equal ones the last."""
    lines = [
        (sum(line.per_sequence for line in state), sum(line.fixed for line in state), index)
        for index, state in enumerate(states)
    ]
    slope, fixed, index = max(lines, key=lambda one: (one[0] + one[1], one[0], one[2]))
    kept = [index]
    while steeper := [one for one in lines if one[0] > slope]:
        # Of the steeper lines, the one that crosses this one first is next; of several, the steepest.
        slope, fixed, index = min(
            steeper, key=lambda one: ((fixed - one[1]) / (one[0] - slope), -one[0], -one[2])
        )
        kept.append(index)
    return [states[index] for index in kept]
