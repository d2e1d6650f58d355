"""Groups of a rank's trained shards, which an offload target reads, updates and writes one by one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fullshard.errors import PlanError

# A large shard is split at multiples of this. No vector of a fused update then crosses a split, so the
# results equal those of an update of the whole shard.
CUT_ELEMENTS = 1024
PAGE_BYTES = 4096  # each part of a group's state begins at a page
UNIT_BUFFERS = 3  # units whose shards are in memory while all shards are on the drive
_PIECE_ELEMENTS = 1 << 22  # 64 MiB of fp32 state and gradients: large enough to copy at the full rate
_MOST_GROUPS = 100_000
ROUNDING_CHUNK_ELEMENTS = (
    1 << 16
)  # that the CPU rounds stochastically at once: temporaries stay in its caches
_BEGIN_ELEMENTS = 64  # segments begin at multiples of this: full vectors from their first element on


@dataclass(frozen=True)
class ShardSizes:
    """Sizes of the shards of one trained parameter.

    numel: elements of this rank's shard
    max_numel: elements of the largest shard of any rank
    dtype: torch's name of the dtype (`float32`)
    """

    name: str
    numel: int
    max_numel: int
    dtype: str


@dataclass(frozen=True)
class ShardSegment:
    """A part of this rank's shard of the parameter `name`: its elements from `begin` to `end`.

    offset: position of the first element in the group
    """

    name: str
    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    @property
    def slice_in_group(self) -> slice:
        """Position of the segment in each flat state tensor (such as a moment) of its group."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def slice_in_shard(self) -> slice:
        """Position of the segment in this rank's flat shard of the parameter."""
        return slice(self.begin, self.end)


@dataclass(frozen=True)
class OffloadGroup:
    """Segments of shards of one dtype, which an offload target reads, updates and writes together.

    names: the group's parameters, identical on every rank
    segments: this rank's elements of these parameters, possibly none
    """

    index: int
    dtype: str
    names: tuple[str, ...]
    segments: tuple[ShardSegment, ...]

    @property
    def numel_with_gaps(self) -> int:
        """Number of elements up to the end of the last segment, including gaps between segments."""
        return self.segments[-1].offset + self.segments[-1].numel if self.segments else 0


def copy_chunk_elements(groups: Iterable[OffloadGroup]) -> int:
    """Returns the elements to copy to the device at once: 1/16 of the largest group, from 1 Ki to 4 Mi."""
    largest = max((group.numel_with_gaps for group in groups), default=0)
    return max(CUT_ELEMENTS, min(_PIECE_ELEMENTS, largest // 16) // CUT_ELEMENTS * CUT_ELEMENTS)


def page_aligned_bytes(numel: int, itemsize: int) -> int:
    """Returns the bytes of `numel` elements, rounded up to whole pages of 4 KiB."""
    return -(-numel * itemsize // PAGE_BYTES) * PAGE_BYTES


def group_shards(held: Iterable[ShardSizes], *, sub_group_parameters: int) -> tuple[OffloadGroup, ...]:
    """Returns the shards `held`, in their order, in groups of at most `sub_group_parameters` elements.

    The limit is a multiple of CUT_ELEMENTS. Every rank gets the same number of groups, with the same
    parameters. A parameter that fits into a group is not split. Each part of a split parameter except the
    last fills its group. Raises PlanError for more than 100,000 groups.
    """
    held = tuple(held)
    limit = max(CUT_ELEMENTS, sub_group_parameters // CUT_ELEMENTS * CUT_ELEMENTS)
    count = sum(one.max_numel for one in held) // limit
    if count > _MOST_GROUPS:
        raise PlanError(
            "the state of a rank would be in too many groups.",
            got=f"{count:,} of {limit:,} parameters, offload.sub_group_parameters = {sub_group_parameters:,}",
            why="the update goes through them one by one",
            fix=f"offload.sub_group_parameters = {count * limit // 1000:,} or more; or more ranks",
        )
    groups: list[OffloadGroup] = []
    names: list[str] = []
    segments: list[ShardSegment] = []
    dtype, filled = "", 0

    def close_group() -> None:
        nonlocal names, segments, filled
        if names:
            groups.append(OffloadGroup(len(groups), dtype, tuple(names), tuple(segments)))
        names, segments, filled = [], [], 0

    for one in held:
        if one.dtype != dtype or filled + one.max_numel > limit:
            close_group()
        dtype = one.dtype
        for begin in range(0, one.max_numel, limit):
            if begin:
                close_group()
            end = min(one.max_numel, begin + limit)
            names.append(one.name)
            if begin < one.numel:
                segments.append(ShardSegment(one.name, begin, min(end, one.numel), filled))
            filled += -(-(end - begin) // _BEGIN_ELEMENTS) * _BEGIN_ELEMENTS
    close_group()
    return tuple(groups)


def join_groups_of_split_parameters(groups: Sequence[OffloadGroup]) -> Iterator[tuple[OffloadGroup, ...]]:
    """Yields the smallest tuples of consecutive groups in which no parameter is split across two tuples."""
    portion: list[OffloadGroup] = []
    for group, after in pairwise([*groups, None]):
        assert group is not None, "None is the last alone"
        portion.append(group)
        if after is None or after.names[0] != group.names[-1]:
            yield tuple(portion)
            portion = []
