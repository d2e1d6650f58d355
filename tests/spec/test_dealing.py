"""Matrices are dealt alike on all ranks, evenly, and each part is sent once."""

from functools import partial
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from fullshard.spec.dealing import (
    WAVE_ELEMENTS,
    DealtMatrix,
    TensorLayout,
    build_tensor_layout,
    deal_matrices,
    newton_schulz_flops,
)
from fullshard.spec.shard_layout import Box, RankMesh
from fullshard.spec.weight_map import Shape

COST = partial(newton_schulz_flops, steps=5)


SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(*[st.integers(1, 4)] * 3)),
    min_size=1,
)


def by_rows(shape: Shape, ranks: int, *, replicas: int = 1) -> TensorLayout:
    """Rows over `ranks` ranks, the last of which have fewer or none, in each of the replicas."""
    each = -(-shape[0] // ranks)
    boxes = [
        Box(
            (begin := min(at * each, shape[0]), *[0] * (len(shape) - 1)),
            (min(each, shape[0] - begin), *shape[1:]),
        )
        for at in range(ranks)
    ]
    groups = tuple(tuple(range(ranks * i, ranks * (i + 1))) for i in range(replicas))
    return TensorLayout(shape, groups, dict(enumerate(boxes * replicas)))


@given(SHAPES, st.integers(1, 4), st.integers(1, 2))
def test_a_mesh_that_cuts_rows_gives_each_rank_its_rows(shapes: list[Shape], ranks: int, replicas: int):
    mesh = RankMesh((replicas, ranks), tuple(range(replicas * ranks)))
    for shape in shapes:
        cuts = ((1,), *[()] * (len(shape) - 1))
        assert build_tensor_layout(shape, cuts, mesh=mesh) == by_rows(shape, ranks, replicas=replicas)


def dealt(layouts: list[TensorLayout], world: int) -> list[list[list[DealtMatrix]]]:
    return [deal_matrices(layouts, rank=rank, cost=COST) for rank in range(world)]


@given(SHAPES, st.integers(1, 4), st.integers(1, 2))
def test_all_ranks_of_a_replica_deal_alike_and_every_part_is_counted_once(
    shapes: list[Shape], ranks: int, replicas: int
) -> None:
    layouts = [by_rows(shape, ranks, replicas=replicas) for shape in shapes]
    every = dealt(layouts, ranks * replicas)
    keys = [[[(m.tensor, m.index, m.owner % ranks) for m in wave] for wave in waves] for waves in every]
    assert all(one == keys[0] for one in keys)
    for rank, waves in enumerate(every):
        for one in (matrix for wave in waves for matrix in wave):
            assert one.owner // ranks == rank // ranks  # in the own replica
            assert rank != one.owner or sum(part.numel for part in one.parts.values()) == one.numel
    whole = sum(prod(one.shape[:-2]) for one in layouts if not one.has_whole_matrices)
    assert len({key[:2] for wave in keys[0] for key in wave}) == whole


@given(SHAPES, st.integers(2, 4))
def test_no_rank_computes_more_than_a_fair_share_and_one_matrix(shapes: list[Shape], ranks: int) -> None:
    layouts = [by_rows(shape, ranks) for shape in shapes]
    loads, costs = [0.0] * ranks, list[float]()
    for one in (matrix for wave in dealt(layouts, 1)[0] for matrix in wave):
        loads[one.owner] += COST(one.shape)
        costs.append(COST(one.shape))
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0.0)


def test_waves_bound_what_an_owner_has_at_once() -> None:
    side = 3000  # 9 M elements: one to a wave
    waves = deal_matrices([by_rows((side, side), 2)] * 5, rank=0, cost=COST)
    assert [[one.owner for one in wave] for wave in waves] == [[0, 1], [0, 1], [0]]
    small = deal_matrices([by_rows((64, 64), 2)] * 5, rank=0, cost=COST)
    assert len(small) == 1
    assert sum(one.numel for one in small[0] if one.owner == 0) <= WAVE_ELEMENTS


def test_stacks_by_expert_are_not_sent_and_those_by_rows_are() -> None:
    assert by_rows((4, 8, 8), 2).has_whole_matrices
    columns = TensorLayout((2, 8, 8), ((0, 1),), {i: Box((0, 4 * i, 0), (2, 4, 8)) for i in (0, 1)})
    assert not columns.has_whole_matrices
    assert [one.index for one in deal_matrices([columns], rank=0, cost=COST)[0]] == [(0,), (1,)]
    alone = TensorLayout((8, 8), ((0,), (1,)), dict.fromkeys((0, 1), Box((0, 0), (8, 8))))
    assert deal_matrices([alone], rank=1, cost=COST) == []
