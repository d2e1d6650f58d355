"""Stores of the groups' state, which is read and changed group by group:

    for group, parts in store.stream():
        ...                              # changes to `parts` are kept

`HostStore` has all groups in memory, and `DriveStore` has three.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.offload.host_memory import allocate_host, as_memoryview
from fullshard.spec.groups import Group, part_bytes


class Parts(NamedTuple):
    """The state of one group or parameter: three flat tensors with the same number of elements."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class GroupLayout:
    """Layout of a group's parts in a buffer: consecutive, aligned to pages, at the byte offsets `begins`."""

    def __init__(self, group: Group, *, moments: torch.dtype | None) -> None:
        self.group = group
        self.dtypes = dtypes_of(group.dtype, moments)
        sizes = [part_bytes(group.numel, dtype.itemsize) for dtype in self.dtypes]
        self.begins = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self.size_bytes = sum(sizes)

    def parts(self, buffer: Tensor) -> Parts:
        """Returns the group's parts as views of a buffer."""
        return Parts(
            *(
                buffer[begin : begin + self.group.numel * dtype.itemsize].view(dtype)
                for begin, dtype in zip(self.begins, self.dtypes, strict=True)
            )
        )

    def memory(self, buffer: Tensor) -> memoryview:
        """Returns the group's bytes in a buffer, for reading or writing."""
        return as_memoryview(buffer[: self.size_bytes])


class GroupStore(Protocol):
    """The state of a rank's groups. Used by one thread at a time.

    host_bytes: host memory that the store has allocated
    """

    @property
    def host_bytes(self) -> int: ...

    def stream(self, *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Yields every group with its parts, whose content is stored when the next group is requested.

        If `fresh`, the old state is not read: the parts are zeros in a new store, otherwise arbitrary.
        """
        ...

    def read_ahead(self) -> None:
        """Starts to read the first groups of the next `stream`. Called when a stream has ended."""
        ...

    def retain_previous(self) -> None:
        """Keeps the present state readable by `read_parts` during the next `stream`, and if it is aborted."""
        ...

    def read_stream(self, *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Yields every group with its parts, not to be changed. If `verify`, checks a drive's digests."""
        ...

    def read_parts(self, name: str) -> Parts | None:
        """Returns a parameter's state, flat, not to be changed; None if this rank has no elements of it."""
        ...

    def allocate_parts(self, name: str) -> Parts | None:
        """Returns memory for new state of a parameter; for `HostStore`, the memory that has the old state."""
        ...

    def settle(self) -> None:
        """Waits until all streamed state is written. Raises the error of a failed write."""
        ...

    def close(self) -> None: ...


class HostStore:
    """Store in host memory: three flat tensors per master dtype, with all groups in order.

    So a parameter that is split over several groups is contiguous too.
    """

    def __init__(self, groups: Sequence[Group], *, moments: torch.dtype | None, pinned: bool) -> None:
        self._groups, self._parts = groups, dict[int, Parts]()
        self._whole: dict[str, Parts] = {}
        self.host_bytes = 0
        sizes = {segment.name: segment.end for group in groups for segment in group.segments}
        for dtype in dict.fromkeys(group.dtype for group in groups):
            own = [group for group in groups if group.dtype == dtype]
            total = sum(_whole_vectors(group.numel) for group in own)
            flat = [
                allocate_host(total * kind.itemsize, pinned=pinned).view(kind)
                for kind in dtypes_of(dtype, moments)
            ]
            self.host_bytes += sum(slab.nbytes for slab in flat)
            begin = 0
            for group in own:
                self._parts[group.index] = Parts(*(slab[begin : begin + group.numel] for slab in flat))
                for segment in (one for one in group.segments if one.begin == 0):
                    whole = slice(begin + segment.offset, begin + segment.offset + sizes[segment.name])
                    self._whole[segment.name] = Parts(*(slab[whole] for slab in flat))
                begin += _whole_vectors(group.numel)

    def stream(self, *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        for group in self._groups:
            yield group, self._parts[group.index]

    def read_ahead(self) -> None: ...

    def retain_previous(self) -> None:
        """Does nothing: each group stays unchanged until the caller changes it."""

    def read_stream(self, *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        return self.stream()

    def read_parts(self, name: str) -> Parts | None:
        return self._whole.get(name)

    def allocate_parts(self, name: str) -> Parts | None:
        return self._whole.get(name)

    def settle(self) -> None: ...

    def close(self) -> None: ...


def dtypes_of(master: str, moments: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the dtypes of a group's parts. `master` names the masters'; `moments` = None means the same."""
    own = getattr(torch, master)
    assert isinstance(own, torch.dtype), master
    return own, moments or own, moments or own


def _whole_vectors(numel: int) -> int:
    return -(-numel // 64) * 64
