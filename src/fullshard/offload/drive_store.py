"""The state of a rank's groups on its drive: at most three groups are in memory.

[Note: three slots] One slot is being read into, one is in the caller's hands, one is being written. A read
waits for the write of its slot's previous content; it does so in the reading thread, so that no other thread
waits. Reads and writes have one thread each, and run concurrently with each other and with the caller.

Slots keep their content: a pass that begins with the groups at which the previous one ended need not read
these. If the next pass begins elsewhere, `read_ahead` reads its first groups as soon as this pass is written,
while the drive is idle.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch

from fullshard.errors import OffloadError
from fullshard.offload.generations import Generations
from fullshard.offload.group_buffers import GroupBuffer, GroupBuffers
from fullshard.offload.host_memory import as_memoryview
from fullshard.offload.places import ParameterRecords
from fullshard.offload.store import GroupLayout, Parts
from fullshard.spec.groups import Group

SLOTS = 3


class DriveStore:
    """State that is never overwritten in place: each pass reads one generation and writes the other.

    `generations` has one record per group, named by its index.
    """

    def __init__(
        self, groups: Sequence[Group], generations: Generations, *, moments: torch.dtype | None, pinned: bool
    ) -> None:
        self.generations = generations
        self._records = {group.index: GroupLayout(group, moments=moments) for group in groups}
        self._places = ParameterRecords(groups, self._records, moments=moments)
        self._verify = False
        self._newest: int | None = None  # the file that holds the newest state; None: no state yet
        self._committed = True
        sizes = [one.size_bytes for one in self._records.values()]
        self._slots = GroupBuffers(min(SLOTS, len(sizes)), max(sizes, default=0), pinned=pinned)
        self._ahead: dict[int, Future[None]] = {}  # reads of groups not yet requested
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-write")

    @property
    def host_bytes(self) -> int:
        return self._slots.host_bytes

    def start_from(self, file: int | None, *, committed: bool = True) -> tuple[int | None, bool]:
        """Sets the generation that the state is read from. Returns the previous arguments.

        file: number of the data file; None for no state
        committed: whether that is a complete generation
        """
        before = self._newest, self._committed
        self._newest, self._committed = file, committed
        _forget(self._slots, reader=self._reader)
        self._ahead.clear()
        return before

    def stream(self, order: Sequence[Group], *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        self.settle()
        if fresh:
            _forget(self._slots, reader=self._reader)
            self._ahead.clear()
        else:
            self.retain_previous()
        source, target = self._newest, self.generations.begin()
        if source == target:  # an uncommitted generation is overwritten
            self._newest = None
        try:
            yield from self._through(order, source=None if fresh else source, target=target)
            self._newest, self._committed = target, False
        finally:
            if self._newest != target:  # the slots' content is of an incomplete generation
                self._slots.forget()

    def read_stream(self, order: Sequence[Group], *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        if verify:
            _forget(self._slots, reader=self._reader)
        self._verify = verify
        try:
            yield from self._through(order, source=self._newest, target=None)
        finally:
            self._verify = False

    def retain_previous(self) -> None:
        if not self._committed:  # the next generation would overwrite its file
            self.commit(None, b"")

    def read_ahead(self, order: Sequence[Group]) -> None:
        soon = {group.index for group in order[:SLOTS]}
        for slot, group in [(self._slots.take(group.index, keep=soon), group) for group in order[:SLOTS]]:
            self._ahead[group.index] = self._reader.submit(self._fill, slot, group, source=self._newest)
            self._slots.give_back(slot)

    def read_parts(self, name: str) -> Parts | None:
        return self._places.read_parts(name, read=partial(_read_part, self.generations, slot=self._newest))

    def allocate_parts(self, name: str) -> Parts | None:
        return self._places.allocate_parts(name)

    def commit(self, step: int | None, payload: bytes) -> None:
        """Makes the last streamed state a complete generation, as the state after `step` steps.

        A process that dies leaves it for the next run. If `step` is None, no run resumes from it: it only
        keeps the files from being overwritten while they are read.

        payload: further data that a resuming run needs
        """
        self.settle()
        if self._committed:
            return
        whole = self.generations.whole()
        if step is None:
            step = max((one.step for one in whole), default=-1) + 1
        for later in (one for one in whole if one.step >= step):
            self.generations.drop(later)
        self.generations.commit(step, payload)
        self._committed = True

    def settle(self) -> None:
        self._slots.settle()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.generations.close()

    def _through(
        self, order: Sequence[Group], *, source: int | None, target: int | None
    ) -> Iterator[tuple[Group, Parts]]:
        """Streams the groups. See [Note: three slots]."""
        left = deque(order)
        ahead: deque[tuple[Group, GroupBuffer, Future[None]]] = deque()

        def read_next() -> None:
            if left:
                group = left.popleft()
                slot = self._slots.take(group.index)
                ahead.append((group, slot, self._reader.submit(self._read, slot, group, source=source)))

        for _ in range(SLOTS - 1):
            read_next()
        try:
            while ahead:
                group, slot, reading = ahead[0]
                reading.result()
                yield group, self._records[group.index].parts(slot.buffer)
                ahead.popleft()
                if target is not None:
                    slot.writing = self._writer.submit(
                        self.generations.write, str(group.index), _bytes(slot, self._records[group.index])
                    )
                self._slots.give_back(slot)
                read_next()
        finally:
            for _, slot, reading in ahead:  # the caller stopped early, or a read failed
                reading.cancel()
                wait([reading])
                slot.forget()
                self._slots.give_back(slot)

    def _read(self, slot: GroupBuffer, group: Group, *, source: int | None) -> None:
        """Reads a group. Raises the error of a failed read-ahead.

        A drive that fails once and then succeeds is still reported.
        """
        if ahead := self._ahead.pop(group.index, None):
            ahead.result()
        self._fill(slot, group, source=source)

    def _fill(self, slot: GroupBuffer, group: Group, *, source: int | None) -> None:
        if slot.writing is not None:
            slot.writing.result()
        if slot.group == group.index:
            return
        slot.group = None
        if source is not None:
            self.generations.read(
                str(group.index), _bytes(slot, self._records[group.index]), slot=source, verify=self._verify
            )
        else:
            slot.buffer[: self._records[group.index].size_bytes].zero_()
        slot.group = group.index


def _forget(slots: GroupBuffers, *, reader: ThreadPoolExecutor) -> None:
    reader.submit(lambda: None).result()  # waits for reads ahead
    slots.forget()


def _bytes(slot: GroupBuffer, record: GroupLayout) -> memoryview:
    return as_memoryview(slot.buffer[: record.size_bytes])


def _read_part(  # signature: bound arguments, and those of `places.Read`
    generations: Generations, name: str, target: memoryview, *, offset: int, slot: int | None
) -> None:
    if slot is None:
        raise OffloadError(
            "there is no optimizer state on the drive.",
            why="what was there was written over by one that was not loaded to its end",
            fix="load a whole state, or start again from a checkpoint",
        )
    generations.read_part(name, target, slot=slot, offset=offset)
