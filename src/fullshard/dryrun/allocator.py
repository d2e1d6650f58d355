"""Simulation of CUDA's caching allocator: device memory taken by a sequence of allocations.

Rules: c10/cuda/CUDACachingAllocator.cpp of PyTorch; sizes: c10/core/AllocatorConfig.h; default settings.

[Note: the rules]
round      a request is rounded up to a multiple of 512 bytes.
pool       each stream has two pools: requests of at most 1 MiB are small, others large.
best fit   the smallest free block of the pool that is large enough is taken; of equals, the lowest address.
split      the remainder becomes a free block if it has at least 512 bytes (small pool) or more than 1 MiB
           (large pool). Otherwise the whole block is used.
segment    if no block fits, the device provides a new segment: 2 MiB for a small request, 20 MiB for one
           below 10 MiB, else the request rounded up to 2 MiB.
coalesce   a freed block joins its free neighbours in the segment. Segments are never returned to the device.
           (On an out-of-memory error, the real allocator returns the free segments and retries.)

Host and device run asynchronously, and a block that another stream still reads must not be reused. FSDP2
keeps a reference for as long as needed, so only the order of the host's calls matters here.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fullshard.dryrun.events import AllocateEvent, Event

_MIB = 1 << 20
ROUND = 512
SMALL = _MIB
SMALL_SEGMENT = 2 * _MIB
BELOW_LARGE = 10 * _MIB
LARGE_SEGMENT = 20 * _MIB
ROUND_SEGMENT = 2 * _MIB


@dataclass(frozen=True)
class AllocatorPeak:
    """Highest memory use of a sequence of events, in bytes."""

    allocated: int  # blocks in use, as `torch.cuda.max_memory_allocated` reports them
    reserved: int  # segments, as `torch.cuda.max_memory_reserved` reports them


def simulate_allocator(events: Iterable[Event]) -> AllocatorPeak:
    """Returns the most bytes allocated and reserved at any moment of `events`. See [Note: the rules]."""
    pools: defaultdict[tuple[int, bool], _FreeBlockPool] = defaultdict(_FreeBlockPool)
    used: dict[int, tuple[_AllocatorBlock, _FreeBlockPool]] = {}
    allocated = reserved = most_allocated = 0
    for event in events:
        if isinstance(event, AllocateEvent):
            size = rounded_block_bytes(event.size)
            pool = pools[event.stream, size <= SMALL]
            block = pool.take_best_fit(size)
            if block is None:
                block = _AllocatorBlock(address=reserved, size=new_segment_bytes(size))
                reserved += block.size
            pool.shrink_block(block, size)
            used[event.block] = block, pool
            allocated += block.size
            most_allocated = max(most_allocated, allocated)
        else:
            block, pool = used.pop(event.block)
            allocated -= block.size
            pool.free_block(block)
    return AllocatorPeak(most_allocated, reserved)


def rounded_block_bytes(size: int) -> int:
    """Returns the bytes of the smallest block that serves a request of `size` bytes."""
    return max(ROUND, _round_up(size, ROUND))


def new_segment_bytes(size: int) -> int:
    """Returns the bytes of the segment requested from the device for a rounded request of `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < BELOW_LARGE else _round_up(size, ROUND_SEGMENT)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(eq=False, slots=True)
class _AllocatorBlock:
    """A part of a segment, linked to its neighbours. `address` distinguishes blocks of equal size."""

    address: int
    size: int
    free: bool = False
    left: "_AllocatorBlock | None" = None
    right: "_AllocatorBlock | None" = None


@dataclass
class _FreeBlockPool:
    """Free blocks of one stream and size class, ordered by size, then address."""

    order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (size, address)
    blocks: dict[int, _AllocatorBlock] = field(default_factory=dict[int, _AllocatorBlock])  # by address

    def take_best_fit(self, size: int) -> _AllocatorBlock | None:
        index = bisect.bisect_left(self.order, (size, -1))
        return self._remove_free_block(self.blocks[self.order[index][1]]) if index < len(self.order) else None

    def shrink_block(self, block: _AllocatorBlock, size: int) -> None:
        """Shrinks `block`, which is in use, to `size`, and frees the remainder if it is large enough."""
        left_over = block.size - size
        worth_it = left_over >= ROUND if size <= SMALL else left_over > SMALL
        if not worth_it:
            return
        rest = _AllocatorBlock(block.address + size, left_over, left=block, right=block.right)
        if block.right is not None:
            block.right.left = rest
        block.right, block.size = rest, size
        self._add_free_block(rest)

    def free_block(self, block: _AllocatorBlock) -> None:
        if block.right is not None and block.right.free:
            block = _join_neighbours(block, self._remove_free_block(block.right))
        if block.left is not None and block.left.free:
            block = _join_neighbours(self._remove_free_block(block.left), block)
        self._add_free_block(block)

    def _add_free_block(self, block: _AllocatorBlock) -> None:
        block.free = True
        self.blocks[block.address] = block
        bisect.insort(self.order, (block.size, block.address))

    def _remove_free_block(self, block: _AllocatorBlock) -> _AllocatorBlock:
        block.free = False
        del self.blocks[block.address]
        del self.order[bisect.bisect_left(self.order, (block.size, block.address))]
        return block


def _join_neighbours(first: _AllocatorBlock, second: _AllocatorBlock) -> _AllocatorBlock:
    """Extends `first` over `second`, its right neighbour, and returns it."""
    first.size += second.size
    first.right = second.right
    if second.right is not None:
        second.right.left = first
    return first
