"""Fast lower bound on `peak_bytes`, from terms that several plans share."""

from typing import NamedTuple

from fullshard.planner.memory import sizes_by_kind
from fullshard.planner.trace_memory import memory_trace
from fullshard.planner.unit_bytes import UnitBytes, optimizer_bytes
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan


class BackwardPeak(NamedTuple):
    """Most `live` bytes in the backward of a unit of one kind, between units of two other kinds.

    Units without parameters have kind -1.
    """

    kind: int  # kind of the unit
    behind: int  # kind of the unit whose backward ran before; -1 if there is none
    ahead: int  # kind of the unit whose backward runs next; -1 if there is none
    live: int  # bytes


class ActivationBound(NamedTuple):
    """Bytes that depend only on the trace and the microbatch."""

    crests: tuple[BackwardPeak, ...]  # peaks in backward, by kinds of neighbouring units
    loss: int  # bytes alive when the loss is computed
    highest: int  # the most bytes alive at any moment
    batch: int  # bytes of the batch


class MeshBytes(NamedTuple):
    """Bytes that depend only on the mesh."""

    sizes: dict[int, UnitBytes]  # sizes of each kind of unit
    static: int  # shards, optimizer state and buffers, over all units
    gathered: int  # unsharded parameters, over all units
    whole: int  # unsharded gradients that are cast to the reduce dtype, over all units
    gradients: int  # sharded gradients, over all units; 0 if they are offloaded or used in backward
    chunks: int  # reduce-scatter outputs, over all units


def activation_bound(spec: ModelSpec, plan: Plan) -> ActivationBound:
    """Returns the part of `peak_bytes` that depends only on the recompute and the microbatch."""
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
    """Returns the part of `peak_bytes` that depends only on the mesh."""
    sizes = sizes_by_kind(spec, plan)
    counts = {kind: spec.unit_kinds.count(kind) for kind in sizes}

    def over_all(name: str) -> int:
        return sum(int(getattr(size, name)) * counts[kind] for kind, size in sizes.items())

    optimizer = sum(optimizer_bytes(size, plan) * counts[kind] for kind, size in sizes.items())
    # Few gradients are in memory at once if they are offloaded or used in backward.
    stays = not (plan.gradients_leave or plan.run.optimizer.in_backward)
    return MeshBytes(
        sizes,
        static=over_all("shards") + optimizer + spec.buffer_bytes,
        gathered=over_all("gathered"),
        # Gradients that need no cast are counted by the trace, as autograd leaves them.
        whole=sum(s.whole_reduced * counts[kind] for kind, s in sizes.items() if s.whole != s.whole_reduced),
        gradients=over_all("gradient") if stays else 0,
        chunks=over_all("reduce_output"),
    )


class PlanTraits(NamedTuple):
    """Traits of a plan that affect its peak."""

    accumulates: bool  # more than one microbatch per step
    syncs: bool  # gradients are reduced after each microbatch
    keeps: bool  # parameters stay unsharded between microbatches
    prefetches: bool  # units are gathered ahead of their use


def least_bytes(relief: ActivationBound, held: MeshBytes, *, habits: PlanTraits) -> int:
    """Returns a lower bound on the peak of a step, in bytes.

    It is the maximum of the bytes alive at the end of backward, when the loss is computed, and in a unit's
    backward. In backward, the unit's parameters are unsharded, the gradients of the unit before it are being
    reduced, and the next unit is being gathered.
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
