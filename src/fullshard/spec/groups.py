"""How a rank's trained shards are cut into groups: what a tier reads, updates and writes at once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fullshard.errors import PlanError

# A large shard is cut at multiples of it: no vector of a fused update crosses a cut, so that the numbers
# are those of an update of the whole.
CUT_ELEMENTS = 1024
PAGE_BYTES = 4096  # each part of a group's state begins at one
UNIT_BUFFERS = 3  # units whose own shards are in memory while all are on the drive
_PIECE_ELEMENTS = 1 << 22  # 64 MiB of fp32 state and gradients: long enough a copy for the full rate
_MOST_GROUPS = 100_000
_BEGIN_ELEMENTS = 64  # segments begin at multiples of it: full vectors from their first element on


@dataclass(frozen=True)
class ShardSize:
    """One trained parameter, of which this rank holds `numel` elements, and no rank more than `most`, in the
    dtype `dtype` (as torch names it: `float32`)."""

    name: str
    numel: int
    most: int
    dtype: str


@dataclass(frozen=True)
class Segment:
    """Elements `begin` to `end` of this rank's shard of the parameter `name`, from `offset` of the group."""

    name: str
    begin: int
    end: int
    offset: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Group:
    """Segments of one dtype. `names`: the parameters, on every rank the same; `segments`: what this rank has
    of them, maybe nothing."""

    index: int
    dtype: str
    names: tuple[str, ...]
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        """Elements from the first to behind the last, gaps counted."""
        return self.segments[-1].offset + self.segments[-1].numel if self.segments else 0


def piece_elements(groups: Iterable[Group]) -> int:
    """How many elements of a group are copied into the device's memory at once, where it is updated there: a
    sixteenth of the largest group, so that what does not overlap at its ends is little; at most 4 Mi."""
    largest = max((group.numel for group in groups), default=0)
    return max(CUT_ELEMENTS, min(_PIECE_ELEMENTS, largest // 16) // CUT_ELEMENTS * CUT_ELEMENTS)


def part_bytes(numel: int, itemsize: int) -> int:
    """Of one part of a group's state (masters, or one of the moments), or of one shard: whole pages."""
    return -(-numel * itemsize // PAGE_BYTES) * PAGE_BYTES


def group_shards(held: Iterable[ShardSize], *, group_parameters: int) -> tuple[Group, ...]:
    """Groups of at most `group_parameters` elements (or of CUT_ELEMENTS, if that is more), in the order of
    `held`; on every rank as many, with the same parameters. A parameter stays whole where it fits into a
    group; of one that does not, each part but the last fills its group.

    Raises PlanError for more groups than an update can go through one by one.
    """
    held = tuple(held)
    limit = max(CUT_ELEMENTS, group_parameters // CUT_ELEMENTS * CUT_ELEMENTS)
    count = sum(one.most for one in held) // limit
    if count > _MOST_GROUPS:
        raise PlanError(
            "a rank's state would be in too many groups.",
            got=f"{count:,} of {limit:,} parameters, offload.group_parameters = {group_parameters:,}",
            why="the update goes through them one by one",
            fix=f"offload.group_parameters = {count * limit // 1000:,} or more; or more ranks",
        )
    groups: list[Group] = []
    names: list[str] = []
    segments: list[Segment] = []
    dtype, filled = "", 0

    def close() -> None:
        nonlocal names, segments, filled
        if names:
            groups.append(Group(len(groups), dtype, tuple(names), tuple(segments)))
        names, segments, filled = [], [], 0

    for one in held:
        if one.dtype != dtype or filled + one.most > limit:
            close()
        dtype = one.dtype
        for begin in range(0, one.most, limit):
            if begin:
                close()
            end = min(one.most, begin + limit)
            names.append(one.name)
            if begin < one.numel:
                segments.append(Segment(one.name, begin, min(end, one.numel), filled))
            filled += -(-(end - begin) // _BEGIN_ELEMENTS) * _BEGIN_ELEMENTS
    close()
    return tuple(groups)


def portions(groups: Sequence[Group]) -> Iterator[tuple[Group, ...]]:
    """Consecutive groups that together hold each of their parameters whole: as few at once as can be."""
    portion: list[Group] = []
    for group, after in pairwise([*groups, None]):
        assert group is not None, "None is the last alone"
        portion.append(group)
        if after is None or after.names[0] != group.names[-1]:
            yield tuple(portion)
            portion = []
