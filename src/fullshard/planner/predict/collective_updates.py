"""Differences of updates in which ranks send each other tensors (Muon, SOAP, Adafactor) from AdamW's.

See `spec.dealing`, `training.whole_matrices` and `training.adafactor`.

P: elements of matrices, W: ranks of a replica, b: bytes per element of Newton–Schulz; 4 with SOAP

state         Muon: 4 bytes per element, in fp32, where AdamW has 8 and a step count; NorMuon: 4 per row more.
              SOAP: AdamW's, and 8 (m² + n²) per m x n matrix.
temporaries   of a wave, on a rank with parts of S elements that owns O elements: the parts and what arrives,
              S + O; what arrives, in matrices, 2 O; O and Newton–Schulz, 2 m n + m² for m <= n; and back.
              A matrix that is whole on its rank needs 3 m n + m². With SOAP, O counts all state too.
seconds       the FLOP, max(largest matrix, sum / W), QR at the rate of matmuls; two exchanges, in each of
              which a rank sends (W - 1) / W² P b bytes, with SOAP all state too, as far as it changes; reads
              and writes of elements. Nothing hides them. Adafactor: up to three all-reduces per mesh axis.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple, cast

from fullshard.planner.predict.collectives import all_to_all_seconds, collective_seconds, shard_group_layout
from fullshard.planner.predict.phases import memory_access_seconds, nearest_dtype_rate_curve
from fullshard.spec.dealing import (
    WAVE_ELEMENTS,
    DealtMatrix,
    TensorLayout,
    build_tensor_layout,
    deal_matrices,
    deal_state,
    dims_of_means,
)
from fullshard.spec.machine.hardware import Hardware, interpolate_rate
from fullshard.spec.model import ModelSpec, ParamSpec, UnitSpec
from fullshard.spec.plan import ITEMSIZE, Dtype, MergedUnitSettings, Plan
from fullshard.spec.settings.model_section import expert_shard_dim
from fullshard.spec.shard_layout import RankMesh
from fullshard.spec.weight_map import Shape

_ACCESSES = 14  # of each element: scaling, momentum, direction, what is sent, decay and update
_MATMULS, _SOAP_MATMULS = 3, 8  # of an iteration of Newton–Schulz; of a step


class _Part(NamedTuple):
    """Numbers of ranks that divide a tensor: adjacent ones in `inner_dim`, then others in `shard_dim`."""

    shape: Shape
    inner: int
    inner_dim: int | None
    shards: int
    shard_dim: int


class _DealtBatch(NamedTuple):
    """Parameters that are dealt together (`MatrixUpdate.batch`), and the waves of a rank.

    layouts: those of all parameters, for each tensor that owners need; first those of parameters themselves
    """

    layouts: Sequence[Sequence[TensorLayout]]
    waves: Sequence[Sequence[DealtMatrix]]


def state_bytes_below_adamw(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> int:
    """Returns AdamW's state less Muon's, SOAP's or Adafactor's, in bytes on a rank; else 0."""
    rank, section = _rank_in_first_replica(plan, rank), plan.run.optimizer
    master = ITEMSIZE[plan.precision.master]
    if section.is_adafactor:
        elements, moments = _second_moments(spec, plan, rank=rank)
        return 2 * master * elements - 4 * moments
    below = 0
    for batch in _deal(spec, plan, rank=rank):
        if section.matrix_kind == "muon":
            below += sum(master * one.boxes[rank % len(one.boxes)].numel + 4 for one in batch.layouts[0])
        for one in (one for layouts in batch.layouts if layouts is not batch.layouts[0] for one in layouts):
            size = one.boxes[rank % len(one.boxes)].size
            below -= 4 * prod(own if n > 1 else 1 for own, n in zip(size, one.shape, strict=True))
    return below


def collective_temporary_bytes(spec: ModelSpec, plan: Plan, *, rank: int = 0) -> int:
    """Returns the most bytes of temporaries of Muon's, SOAP's or Adafactor's update on `rank`.

    Adafactor's are the new means of squares, and a copy of them in an all-reduce. Returns 0 for other
    optimizers.
    """
    rank = _rank_in_first_replica(plan, rank)
    if plan.run.optimizer.is_adafactor:
        _, moments = _second_moments(spec, plan, rank=rank)
        return 4 * moments * min(2, plan.shard_degree * plan.tensor_parallel)
    itemsize, on_gpu, peaks = ITEMSIZE[_dtype(plan)], plan.device == "cuda", [0]
    for batch in _deal(spec, plan, rank=rank):
        for matrices in zip(*batch.layouts, strict=True):
            layout, numel = matrices[0], prod(matrices[0].shape[-2:])
            if layout.has_whole_matrices:
                own = layout.boxes[rank % len(layout.boxes)].numel // numel
                together = min(own, max(1, WAVE_ELEMENTS // numel) if on_gpu else 1)
                copies = sum(prod(one.shape[-2:]) for one in matrices)
                peaks.append(together * (copies + _working_elements(layout.shape, plan)) * itemsize)
        for wave in batch.waves:
            every = [deal_state(wave, layouts, rank=rank) for layouts in batch.layouts]
            parts = [[one.parts[rank].numel for one in dealt if rank in one.parts] for dealt in every]
            sent = [itemsize * sum(numels) for numels in parts]
            arrived = [itemsize * sum(one.numel for one in dealt if one.owner == rank) for dealt in every]
            shapes = [one.shape for one in wave if one.owner == rank]
            working = [_working_elements(one, plan) for one in shapes]
            if on_gpu and plan.run.optimizer.matrix_kind == "muon":  # equal shapes in one batch, a copy
                each = Counter(shapes).items()
                working = [n * (prod(one) * (n > 1) + _working_elements(one, plan)) for one, n in each]
            for number, (own, flat) in enumerate(zip(sent, arrived, strict=True)):
                peaks += [sum(arrived[: number + 1]) + max(own, flat), own + sum(sent[number - 1 : number])]
            # Bytes per element of an update: kept and new values on a GPU, a cast of bf16 on the CPU.
            of_update = 8 if on_gpu else 4 * (itemsize != 4)
            peaks += [sum(arrived) + itemsize * max(working, default=0)]
            peaks += [sent[0] + of_update * max(parts[0], default=0)]
    return max(peaks)


def _second_moments(spec: ModelSpec, plan: Plan, *, rank: int) -> tuple[int, int]:
    """Returns the elements, on `rank` of a replica, of trained parameters and of their second moments."""
    elements = moments = 0
    for part, count in _count_trained_parts(spec, plan).items():
        boxes = _layout(part).boxes
        size = boxes[rank % len(boxes)].size
        elements += count * prod(size)
        for dims in dims_of_means(part.shape).values():
            moments += count * prod(n for dim, n in enumerate(size) if dim not in dims)
    return elements, moments


def _count_trained_parts(spec: ModelSpec, plan: Plan) -> Counter[_Part]:
    trained = ((one, unit) for unit in spec.units for one in unit.parameters if one.requires_grad)
    return Counter(_part_of(one, unit, plan=plan) for one, unit in trained)


class CollectiveUpdateSeconds(NamedTuple):
    """Seconds by which an update of Muon, SOAP or Adafactor is longer than one without exchanges."""

    computing: float = 0.0
    exchanges: float = 0.0


def collective_update_seconds(spec: ModelSpec, plan: Plan, *, hardware: Hardware) -> CollectiveUpdateSeconds:
    """Returns the seconds that exchanges, and Muon's or SOAP's matmuls, add to an update."""
    section, rates = plan.run.optimizer, hardware.rates_at_world_size
    if section.is_adafactor:
        return CollectiveUpdateSeconds(exchanges=_adafactor_exchange_seconds(spec, plan, hardware=hardware))
    if (kind := section.matrix_kind) is None:
        return CollectiveUpdateSeconds()
    curve = nearest_dtype_rate_curve(rates.matmul, _dtype(plan))
    products = _MATMULS * section.muon.steps if kind == "muon" else _SOAP_MATMULS

    def seconds(shape: Shape) -> float:
        flops = section.matrix_section.flops(shape)
        return flops / interpolate_rate(curve, flops / products) if flops else 0.0

    total = longest = sent = accessed = 0.0
    ranks = 1
    for one in (one for batch in _deal(spec, plan, rank=0) for one in batch.layouts[0]):
        size, matrix = one.boxes[0].numel, one.shape[-2:]
        travels = size / prod(one.shape) * _bytes_that_travel(one.shape, plan)
        accessed += (_ACCESSES - 7) * 4 * size + (4 * travels if kind == "soap" else 0)
        if one.has_whole_matrices:
            longest += size / prod(matrix) * seconds(matrix)  # each rank computes those it has
            continue
        members = len(one.replicas[0])
        ranks, sent = max(ranks, members), sent + travels
        total += prod(one.shape[:-2]) * seconds(matrix) / members
        longest = max(longest, seconds(matrix))
    layout = shard_group_layout(ranks, per_node=hardware.ranks_per_node, world_size=plan.world_size)
    computing = max(total, longest) + memory_access_seconds(accessed, rates.memory)
    exchange = all_to_all_seconds(sent / 2, group=layout, hardware=hardware)
    return CollectiveUpdateSeconds(computing, 2 * exchange)


def _bytes_that_travel(shape: Shape, plan: Plan) -> float:
    """Returns the bytes of a parameter and its state that go to owners and back in a step, over all ranks."""
    section = plan.run.optimizer
    refreshes = 1 / section.soap.precondition_frequency
    state = section.matrix_section.state_shapes(shape).items()
    trips = 2 if section.matrix_kind == "muon" else 5  # gradient and moments; update and second moment
    own = trips * ITEMSIZE[_dtype(plan)] * prod(shape)
    return own + sum(4 * prod(one) * (1 + refreshes if key.endswith("basis") else 2) for key, one in state)


def _adafactor_exchange_seconds(spec: ModelSpec, plan: Plan, *, hardware: Hardware) -> float:
    """Returns the seconds of the all-reduces of Adafactor. See [Note: sums over ranks] in its module."""
    sent = Counter[tuple[str, int, int]]()  # by (sum, ranks, distance of ranks)
    for part, count in _count_trained_parts(spec, plan).items():
        size, degree = _layout(part).boxes[0].size, plan.tensor_parallel
        for dim, axis in ((part.shard_dim, (plan.shard_degree, degree)), (part.inner_dim, (degree, 1))):
            sent["update", *axis] += 4 * count * (dim is not None)
            for over in (over for over in dims_of_means(part.shape).values() if dim in over):
                sent["means", *axis] += 4 * count * prod(n for at, n in enumerate(size) if at not in over)
                sent["mean of C", *axis] += 4 * count * prod(size[:-2]) * (dim == len(size) - 1)
    layout = partial(shard_group_layout, per_node=hardware.ranks_per_node, world_size=plan.world_size)
    return sum(
        collective_seconds("all_reduce", size, group=layout(ranks, distance=distance), hardware=hardware)
        for (_, ranks, distance), size in sent.items()
        if size
    )


def _rank_in_first_replica(plan: Plan, rank: int) -> int:
    """Returns the rank of the first replica that computes what `rank` computes."""
    return rank % (plan.shard_degree * plan.tensor_parallel)


def _dtype(plan: Plan) -> Dtype:
    return plan.run.optimizer.matrix_section.dtype_beside(plan.precision.param)


def _working_elements(shape: Shape, plan: Plan) -> int:
    """Returns the elements that the update of a matrix has beside its input.

    Newton–Schulz: its iterate, the next, and X X^T. SOAP, in a refresh: the update and L Q_L, with V sorted
    and the indices for it, or with the sorted product and its decomposition.
    """
    rows, columns = sorted(shape[-2:])
    if plan.run.optimizer.matrix_kind == "muon":
        return min(plan.run.optimizer.muon.steps, 2) * rows * columns + rows * rows
    numel, bases = rows * columns, plan.run.optimizer.soap.state_shapes((rows, columns)).values()
    return max(4 * numel, *(max(4 * numel + prod(one), numel + 4 * prod(one)) for one in bases))


def _deal(spec: ModelSpec, plan: Plan, *, rank: int) -> list[_DealtBatch]:
    """Returns the matrices as training deals them, of the first replica. Cached on `spec`."""
    section, cache = plan.run.optimizer, spec.derived_value_cache
    shapes_of = section.matrix_section.state_shapes
    degrees = (plan.replicate_degree, plan.shard_degree, plan.tensor_parallel, plan.expert_parallel)
    groups = tuple((group.match, group.kind) for group in section.groups)
    settings = (section.matrix_kind, section.matrix_section, groups)
    key = ("collective updates", rank, *degrees, plan.strategy, plan.run.offload, *settings)
    if key not in cache:
        by_state = defaultdict[tuple[str, ...], list[_Part]](list)
        for parameter, unit in ((one, of) for of in spec.units for one in of.parameters):
            if _is_whole_matrix(parameter, plan):
                by_state[tuple(shapes_of(parameter.shape))].append(_part_of(parameter, unit, plan=plan))
        found = list[_DealtBatch]()
        for keys, parts in by_state.items():  # with SOAP, gradient and moments are sharded alike
            layouts = [[_layout(part) for part in parts]] * (3 if section.matrix_kind == "soap" else 1)
            layouts += [[_layout(p._replace(shape=shapes_of(p.shape)[key])) for p in parts] for key in keys]
            waves = deal_matrices(layouts[0], rank=rank, cost=section.matrix_section.flops)
            found.append(_DealtBatch(layouts, waves))
        cache[key] = found
    return cast(list[_DealtBatch], cache[key])


def _is_whole_matrix(parameter: ParamSpec, plan: Plan) -> bool:
    section = plan.run.optimizer
    kind = next((group.kind for group in section.groups if group.matches(parameter.name)), None)
    is_matrix = parameter.is_hidden_matrix if kind is None else kind != "adamw"
    return section.matrix_kind is not None and parameter.requires_grad and is_matrix


def _part_of(parameter: ParamSpec, unit: UnitSpec, *, plan: Plan) -> _Part:
    settings = MergedUnitSettings.for_unit(plan, unit.override, kept=unit.kept, has_experts=unit.has_experts)
    inner, inner_dim, shape = plan.tensor_parallel, parameter.divided_dim, list(parameter.shape)
    if unit.has_experts and plan.has_expert_mesh:
        inner, inner_dim = plan.expert_parallel, 0
    if inner_dim is not None:
        shape[inner_dim] = -(-shape[inner_dim] // inner)
    shard_dim = expert_shard_dim(tuple(shape), settings.shard_degree) if settings.shards_any_dim else 0
    return _Part(parameter.shape, inner, inner_dim, settings.shard_degree, shard_dim)


def _layout(part: _Part) -> TensorLayout:
    """Returns the layout over the first inner * shards ranks. Ranks that share matmuls are adjacent."""
    cuts: list[tuple[int, ...]] = [() for _ in part.shape]
    if part.inner_dim is not None:
        cuts[part.inner_dim] = (1,)
    cuts[part.shard_dim] += (0,)
    mesh = RankMesh((part.shards, part.inner), tuple(range(part.shards * part.inner)))
    return build_tensor_layout(part.shape, tuple(cuts), mesh=mesh)
