"""The memory through which groups pass on their way from the drive and back."""

from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from fullshard.offload.host_memory import allocate_host


@dataclass(eq=False)  # each is itself alone
class GroupBuffer:
    """`holds`: the group whose newest state is in `buffer`; `meant`: which it will hold once the reads that
    were asked for are through. `writing`: to the drive, from there."""

    buffer: Tensor
    group: int | None = None
    reserved_for: int | None = None
    writing: Future[None] | None = None

    def forget(self) -> None:
        self.group = self.reserved_for = None


class GroupBuffers:
    """`count` of `size_bytes` each, allocated when the first is taken."""

    def __init__(self, count: int, size_bytes: int, *, pinned: bool) -> None:
        self._count, self._size_bytes, self._pinned = count, size_bytes, pinned
        self._idle: deque[GroupBuffer] = deque()
        self.all: list[GroupBuffer] = []

    @property
    def host_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self.all)

    def take(self, group: int, *, keep: Collection[int] = ()) -> GroupBuffer:
        """The one that is meant for the group; else the one that has been idle for the longest, of those that
        are meant for none of `keep` if there is one."""
        if not self.all:
            self.all = [
                GroupBuffer(allocate_host(self._size_bytes, pinned=self._pinned)) for _ in range(self._count)
            ]
            self._idle.extend(self.all)
        mine = (slot for slot in self._idle if slot.reserved_for == group)
        others = (slot for slot in self._idle if slot.reserved_for not in keep)
        slot = next(mine, None) or next(others, None) or self._idle[0]
        self._idle.remove(slot)
        slot.reserved_for = group
        return slot

    def give_back(self, slot: GroupBuffer) -> None:
        self._idle.append(slot)

    def forget(self) -> None:
        """Whatever any of them holds is of nothing that is read again."""
        for slot in self.all:
            slot.forget()

    def settle(self) -> None:
        """Returns when all are written. Raises what failed, each time."""
        for slot in self.all:
            if slot.writing is not None:
                slot.writing.result()
