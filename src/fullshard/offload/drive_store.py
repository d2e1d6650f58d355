"""The state of a rank's groups on its drive: at most three groups are in memory.

[Note: three buffers] One group is being read, one is used by the caller, one is being written. A read waits,
in the reading thread, for the write of its buffer's previous content, so that no other thread waits. Reads
and writes have one thread each, and run concurrently with each other and the caller.

Buffers keep their content, so that three groups or fewer are read only once. With more groups,
`prefetch_first_groups` reads the first groups as soon as the last are written, while the drive is idle.
"""

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fullshard.distributed.host import allocate_host_memory, make_device_thread
from fullshard.distributed.tensors import TRAINED, find_unusable_number
from fullshard.errors import DamagedOffloadError, OffloadError
from fullshard.offload.generations import Generation, GenerationFiles
from fullshard.offload.store import GroupLayout, GroupStream, MasterAndMoments, make_lazy_tensor
from fullshard.spec.groups import OffloadGroup, ShardSegment

GROUP_BUFFERS = 3
_Place = tuple[GroupLayout, ShardSegment]  # a segment of a parameter, and the layout of its group


@dataclass(eq=False)  # compared by identity
class _GroupBuffer:
    """A buffer for one group.

    group: index of the group whose newest state is in `memory`
    reserved_for: index of the group that will be in `memory` once the requested reads have finished
    writing: the write of `memory` to the drive
    """

    memory: Tensor
    group: int | None = None
    reserved_for: int | None = None
    writing: Future[None] | None = None


class _GroupBuffers:
    """`count` buffers of `size_bytes` each, allocated together when the first is taken."""

    def __init__(self, count: int, size_bytes: int, *, pinned: bool) -> None:
        self._count, self._allocate = count, partial(allocate_host_memory, size_bytes, pinned=pinned)
        self.all: list[_GroupBuffer] = []
        self.idle: deque[_GroupBuffer] = deque()  # the buffer that has been idle longest first

    def take_idle_buffer(self, group: int, *, keep: Collection[int] = ()) -> _GroupBuffer:
        """Takes the idle buffer reserved for the group, else one not reserved for `keep`, else the first."""
        if not self.all:
            self.all = [_GroupBuffer(self._allocate()) for _ in range(self._count)]
            self.idle.extend(self.all)
        own = (one for one in self.idle if one.reserved_for == group)
        others = (one for one in self.idle if one.reserved_for not in keep)
        buffer = next(own, None) or next(others, None) or self.idle[0]
        self.idle.remove(buffer)
        buffer.reserved_for = group
        return buffer

    def invalidate_all(self) -> None:
        for buffer in self.all:
            buffer.group = buffer.reserved_for = None


class DriveStore:
    """`GroupStore` on a drive: each pass reads one generation and writes the other, never in place.

    generations: the data files, with one record per group, whose name is the group's index
    moments: dtype of the moments; None for the masters' dtype
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        generations: GenerationFiles,
        *,
        moments: torch.dtype | None,
        pinned: bool,
    ) -> None:
        self.generations = generations
        self._groups = groups
        self._layouts = {group.index: GroupLayout(group, moments=moments) for group in groups}
        self._places: dict[str, list[_Place]] = {}
        for layout in self._layouts.values():
            for segment in layout.group.segments:
                self._places.setdefault(segment.name, []).append((layout, segment))
        self._verify = False
        self._newest: int | None = None  # the file that holds the newest state; None: no state yet
        self._committed = True
        sizes = [layout.size_bytes for layout in self._layouts.values()]
        self._buffers = _GroupBuffers(min(GROUP_BUFFERS, len(sizes)), max(sizes, default=0), pinned=pinned)
        self._ahead: dict[int, Future[None]] = {}  # reads of groups not yet requested
        self._reader = make_device_thread("offload-read")
        self._writer = make_device_thread("offload-write")

    @property
    def host_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers.all)

    def swap_newest_slot(self, file: int | None, *, committed: bool = True) -> tuple[int | None, bool]:
        """Sets which slot has the state (None: no state) and if it is committed. Returns the old values."""
        before = self._newest, self._committed
        self._newest, self._committed = file, committed
        self._wait_and_invalidate_buffers()
        self._ahead.clear()
        return before

    def stream_for_update(self, *, fresh: bool = False) -> GroupStream:
        self.wait_for_writes()
        if fresh:
            self._wait_and_invalidate_buffers()
            self._ahead.clear()
        elif not self._committed:  # its file would be overwritten, but it must stay readable meanwhile
            self.commit_generation(None, b"")
        source, target = self._newest, self.generations.start_next_generation()
        if source == target:  # an uncommitted generation is overwritten
            self._newest = None
        try:
            yield from self._stream_groups(source=None if fresh else source, target=target)
            self._newest, self._committed = target, False
        finally:
            if self._newest != target:  # the buffers' content is of an incomplete generation
                self._buffers.invalidate_all()

    def stream_read_only(self, *, verify: bool = False) -> GroupStream:
        if verify:
            self._wait_and_invalidate_buffers()
        self._verify = verify
        try:
            yield from self._stream_groups(source=self._newest, target=None)
        finally:
            self._verify = False

    def prefetch_first_groups(self) -> None:
        first = [group.index for group in self._groups[:GROUP_BUFFERS]]
        buffers = [self._buffers.take_idle_buffer(group, keep=first) for group in first]
        for buffer, group in zip(buffers, first, strict=True):
            self._ahead[group] = self._reader.submit(self._read_group, buffer, group, source=self._newest)
            self._buffers.idle.append(buffer)

    def read_parameter_state(self, name: str) -> MasterAndMoments | None:
        places = self._places.get(name)
        if places is None:
            return None
        read = partial(_read_parameter_part, self.generations, places, file=self._newest)
        size, dtypes = torch.Size([places[-1][1].end]), enumerate(places[0][0].dtypes)
        parts = (make_lazy_tensor(size, dtype, read=partial(read, part=part)) for part, dtype in dtypes)
        return MasterAndMoments(*parts)

    def parameter_state_to_fill(self, name: str) -> MasterAndMoments | None:
        places = self._places.get(name)
        if places is None:
            return None
        size, dtypes = places[-1][1].end, places[0][0].dtypes
        return MasterAndMoments(*(torch.empty(size, dtype=dtype) for dtype in dtypes))

    def commit_generation(self, step: int | None, payload: bytes) -> None:
        """Commits the last streamed state, with a `payload`, as the generation after `step` steps.

        Does nothing if it is committed already. Removes generations of `step` or later steps first. If `step`
        is None, no run resumes from it: it is committed only so that it stays readable.
        """
        self.wait_for_writes()
        if self._committed:
            return
        whole = self.generations.list_complete_generations()
        if step is None:
            step = max((one.step for one in whole), default=-1) + 1
        for later in (one for one in whole if one.step >= step):
            self.generations.invalidate_generation(later.slot)
        self.generations.commit_generation(step, payload)
        self._committed = True

    def wait_for_writes(self) -> None:
        for buffer in self._buffers.all:
            if buffer.writing is not None:
                buffer.writing.result()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.generations.close()

    def _stream_groups(self, *, source: int | None, target: int | None) -> GroupStream:
        """Yields groups of generation `source` (None: zeros); writes them to `target` if not None.

        See [Note: three buffers].
        """
        left = deque(self._groups)
        ahead: deque[tuple[OffloadGroup, _GroupBuffer, Future[None]]] = deque()

        def start_next_group_read() -> None:
            if left:
                group = left.popleft()
                index, buffer = group.index, self._buffers.take_idle_buffer(group.index)
                before = self._ahead.pop(index, None)
                reading = self._reader.submit(self._read_group, buffer, index, source=source, ahead=before)
                ahead.append((group, buffer, reading))

        for _ in range(GROUP_BUFFERS - 1):
            start_next_group_read()
        try:
            while ahead:
                group, buffer, reading = ahead[0]
                name, layout = str(group.index), self._layouts[group.index]
                reading.result()
                yield group, layout.part_views(buffer.memory)
                ahead.popleft()
                if target is not None:
                    data = layout.group_memoryview(buffer.memory)
                    buffer.writing = self._writer.submit(self.generations.write_record, name, data)
                self._buffers.idle.append(buffer)
                start_next_group_read()
        finally:
            for _, buffer, reading in ahead:  # the caller stopped early, or a read failed
                reading.cancel()
                wait([reading])
                buffer.group = buffer.reserved_for = None
                self._buffers.idle.append(buffer)

    def _read_group(
        self, buffer: _GroupBuffer, group: int, *, source: int | None, ahead: Future[None] | None = None
    ) -> None:
        """Reads a group into the buffer. If its read `ahead` has failed, raises that error again."""
        if ahead is not None:
            ahead.result()
        if buffer.writing is not None:
            buffer.writing.result()
        if buffer.group == group:
            return
        buffer.group = None
        if source is None:
            buffer.memory.zero_()
        else:
            target = self._layouts[group].group_memoryview(buffer.memory)
            self.generations.read_record(str(group), target, slot=source, verify=self._verify)
        buffer.group = group

    def _wait_and_invalidate_buffers(self) -> None:
        self._reader.submit(lambda: None).result()
        self._buffers.invalidate_all()


def check_generation_and_reset_store(store: DriveStore, generation: Generation) -> None:
    """Reads a complete generation, before `store` has a state, and leaves the store without one.

    Raises DamagedOffloadError for other bytes than were written, and for numbers that no training can
    continue from.
    """
    store.swap_newest_slot(generation.slot)
    try:
        # After an error, the stream gives its buffers back before another generation is read.
        with closing(store.stream_read_only(verify=True)) as stream:
            for segment, parts in ((one, parts) for group, parts in stream for one in group.segments):
                for key, part in parts._asdict().items():
                    role = TRAINED if key == "master" else key
                    found = find_unusable_number(part[segment.slice_in_group], role=role)
                    if found is not None:
                        raise DamagedOffloadError(
                            f"{key} of {segment.name} cannot be trained on.",
                            got=f"{found:g} in it",
                            why="an update with such numbers makes the weights useless",
                        )
    finally:
        store.swap_newest_slot(None)


def _read_parameter_part(
    generations: GenerationFiles, places: Sequence[_Place], *, part: int, file: int | None
) -> Tensor:
    if file is None:
        raise OffloadError(
            "there is no optimizer state on the drive.",
            why="it was overwritten by a load that did not finish",
            fix="load a complete state, or resume from a checkpoint",
        )
    dtype, numel = places[0][0].dtypes[part], places[-1][1].end
    whole: Tensor | None = None
    for layout, segment in places:
        name, begin = str(layout.group.index), layout.begins[part] + segment.offset * dtype.itemsize
        size = segment.numel * dtype.itemsize
        own = generations.read_record_part(name, slot=file, offset=begin, size_bytes=size).view(dtype)
        if len(places) == 1:
            return own
        whole = torch.empty(numel, dtype=dtype) if whole is None else whole
        whole[segment.slice_in_shard] = own
    assert whole is not None, "the rank has elements of it"
    return whole
