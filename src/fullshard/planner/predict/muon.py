"""Differences of Muon and Adafactor from AdamW: bytes of both, and seconds of Muon.

See `spec.dealing`, `training.muon` and `training.adafactor`. For Muon:

P: elements of Muon's matrices, W: ranks of a replica, b: bytes per element of Newton–Schulz

state         4 bytes per element, in fp32, where AdamW has 8 and a step count
temporaries   of a wave, on a rank with parts of S elements that owns O elements: the parts and what arrives,
              S + O; what arrives, in matrices, 2 O; O and Newton–Schulz, 2 m n + m² for m <= n; and back.
              A matrix that is whole on its rank needs 3 m n + m².
seconds       the FLOP of Newton–Schulz, max(largest matrix, sum / W); two exchanges, in each of which a rank
              sends (W - 1) / W² P b bytes; reads and writes of elements. Nothing hides them.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple, cast

from fullshard.planner.predict.collectives import all_to_all_seconds, shard_group_layout
from fullshard.planner.predict.phases import memory_access_seconds, nearest_dtype_rate_curve
from fullshard.spec.dealing import (
    WAVE_ELEMENTS,
    Box,
    DealtMatrix,
    Shape,
    TensorLayout,
    deal_matrices,
    dims_of_means,
    newton_schulz_flops,
)
from fullshard.spec.machine.hardware import Hardware, interpolate_rate
from fullshard.spec.model import ModelSpec, ParamSpec, UnitSpec
from fullshard.spec.plan import ITEMSIZE, Dtype, MergedUnitSettings, Plan
from fullshard.spec.settings.model_section import expert_shard_dim

_ACCESSES = 14  # of each element: scaling, momentum, direction, what is sent, decay and update
_MATMULS = 3  # of an iteration


class _Part(NamedTuple):
    """Numbers of ranks that divide a tensor: adjacent ones in `inner_dim`, then others in `shard_dim`."""

    shape: Shape
    inner: int
    inner_dim: int | None
    shards: int
    shard_dim: int


class _DealtMuon(NamedTuple):
    """Muon's matrices as a rank sees them: the layout of each, those of one rank alone, and the waves."""

    layouts: Sequence[TensorLayout]
    waves: Sequence[Sequence[DealtMatrix]]

    @property
    def alone(self) -> list[TensorLayout]:
        return [one for one in self.layouts if one.has_whole_matrices]


def state_bytes_below_adamw(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> int:
    """Returns AdamW's state less Muon's or Adafactor's, in bytes on a rank; 0 for other optimizers."""
    rank = _rank_in_first_replica(plan, rank)
    if plan.run.optimizer.is_adafactor:
        elements, moments = _second_moments(spec, plan, rank=rank)
        return 2 * ITEMSIZE[plan.precision.master] * elements - 4 * moments
    if not plan.run.optimizer.is_muon:
        return 0
    layouts = _deal(spec, plan, rank=rank).layouts
    master = ITEMSIZE[plan.precision.master]
    own = [one.boxes[rank % len(one.boxes)].size for one in layouts]
    row_bytes = 4 * sum(prod(size[:-1]) for size in own) if plan.run.optimizer.muon.row_decay else 0
    return sum(master * prod(size) + 4 for size in own) - row_bytes


def matrix_temporary_bytes(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> int:
    """Returns the most bytes of temporaries of Muon's or Adafactor's update on `rank`.

    Adafactor's are the new means of squares, and a copy of them in an all-reduce. Returns 0 for other
    optimizers.
    """
    rank = _rank_in_first_replica(plan, rank)
    if plan.run.optimizer.is_adafactor:
        _, moments = _second_moments(spec, plan, rank=rank)
        return 4 * moments * min(2, plan.shard_degree * plan.tensor_parallel)
    if not plan.run.optimizer.is_muon:
        return 0
    dealt, itemsize = _deal(spec, plan, rank=rank), ITEMSIZE[_dtype(plan)]
    on_gpu, steps = plan.device == "cuda", plan.run.optimizer.muon.steps
    peaks = [0]
    for layout in dealt.alone:
        rows, columns = sorted(layout.shape[-2:])
        own = layout.boxes[rank % len(layout.boxes)].numel // (rows * columns)
        batch = min(own, max(1, WAVE_ELEMENTS // (rows * columns)) if on_gpu else 1)
        peaks.append(batch * (rows * columns + _iteration_elements((rows, columns), steps)) * itemsize)
    for wave in dealt.waves:
        parts = [part.numel for one in wave if (part := one.parts.get(rank)) is not None]
        owned = [one for one in wave if one.owner == rank]
        sent, arrived = sum(parts), sum(one.numel for one in owned)
        working = [_iteration_elements(one.shape, steps) for one in owned]
        if on_gpu:  # equal shapes in one batch, which is a copy
            shapes = [one.shape for one in owned]
            working = [
                shapes.count(one) * (prod(one) * (shapes.count(one) > 1) + _iteration_elements(one, steps))
                for one in set(shapes)
            ]
        peaks += [itemsize * one for one in (sent + arrived, 2 * arrived, arrived + max(working, default=0))]
        # Bytes per element of an update: kept and new values on a GPU, a cast of bf16 on the CPU.
        of_update = 8 if on_gpu else 4 * (itemsize != 4)
        peaks.append(itemsize * sent + of_update * max(parts, default=0))
    return max(peaks)


def _second_moments(spec: ModelSpec, plan: Plan, *, rank: int) -> tuple[int, int]:
    """Returns the elements, on `rank` of a replica, of trained parameters and of their second moments."""
    trained = ((one, unit) for unit in spec.units for one in unit.parameters if one.requires_grad)
    elements = moments = 0
    for part, count in Counter(_part_of(one, unit, plan=plan) for one, unit in trained).items():
        boxes = _layout(part).boxes
        size = boxes[rank % len(boxes)].size
        elements += count * prod(size)
        for dims in dims_of_means(part.shape).values():
            moments += count * prod(n for dim, n in enumerate(size) if dim not in dims)
    return elements, moments


class MuonSeconds(NamedTuple):
    """Seconds by which an update with Muon is longer than AdamW's of the same elements."""

    computing: float = 0.0
    exchanges: float = 0.0


def muon_seconds(spec: ModelSpec, plan: Plan, *, hardware: Hardware) -> MuonSeconds:
    """Returns the seconds that Muon adds to an update; 0 for other optimizers."""
    if not plan.run.optimizer.is_muon:
        return MuonSeconds()
    dealt, rates = _deal(spec, plan, rank=0), hardware.rates_at_world_size
    steps, itemsize = plan.run.optimizer.muon.steps, ITEMSIZE[_dtype(plan)]
    curve = nearest_dtype_rate_curve(rates.matmul, _dtype(plan))

    def seconds(shape: Shape) -> float:
        flops = newton_schulz_flops(shape, steps=steps)
        return flops / interpolate_rate(curve, flops / (_MATMULS * steps)) if flops else 0.0

    total = longest = sent = moved = 0.0
    ranks = 1
    for one in dealt.layouts:
        size, matrix = one.boxes[0].numel, one.shape[-2:]
        moved += size
        if one.has_whole_matrices:
            longest += size / prod(matrix) * seconds(matrix)  # each rank computes those it has
            continue
        members = len(one.replicas[0])
        ranks, sent = max(ranks, members), sent + size * itemsize
        total += prod(one.shape[:-2]) * seconds(matrix) / members
        longest = max(longest, seconds(matrix))
    layout = shard_group_layout(ranks, per_node=hardware.ranks_per_node, world_size=plan.world_size)
    exchanges = 2 * all_to_all_seconds(sent, group=layout, hardware=hardware)
    elementwise = memory_access_seconds((_ACCESSES - 7) * 4 * moved, rates.memory)
    return MuonSeconds(max(total, longest) + elementwise, exchanges)


def _rank_in_first_replica(plan: Plan, rank: int) -> int:
    """Returns the rank of the first replica that computes what `rank` computes."""
    return rank % (plan.shard_degree * plan.tensor_parallel)


def _dtype(plan: Plan) -> Dtype:
    return plan.run.optimizer.muon.dtype_beside(plan.precision.param)


def _iteration_elements(shape: Shape, steps: int) -> int:
    """Returns the elements that Newton–Schulz has beside its input: its iterate, the next, and X X^T."""
    rows, columns = sorted(shape[-2:])
    return min(steps, 2) * rows * columns + rows * rows


def _deal(spec: ModelSpec, plan: Plan, *, rank: int) -> _DealtMuon:
    """Returns the matrices as training deals them, of the first replica. Cached on `spec`."""
    section, cache = plan.run.optimizer, spec.derived_value_cache
    degrees = (plan.replicate_degree, plan.shard_degree, plan.tensor_parallel, plan.expert_parallel)
    groups = tuple((group.match, group.kind) for group in section.groups)
    key = ("muon", rank, *degrees, plan.strategy, plan.run.offload, section.muon, groups)
    if key not in cache:
        parts = [
            _part_of(parameter, unit, plan=plan)
            for unit in spec.units
            for parameter in unit.parameters
            if _is_muons(parameter, plan)
        ]
        layouts = [_layout(part) for part in parts]
        cost = partial(newton_schulz_flops, steps=section.muon.steps)
        cache[key] = _DealtMuon(layouts, deal_matrices(layouts, rank=rank, cost=cost))
    return cast(_DealtMuon, cache[key])


def _is_muons(parameter: ParamSpec, plan: Plan) -> bool:
    groups = plan.run.optimizer.groups
    kind = next((group.kind for group in groups if group.matches(parameter.name)), None)
    return parameter.requires_grad and (parameter.is_hidden_matrix if kind is None else kind == "muon")


def _part_of(parameter: ParamSpec, unit: UnitSpec, *, plan: Plan) -> _Part:
    settings = MergedUnitSettings.for_unit(plan, unit.override, kept=unit.kept, has_experts=unit.has_experts)
    inner, inner_dim, shape = plan.tensor_parallel, parameter.divided_dim, list(parameter.shape)
    if unit.has_experts and plan.has_expert_mesh:
        inner, inner_dim = plan.expert_parallel, 0
    if inner_dim is not None:
        shape[inner_dim] = -(-shape[inner_dim] // inner)
    shard_dim = expert_shard_dim(tuple(shape), settings.shard_degree) if settings.shards_any_dim else 0
    return _Part(parameter.shape, inner, inner_dim, settings.shard_degree, shard_dim)


@lru_cache(maxsize=256)  # more than the shapes of a model; large for many ranks
def _layout(part: _Part) -> TensorLayout:
    """Returns the layout over the first inner * shards ranks. Ranks that share matmuls are adjacent."""
    boxes: list[Box] = []
    for shard in range(part.shards):
        for place in range(part.inner):
            begin, size = [0] * len(part.shape), list(part.shape)
            if part.inner_dim is not None:
                _divide(begin, size, dim=part.inner_dim, ranks=part.inner, place=place)
            _divide(begin, size, dim=part.shard_dim, ranks=part.shards, place=shard)
            boxes.append(Box(tuple(begin), tuple(size)))
    every = range(len(boxes))
    replicas = (
        [every] if part.inner_dim is not None else [every[at :: part.inner] for at in range(part.inner)]
    )
    return TensorLayout(part.shape, tuple(map(tuple, replicas)), boxes)


def _divide(begin: list[int], size: list[int], *, dim: int, ranks: int, place: int) -> None:
    each = -(-size[dim] // ranks)
    first = min(place * each, size[dim])
    begin[dim], size[dim] = begin[dim] + first, min(each, size[dim] - first)
