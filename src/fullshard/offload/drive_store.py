"""The state of a rank's groups on its drive: at most three groups are in memory.

[Note: three buffers] One group is being read, one is used by the caller, one is being written. A read waits,
in the reading thread, for the write of its buffer's previous content, so that no other thread waits. Reads
and writes have one thread each, and run concurrently with each other and the caller.

Buffers keep their content, so that three groups or fewer are read only once. With more groups, `read_ahead`
reads the first groups as soon as the last are written, while the drive is idle.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fullshard.errors import OffloadError
from fullshard.offload.generations import Generations
from fullshard.offload.host_memory import allocate_host, as_memoryview
from fullshard.offload.lazy_tensor import lazy_tensor
from fullshard.offload.store import GroupLayout, Parts
from fullshard.spec.groups import Group, Segment

GROUP_BUFFERS = 3


@dataclass(eq=False)  # compared by identity
class _Buffer:
    """A buffer for one group.

    group: index of the group whose newest state is in `memory`
    reserved_for: index of the group that will be in `memory` once the requested reads have finished
    writing: the write of `memory` to the drive
    """

    memory: Tensor
    group: int | None = None
    reserved_for: int | None = None
    writing: Future[None] | None = None


class _Buffers:
    """`count` buffers of `size_bytes` each, allocated together when the first is taken."""

    def __init__(self, count: int, size_bytes: int, *, pinned: bool) -> None:
        self._count, self._size_bytes, self._pinned = count, size_bytes, pinned
        self.all: list[_Buffer] = []
        self.idle: deque[_Buffer] = deque()  # the buffer that has been idle longest first

    def take(self, group: Group, *, keep: Collection[int] = ()) -> _Buffer:
        """Takes the idle buffer reserved for the group, or else one not reserved for the groups `keep`."""
        if not self.all:
            memories = (allocate_host(self._size_bytes, pinned=self._pinned) for _ in range(self._count))
            self.all = [_Buffer(memory) for memory in memories]
            self.idle.extend(self.all)
        own = (one for one in self.idle if one.reserved_for == group.index)
        others = (one for one in self.idle if one.reserved_for not in keep)
        buffer = next(own, None) or next(others, None) or self.idle[0]
        self.idle.remove(buffer)
        buffer.reserved_for = group.index
        return buffer

    def forget(self) -> None:
        for buffer in self.all:
            buffer.group = buffer.reserved_for = None


class DriveStore:
    """`GroupStore` on a drive: each pass reads one generation and writes the other, never in place.

    generations: the data files, with one record per group, whose name is the group's index
    moments: dtype of the moments; None for the masters' dtype
    """

    def __init__(
        self, groups: Sequence[Group], generations: Generations, *, moments: torch.dtype | None, pinned: bool
    ) -> None:
        self.generations = generations
        self._groups = groups
        self._layouts = {group.index: GroupLayout(group, moments=moments) for group in groups}
        self._places: dict[str, list[tuple[GroupLayout, Segment]]] = {}
        for layout in self._layouts.values():
            for segment in layout.group.segments:
                self._places.setdefault(segment.name, []).append((layout, segment))
        self._verify = False
        self._newest: int | None = None  # the file that holds the newest state; None: no state yet
        self._committed = True
        sizes = [layout.size_bytes for layout in self._layouts.values()]
        self._buffers = _Buffers(min(GROUP_BUFFERS, len(sizes)), max(sizes, default=0), pinned=pinned)
        self._ahead: dict[int, Future[None]] = {}  # reads of groups not yet requested
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-write")

    @property
    def host_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers.all)

    def start_from(self, file: int | None, *, committed: bool = True) -> tuple[int | None, bool]:
        """Sets which slot has the state (None: no state) and if it is committed. Returns the old values."""
        before = self._newest, self._committed
        self._newest, self._committed = file, committed
        self._wait_and_forget()
        self._ahead.clear()
        return before

    def stream(self, *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        self.settle()
        if fresh:
            self._wait_and_forget()
            self._ahead.clear()
        else:
            self.retain_previous()
        source, target = self._newest, self.generations.begin()
        if source == target:  # an uncommitted generation is overwritten
            self._newest = None
        try:
            yield from self._through(source=None if fresh else source, target=target)
            self._newest, self._committed = target, False
        finally:
            if self._newest != target:  # the buffers' content is of an incomplete generation
                self._buffers.forget()

    def read_stream(self, *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        if verify:
            self._wait_and_forget()
        self._verify = verify
        try:
            yield from self._through(source=self._newest, target=None)
        finally:
            self._verify = False

    def retain_previous(self) -> None:
        if not self._committed:  # the next generation would overwrite its file
            self.commit(None, b"")

    def read_ahead(self) -> None:
        first = self._groups[:GROUP_BUFFERS]
        indices = {group.index for group in first}
        for buffer, group in [(self._buffers.take(group, keep=indices), group) for group in first]:
            self._ahead[group.index] = self._reader.submit(self._fill, buffer, group, source=self._newest)
            self._buffers.idle.append(buffer)

    def read_parts(self, name: str) -> Parts | None:
        places = self._places.get(name)
        if places is None:
            return None
        reads = [
            partial(_read_part, self.generations, places, part=part, file=self._newest)
            for part in range(len(Parts._fields))
        ]
        size, dtypes = torch.Size([places[-1][1].end]), places[0][0].dtypes
        pairs = zip(dtypes, reads, strict=True)
        return Parts(*(lazy_tensor(size, dtype, read=read) for dtype, read in pairs))

    def allocate_parts(self, name: str) -> Parts | None:
        places = self._places.get(name)
        if places is None:
            return None
        return Parts(*(torch.empty(places[-1][1].end, dtype=dtype) for dtype in places[0][0].dtypes))

    def commit(self, step: int | None, payload: bytes) -> None:
        """Commits the last streamed state, with a `payload`, as the generation after `step` steps.

        If `step` is None, no run resumes from it: it is committed only so that it stays readable.
        """
        self.settle()
        if self._committed:
            return
        whole = self.generations.whole()
        if step is None:
            step = max((one.step for one in whole), default=-1) + 1
        for later in (one for one in whole if one.step >= step):
            self.generations.drop(later.slot)
        self.generations.commit(step, payload)
        self._committed = True

    def settle(self) -> None:
        for buffer in self._buffers.all:
            if buffer.writing is not None:
                buffer.writing.result()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.generations.close()

    def _through(self, *, source: int | None, target: int | None) -> Iterator[tuple[Group, Parts]]:
        """Streams the groups. See [Note: three buffers]."""
        left = deque(self._groups)
        ahead: deque[tuple[Group, _Buffer, Future[None]]] = deque()

        def read_next() -> None:
            if left:
                group = left.popleft()
                buffer = self._buffers.take(group)
                before = self._ahead.pop(group.index, None)
                reading = self._reader.submit(self._fill, buffer, group, source=source, ahead=before)
                ahead.append((group, buffer, reading))

        for _ in range(GROUP_BUFFERS - 1):
            read_next()
        try:
            while ahead:
                group, buffer, reading = ahead[0]
                reading.result()
                yield group, self._layouts[group.index].parts(buffer.memory)
                ahead.popleft()
                if target is not None:
                    buffer.writing = self._writer.submit(
                        self.generations.write,
                        str(group.index),
                        self._layouts[group.index].memory(buffer.memory),
                    )
                self._buffers.idle.append(buffer)
                read_next()
        finally:
            for _, buffer, reading in ahead:  # the caller stopped early, or a read failed
                reading.cancel()
                wait([reading])
                buffer.group = buffer.reserved_for = None
                self._buffers.idle.append(buffer)

    def _fill(
        self, buffer: _Buffer, group: Group, *, source: int | None, ahead: Future[None] | None = None
    ) -> None:
        """Reads a group into the buffer. If its read `ahead` has failed, raises that error again."""
        if ahead is not None:
            ahead.result()
        if buffer.writing is not None:
            buffer.writing.result()
        if buffer.group == group.index:
            return
        buffer.group = None
        if source is None:
            buffer.memory.zero_()
        else:
            target = self._layouts[group.index].memory(buffer.memory)
            self.generations.read(str(group.index), target, slot=source, verify=self._verify)
        buffer.group = group.index

    def _wait_and_forget(self) -> None:
        """Waits for the reads that were submitted, and marks the content of all buffers as invalid."""
        self._reader.submit(lambda: None).result()
        self._buffers.forget()


def _read_part(
    generations: Generations, places: Sequence[tuple[GroupLayout, Segment]], *, part: int, file: int | None
) -> Tensor:
    """Reads one part of a parameter's state, flat, from the data file of slot `file`."""
    if file is None:
        raise OffloadError(
            "there is no optimizer state on the drive.",
            why="what was there was written over by one that was not loaded to its end",
            fix="load a whole state, or start again from a checkpoint",
        )
    dtype, numel = places[0][0].dtypes[part], places[-1][1].end
    # Aligned to a page, so that it can be read into directly, bypassing the page cache.
    whole = allocate_host(numel * dtype.itemsize, pinned=False).view(dtype)[:numel]
    for layout, segment in places:
        begin = layout.begins[part] + segment.offset * dtype.itemsize
        target = as_memoryview(whole[segment.in_shard].view(torch.uint8))
        generations.read_part(str(layout.group.index), target, slot=file, offset=begin)
    return whole
