"""A quick bound below `peak_bytes`, from what several plans share."""

from typing import NamedTuple

from fullshard.planner.memory import sizes_by_kind
from fullshard.planner.trace_memory import memory_trace
from fullshard.planner.unit_bytes import UnitBytes, optimizer_bytes
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan


class BackwardPeak(NamedTuple):
    """The highest `live` bytes at which backward of a unit of one kind runs, after and before units of
    others.

    -1 where there is none (or none with parameters).
    """

    kind: int
    behind: int
    ahead: int
    live: int


class ActivationBound(NamedTuple):
    """Of one trace and microbatch: `crests`, what is alive as the loss is made, and the most of all."""

    crests: tuple[BackwardPeak, ...]
    loss: int
    highest: int
    batch: int


class MeshBytes(NamedTuple):
    """Of one mesh: by the first unit of each kind, sizes; over all units, sums."""

    sizes: dict[int, UnitBytes]
    static: int
    gathered: int
    whole: int
    gradients: int
    chunks: int


def activation_bound(spec: ModelSpec, plan: Plan) -> ActivationBound:
    """What of `peak_bytes` depends on the recompute and the microbatch alone."""
    trace = spec.trace(plan.run.recompute, plan.microbatch)
    found = memory_trace(spec, trace, microbatch=plan.microbatch, reach=1, tensor=plan.tensor_parallel)
    kinds = [spec.unit_kinds[unit] if spec.units[unit].parameters else -1 for unit in found.units]
    beats = [b for b in found.beats if b.event == "pre_backward" and kinds[b.unit] >= 0]
    crests: dict[tuple[int, int, int], int] = {}
    for place, beat in enumerate(beats):
        behind = kinds[beats[place - 1].unit] if place else -1
        ahead = kinds[beats[place + 1].unit] if place + 1 < len(beats) else -1
        key = (kinds[beat.unit], behind, ahead)
        crests[key] = max(crests.get(key, 0), beat.peak.total)
    ends = [beat.peak.total for beat in found.beats if beat.event == "end_forward"]
    return ActivationBound(
        tuple(BackwardPeak(*key, live) for key, live in crests.items()),
        loss=ends[0] if ends else 0,
        highest=max(beat.peak.total for beat in found.beats),
        batch=round(trace.batch_bytes.at(plan.microbatch)),
    )


def mesh_bytes(spec: ModelSpec, plan: Plan) -> MeshBytes:
    """What of it depends on the mesh alone."""
    sizes = sizes_by_kind(spec, plan)
    counts = {kind: spec.unit_kinds.count(kind) for kind in sizes}

    def over_all(name: str) -> int:
        return sum(int(getattr(size, name)) * counts[kind] for kind, size in sizes.items())

    optimizer = sum(optimizer_bytes(size, plan) * counts[kind] for kind, size in sizes.items())
    # Of a tier's gradients, and of those that are used in backward, hardly any are here at once.
    stays = not (plan.gradients_leave or plan.run.optimizer.in_backward)
    return MeshBytes(
        sizes,
        static=over_all("shards") + optimizer + spec.buffer_bytes,
        gathered=over_all("gathered"),
        # Gradients that need no cast are counted as autograd has left them, which the trace tells.
        whole=sum(s.whole_reduced * counts[kind] for kind, s in sizes.items() if s.whole != s.whole_reduced),
        gradients=over_all("gradient") if stays else 0,
        chunks=over_all("reduce_output"),
    )


class PlanTraits(NamedTuple):
    """Of a plan: more than one microbatch a step; gradients reduced in each; parameters kept gathered over
    microbatches; gathered ahead of their use."""

    accumulates: bool
    syncs: bool
    keeps: bool
    prefetches: bool


def least_bytes(relief: ActivationBound, held: MeshBytes, *, habits: PlanTraits) -> int:
    """No less than this is alive at the peak of a step: at the end of backward, as the loss is made, and
    while a unit's backward runs. Then its parameters are gathered, the gradients of the unit behind it are on
    their way, and the unit ahead is being gathered.
    """
    kept = 0
    if habits.accumulates:
        kept = min(held.gradients, held.chunks) if habits.syncs else held.whole
    gathered = held.gathered if habits.keeps else 0
    backward = relief.highest
    for kind, behind, ahead, live in relief.crests:
        size = held.sizes[kind]
        bytes_ = live + size.gathered
        if behind >= 0:
            bytes_ += held.sizes[behind].reduce_input
        if habits.prefetches and ahead >= 0:
            next_one = held.sizes[ahead]
            bytes_ += next_one.gathered if next_one.reshards and next_one.shard_degree > 1 else 0
        backward = max(backward, bytes_)
    if habits.accumulates and habits.syncs:
        backward += kept
    return held.static + relief.batch + max(backward, relief.loss + gathered + kept, held.gradients)
