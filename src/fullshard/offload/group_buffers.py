"""The memory through which groups pass on their way from the drive and back."""

from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from fullshard.offload.host_memory import allocate_host


@dataclass(eq=False)  # compared by identity
class GroupBuffer:
    """A buffer for one group.

    group: the group whose newest state is in `buffer`
    reserved_for: the group that it will hold once the requested reads have finished
    writing: the write of its content to the drive
    """

    buffer: Tensor
    group: int | None = None
    reserved_for: int | None = None
    writing: Future[None] | None = None

    def forget(self) -> None:
        self.group = self.reserved_for = None


class GroupBuffers:
    """`count` buffers of `size_bytes` each, allocated when the first is taken."""

    def __init__(self, count: int, size_bytes: int, *, pinned: bool) -> None:
        self._count, self._size_bytes, self._pinned = count, size_bytes, pinned
        self._idle: deque[GroupBuffer] = deque()
        self.all: list[GroupBuffer] = []

    @property
    def host_bytes(self) -> int:
        return sum(slot.buffer.nbytes for slot in self.all)

    def take(self, group: int, *, keep: Collection[int] = ()) -> GroupBuffer:
        """Returns the buffer reserved for the group, if there is one.

        Otherwise returns the one that has been idle longest, preferably one not reserved for any group of
        `keep`.
        """
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
        """Marks the content of all buffers as invalid."""
        for slot in self.all:
            slot.forget()

    def settle(self) -> None:
        """Waits until all buffers are written. Raises the error of a failed write, on every call."""
        for slot in self.all:
            if slot.writing is not None:
                slot.writing.result()
