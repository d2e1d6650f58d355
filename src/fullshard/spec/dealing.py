"""Matrices of sharded tensors, dealt to the ranks that get whole ones, in waves. Pure functions of shapes.

[Note: owners]
An update that needs whole matrices would need every matrix on every rank if each rank did all of it. Here
each matrix has an owner: its rows go there, the owner computes, and the rows of the result go back. With W
ranks, each computes 1/W of all matrices, and sends 2 (W - 1) / W² of their bytes, as much as for gathering
one W-th of them twice.

[Note: replicas compute the same]
Replicas are ranks with the same part of a tensor. Matrices are dealt within each replica, so that replicas
compute the same, each for itself. Dealing over all ranks would divide the computing by the number of
replicas, but each result would have to be sent to all of them, over the slower links between nodes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from fullshard.spec.shard_layout import Box, Cuts, RankMesh, cut_box, uncut_axes
from fullshard.spec.weight_map import Shape

WAVE_ELEMENTS = 1 << 24
"""Elements of whole matrices that an owner has at once, at least one matrix. It bounds temporary memory."""


@dataclass(frozen=True)
class TensorLayout:
    """The parts of a tensor that ranks have.

    replicas: tuples of ranks; the ranks of each have the whole tensor once
    boxes: the part of each rank, by rank
    """

    shape: Shape
    replicas: tuple[tuple[int, ...], ...]
    boxes: Mapping[int, Box]

    @cached_property
    def has_whole_matrices(self) -> bool:
        """True if each rank has all of a matrix (the last two dims), or none of it: nothing is to be sent."""
        return all(box.size[-2:] == self.shape[-2:] or not box.numel for box in self.boxes.values())


@lru_cache(maxsize=256)  # more than the shapes of a model; large for many ranks
def build_tensor_layout(shape: Shape, cuts: Cuts, *, mesh: RankMesh) -> TensorLayout:
    """Returns the part of a tensor that each rank of `mesh` has under `cuts`."""
    boxes, replicas = dict[int, Box](), defaultdict[Shape, list[int]](list)
    for rank, place in zip(mesh.ranks, product(*map(range, mesh.shape)), strict=True):
        boxes[rank] = cut_box(shape, cuts, sizes=mesh.shape, coordinate=place)
        replicas[tuple(place[axis] for axis in uncut_axes(cuts, mesh=mesh))].append(rank)
    return TensorLayout(shape, tuple(map(tuple, replicas.values())), boxes)


@dataclass(frozen=True)
class DealtMatrix:
    """A matrix of one replica, and its owner.

    tensor: index of its tensor
    index: its position in the tensor's leading dims
    members: ranks of the replica
    parts: box in the matrix of the part of this rank, and if it is the owner, of each rank that has a part
    """

    tensor: int
    index: Shape
    shape: Shape
    owner: int
    members: tuple[int, ...]
    parts: dict[int, Box]

    @property
    def numel(self) -> int:
        return prod(self.shape)


def newton_schulz_flops(shape: Shape, *, steps: int) -> float:
    """Returns the FLOP of `steps` Newton–Schulz iterations: steps (4 m² n + 2 m³), m <= n, per matrix."""
    short, long = sorted(shape[-2:])
    return prod(shape[:-2]) * steps * (4.0 * short**2 * long + 2.0 * short**3)


def dims_of_means(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Returns the dims over which each of Adafactor's second moments of a parameter is a mean.

    The keys are those of the optimizer's state. The last two dims are matrices. A vector, or a matrix with
    one row or column, has a moment per element.

    >>> dims_of_means((8, 4, 6))
    {'row_var': (2,), 'col_var': (1,)}
    """
    if len(shape) < 2 or 1 in shape[-2:]:
        return {"variance": ()}
    return {"row_var": (len(shape) - 1,), "col_var": (len(shape) - 2,)}


def deal_matrices(
    layouts: Sequence[TensorLayout], *, rank: int, cost: Callable[[Shape], float]
) -> list[list[DealtMatrix]]:
    """Returns the matrices of `rank`'s replica in waves: largest first, each to the least loaded rank.

    Tensors of which ranks have whole matrices are left out. Every rank gets the same number of waves, and the
    same owners. An owner has at most WAVE_ELEMENTS in a wave, or one matrix. See [Note: owners].

    cost: cost of a matrix of this shape

    >>> halves = RankMesh(shape=(2,), ranks=(0, 1))
    >>> layout = build_tensor_layout((4, 4), ((0,), ()), mesh=halves)
    >>> waves = deal_matrices([layout] * 4, rank=0, cost=prod)
    >>> [matrix.owner for matrix in waves[0]]
    [0, 1, 0, 1]
    """
    found: list[tuple[int, Shape, Shape]] = []
    for number, layout in enumerate(layouts):
        if layout.has_whole_matrices:
            continue
        places = product(*map(range, layout.shape[:-2]))
        found += [(number, index, layout.shape[-2:]) for index in places]
    found.sort(key=lambda one: -cost(one[2]))
    load, places_of = defaultdict[int, float](float), defaultdict[int, tuple[int, int]](lambda: (0, 0))
    waves: list[list[DealtMatrix]] = []
    for number, index, shape in found:
        layout, numel = layouts[number], prod(shape)
        for members in layout.replicas:
            owner = min(members, key=load.__getitem__)
            load[owner] += cost(shape)
            wave, filled = places_of[owner]
            if filled and filled + numel > WAVE_ELEMENTS:
                wave, filled = wave + 1, 0
            places_of[owner] = (wave, filled + numel)
            waves += [[] for _ in range(wave + 1 - len(waves))]
            if rank in members:
                waves[wave].append(DealtMatrix(number, index, shape, owner, members, parts={}))
    return [deal_state(wave, layouts, rank=rank) for wave in waves]


def deal_state(
    wave: Sequence[DealtMatrix], layouts: Sequence[TensorLayout], *, rank: int
) -> list[DealtMatrix]:
    """Returns the matrices of state that belong to the matrices in `wave`, with the same owners.

    layouts: of the state of each parameter, which has as many dims as the parameter
    """

    def parts(one: DealtMatrix) -> dict[int, Box]:
        boxes, holders = layouts[one.tensor].boxes, one.members if one.owner == rank else (rank,)
        return {other: part for other in holders if (part := _part(boxes[other], one.index)).numel}

    return [replace(one, shape=layouts[one.tensor].shape[-2:], parts=parts(one)) for one in wave]


def _part(box: Box, index: Shape) -> Box:
    """Returns the part of the matrix at `index` that is in `box`; an empty one if it is elsewhere."""
    lead = len(index)
    is_inside = all(b <= i < b + n for i, b, n in zip(index, box.begin, box.size, strict=False))
    size = box.size[lead:]
    return Box(box.begin[lead:], size if is_inside else (0,) * len(size))
