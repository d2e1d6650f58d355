"""The state of a rank's groups on its drive: three of them in memory, whatever the number.

[Note: three slots] One slot is read into, one is in the caller's hands, one is written from. A read waits for
the write of what its slot held before, in the thread that reads, so that nobody else waits for it. Reads
and writes have a thread each, and go on beside each other and beside the caller. The slots keep what they
hold: a pass that begins with the groups that the one before ended with need not read these. Where the next
one begins elsewhere, its first groups are read as soon as this one is written, while the drive has nothing
else to do: `read_ahead`.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fullshard.offload.generations import Generations
from fullshard.offload.places import Places
from fullshard.offload.slabs import bytes_of, slab
from fullshard.offload.store import Parts, Record
from fullshard.spec.groups import Group

SLOTS = 3


@dataclass(eq=False)  # each is itself alone
class _Slot:
    """`holds`: the group whose newest state is in `buffer`; `meant`: which it will hold once the reads that
    were asked for are through. `writing`: to the drive, from there."""

    buffer: Tensor
    holds: int | None = None
    meant: int | None = None
    writing: Future[None] | None = None

    def bytes(self, record: Record) -> memoryview:
        return bytes_of(self.buffer[: record.size_bytes])


class DriveStore:
    """State that is never overwritten in place: each pass reads one generation and writes the other.

    `generations`: the files, whose records are those of `records(groups)`, by their index.
    """

    def __init__(
        self, groups: Sequence[Group], generations: Generations, *, moments: torch.dtype | None, pinned: bool
    ) -> None:
        self.generations = generations
        self._records = {group.index: Record(group, moments=moments) for group in groups}
        self._places = Places(groups, self._records, moments=moments)
        self._verify = False
        self._newest: int | None = None  # the file that holds the newest state; None: nothing is there yet
        self._committed = True
        self._largest = max((one.size_bytes for one in self._records.values()), default=0)
        self._pinned = pinned
        self._idle: deque[_Slot] = deque()
        self._slots: list[_Slot] = []
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-read")
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload-write")

    @property
    def host_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self._slots)

    def start_from(self, file: int) -> None:
        """The state is what the file of this number holds, a whole generation."""
        self._newest, self._committed = file, True
        self._forget()

    def stream(self, order: Sequence[Group], *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        self.settle()
        if fresh:
            self._forget()
        elif not self._committed:  # or it would be written over while it is read
            self.commit(None, b"")
        target = self.generations.begin()
        source, self._newest, self._committed = self._newest, target, False
        yield from self._through(order, source=None if fresh else source, target=target)

    def look(self, order: Sequence[Group], *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        if verify:
            self._forget()
        self._verify = verify
        try:
            yield from self._through(order, source=self._newest, target=None)
        finally:
            self._verify = False

    def read_ahead(self, order: Sequence[Group]) -> None:
        soon = {group.index for group in order[:SLOTS]}
        for slot, group in [(self._slot_for(group, keep=soon), group) for group in order[:SLOTS]]:
            # What fails is tried again by who needs it, and fails there.
            self._reader.submit(self._read, slot, group, source=self._newest)
            self._idle.append(slot)

    def whole(self, name: str) -> Parts | None:
        slot = self._newest
        assert slot is not None, "there is state"
        return self._places.whole(name, read=partial(self.generations.read_part, slot=slot))

    def room(self, name: str) -> Parts | None:
        return self._places.room(name)

    def commit(self, step: int | None, payload: bytes) -> None:
        """Makes what was streamed last a whole generation, as the state after `step` steps: what a process
        that dies leaves. `payload`: what a run that goes on from it needs besides. None: there is no such
        run, and only the files must not be written over while they are read."""
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
        for slot in self._slots:
            if slot.writing is not None:
                slot.writing.result()

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.generations.close()

    def _through(
        self, order: Sequence[Group], *, source: int | None, target: int | None
    ) -> Iterator[tuple[Group, Parts]]:
        """See [Note: three slots]."""
        self._allocate()
        left = deque(order)
        ahead: deque[tuple[Group, _Slot, Future[None]]] = deque()

        def read_next() -> None:
            if left:
                group = left.popleft()
                slot = self._slot_for(group)
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
                        self.generations.write, str(group.index), slot.bytes(self._records[group.index])
                    )
                self._idle.append(slot)
                read_next()
        finally:
            for _, slot, reading in ahead:  # the caller has left, or something has failed
                reading.cancel()
                wait([reading])
                slot.holds = slot.meant = None
                self._idle.append(slot)

    def _slot_for(self, group: Group, *, keep: Collection[int] = ()) -> _Slot:
        """The one that is meant for the group; else the one that has been idle for the longest, of those that
        hold none of `keep` if there is one."""
        mine = (slot for slot in self._idle if slot.meant == group.index)
        others = (slot for slot in self._idle if slot.meant not in keep)
        slot = next(mine, None) or next(others, None) or self._idle[0]
        self._idle.remove(slot)
        slot.meant = group.index
        return slot

    def _read(self, slot: _Slot, group: Group, *, source: int | None) -> None:
        if slot.writing is not None:
            slot.writing.result()
        if slot.holds == group.index:
            return
        slot.holds = None
        record = self._records[group.index]
        if source is not None:
            self.generations.read(str(group.index), slot.bytes(record), slot=source, verify=self._verify)
        else:
            slot.buffer[: record.size_bytes].zero_()
        slot.holds = group.index

    def _allocate(self) -> None:
        if not self._slots:
            count = min(SLOTS, max(1, len(self._records)))
            self._slots = [_Slot(slab(self._largest, pinned=self._pinned)) for _ in range(count)]
            self._idle.extend(self._slots)

    def _forget(self) -> None:
        self._reader.submit(lambda: None).result()  # what was read ahead is through
        for slot in self._slots:
            slot.holds = slot.meant = None
