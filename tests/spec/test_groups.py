"""Groups: every element once, none too large, on all ranks the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.spec.groups import (
    CUT_ELEMENTS,
    OffloadGroup,
    ShardSizes,
    group_shards,
    join_groups_of_split_parameters,
)

VECTOR = 64  # elements: the widest that a processor takes at once, of the narrowest dtype


@st.composite
def worlds(draw: st.DrawFn) -> list[list[ShardSizes]]:
    """Shards of the same parameters on each of some ranks."""
    ranks = draw(st.integers(1, 4))
    sizes = st.integers(1, 200) | st.integers(900, 1100) | st.integers(1, 9000)
    most = draw(st.lists(sizes, max_size=12))
    dtypes = draw(st.lists(st.sampled_from(["float32", "bfloat16"]), min_size=len(most), max_size=len(most)))
    return [
        [
            ShardSizes(
                f"p{i}",
                numel=draw(st.sampled_from([0, size, draw(st.integers(0, size))])),
                max_numel=size,
                dtype=dtype,
            )
            for i, (size, dtype) in enumerate(zip(most, dtypes, strict=True))
        ]
        for _ in range(ranks)
    ]


LIMITS = st.integers(1, 9000)


def limit_of(sub_group_parameters: int) -> int:
    return max(CUT_ELEMENTS, sub_group_parameters // CUT_ELEMENTS * CUT_ELEMENTS)


@given(worlds(), LIMITS)
def test_every_element_is_in_one_group(world: list[list[ShardSizes]], limit: int) -> None:
    for shards in world:
        groups = group_shards(shards, sub_group_parameters=limit)
        for one in shards:
            own = [s for group in groups for s in group.segments if s.name == one.name]
            ends = [0, *(segment.end for segment in own)]
            assert [segment.begin for segment in own] == ends[:-1]
            assert ends[-1] == one.numel
            assert {g.dtype for g in groups if any(s.name == one.name for s in g.segments)} <= {one.dtype}


@given(worlds(), LIMITS)
def test_groups_are_within_their_limit_without_overlap(world: list[list[ShardSizes]], limit: int) -> None:
    for shards in world:
        for index, group in enumerate(group_shards(shards, sub_group_parameters=limit)):
            assert group.index == index
            assert group.numel_with_gaps <= limit_of(limit)
            assert all(one.numel > 0 and one.offset % VECTOR == 0 for one in group.segments)
            assert all(a.offset + a.numel <= b.offset for a, b in pairwise(group.segments))


@given(worlds(), LIMITS)
def test_large_shards_are_cut_at_multiples(world: list[list[ShardSizes]], limit: int) -> None:
    for shards in world:
        groups = group_shards(shards, sub_group_parameters=limit)
        for one in shards:
            names = [group.names.count(one.name) for group in groups if one.name in group.names]
            assert names == [1] * -(-one.max_numel // limit_of(limit))
        for segment in (s for group in groups for s in group.segments):
            assert segment.begin % CUT_ELEMENTS == 0


@given(worlds(), LIMITS)
def test_groups_are_the_same_on_all_ranks(world: list[list[ShardSizes]], limit: int) -> None:
    def names_of(groups: tuple[OffloadGroup, ...]) -> list[tuple[int, str, tuple[str, ...]]]:
        return [(group.index, group.dtype, group.names) for group in groups]

    first, *others = (group_shards(shards, sub_group_parameters=limit) for shards in world)
    for groups in (first, *others):
        assert names_of(groups) == names_of(first)
        assert all({s.name for s in group.segments} <= set(group.names) for group in groups)
    in_order = list(dict.fromkeys(name for group in first for name in group.names))
    assert in_order == [one.name for one in world[0]]


@given(worlds(), LIMITS)
def test_segments_lie_at_the_same_place_on_all_ranks(world: list[list[ShardSizes]], limit: int) -> None:
    """A rank that has fewer rows has the first ones: so nothing that is kept beside them moves."""
    places: dict[tuple[str, int], tuple[int, int]] = {}
    for shards in world:
        for group in group_shards(shards, sub_group_parameters=limit):
            for one in group.segments:
                assert places.setdefault((one.name, one.begin), (group.index, one.offset)) == (
                    group.index,
                    one.offset,
                )


@given(worlds(), LIMITS)
def test_no_parameter_is_split_over_two_portions(world: list[list[ShardSizes]], limit: int) -> None:
    groups = group_shards(world[0], sub_group_parameters=limit)
    found = list(join_groups_of_split_parameters(groups))
    assert [group for portion in found for group in portion] == list(groups)
    names = [name for portion in found for name in {name for group in portion for name in group.names}]
    assert len(names) == len(set(names))
    for portion in found:
        assert all(set(a.names) & set(b.names) for a, b in pairwise(portion))


def test_more_groups_than_an_update_can_go_through_are_refused_before_they_are_made() -> None:
    shards = [ShardSizes("p", numel=10**18, max_numel=10**18, dtype="float32")]
    with pytest.raises(PlanError, match="too many groups"):
        group_shards(shards, sub_group_parameters=64_000_000)
