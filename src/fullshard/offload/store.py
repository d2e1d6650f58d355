"""Stores of the groups' state, which is accessed by streaming, group by group:

    for group, parts in store.stream():
        ...                              # changes to `parts` are kept

`HostStore` has all groups in memory. `DriveStore` has three: one is being read, one is in the caller's hands,
one is being written.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.offload.host_memory import allocate_host, as_memoryview
from fullshard.spec.groups import Group, part_bytes


class Parts(NamedTuple):
    """The state of one group: three flat tensors of `group.numel` elements each."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class GroupLayout:
    """Layout of a group's parts in its bytes: consecutive, each aligned to a page, at offsets `begins`."""

    def __init__(self, group: Group, *, moments: torch.dtype | None) -> None:
        self.group = group
        self.dtypes = dtypes_of(group.dtype, moments)
        sizes = [part_bytes(group.numel, dtype.itemsize) for dtype in self.dtypes]
        self.begins = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self.size_bytes = sum(sizes)

    def parts(self, buffer: Tensor) -> Parts:
        """Returns the parts as views of a buffer."""
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

    host_bytes: host memory that it takes once it is used
    """

    @property
    def host_bytes(self) -> int: ...

    def stream(self, *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Yields every group; what its parts hold when the next group is requested is the new state.

        If `fresh`, the old state is not read: the parts begin as zeros (in a new store), or as anything.
        """
        ...

    def read_ahead(self) -> None:
        """Reads the first groups of the next `stream`. Called when a stream has ended."""
        ...

    def retain_previous(self) -> None:
        """Keeps the present state readable, by `read_parts`, after the next `stream` and an aborted one."""
        ...

    def read_stream(self, *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Yields every group, not to be changed. If `verify`, checks them against their digests, if any."""
        ...

    def read_parts(self, name: str) -> Parts | None:
        """Returns the state of one parameter, flat, not to be changed. None if this rank has no row of it."""
        ...

    def allocate_parts(self, name: str) -> Parts | None:
        """Returns memory for what `read_parts` returns, which may be where that state is."""
        ...

    def settle(self) -> None:
        """Waits until all streamed state is stored. Raises the error of a failed write."""
        ...

    def close(self) -> None: ...


class HostStore:
    """Store in host memory: three flat slabs per master dtype, in the order of the groups.

    So even a parameter that is cut over several groups is contiguous.
    """

    def __init__(self, groups: Sequence[Group], *, moments: torch.dtype | None, pinned: bool) -> None:
        self._groups, self._parts = groups, dict[int, Parts]()
        self._whole: dict[str, Parts] = {}
        self.host_bytes = 0
        sizes = sizes_of(groups)
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
        """Does nothing: each group stays as it is until the caller changes it."""

    def read_stream(self, *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        return self.stream()

    def read_parts(self, name: str) -> Parts | None:
        return self._whole.get(name)

    allocate_parts = read_parts

    def settle(self) -> None: ...

    def close(self) -> None: ...


def sizes_of(groups: Iterable[Group]) -> dict[str, int]:
    """Returns the number of elements of each parameter."""
    return {segment.name: segment.end for group in groups for segment in group.segments}


def dtypes_of(master: str, moments: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the dtypes of the parts of a group whose masters have the dtype of this name."""
    own = getattr(torch, master)
    assert isinstance(own, torch.dtype), master
    return own, moments or own, moments or own


def _whole_vectors(numel: int) -> int:
    return -(-numel // 64) * 64
