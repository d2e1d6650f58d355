"""Stores of the groups' state, which is accessed by streaming, group by group:

    for group, parts in store.stream(order):
        ...                                    # changes to `parts` are kept

`HostStore` has all groups in memory. `DriveStore` has three: one is being read, one is in the caller's hands,
one is being written.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.offload.host_memory import allocate_host
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
        self._dtypes = dtypes_of(group.dtype, moments)
        sizes = [part_bytes(group.numel, dtype.itemsize) for dtype in self._dtypes]
        self.begins = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self.size_bytes = sum(sizes)

    def parts(self, buffer: Tensor) -> Parts:
        """Returns views of the first `size_bytes` of a buffer."""
        return Parts(
            *(
                buffer[begin : begin + self.group.numel * dtype.itemsize].view(dtype)
                for begin, dtype in zip(self.begins, self._dtypes, strict=True)
            )
        )


class GroupStore(Protocol):
    """The state of a rank's groups. Used by one thread at a time.

    host_bytes: host memory that it takes once it is used
    """

    @property
    def host_bytes(self) -> int: ...

    def stream(self, order: Sequence[Group], *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Yields every group of the store once, in `order`.

        The content of the parts when the next group is requested (or the iterator ends) is the new state; the
        parts must not be used after that. If `fresh`, the old state is not read: the parts begin as zeros in
        a new store, and as anything in another.
        """
        ...

    def read_ahead(self, order: Sequence[Group]) -> None:
        """Announces the order of the next `stream`, so that its first groups may be read now.

        Called when a stream has ended.
        """
        ...

    def retain_previous(self) -> None:
        """Keeps the present state readable, by `read_parts`, during and after the next `stream`, even an
        aborted one.
        """
        ...

    def read_stream(self, order: Sequence[Group], *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Yields some groups, not to be changed. If `verify`, checks them against their digests, if any."""
        ...

    def read_parts(self, name: str) -> Parts | None:
        """Returns the state of one parameter, flat, not to be changed. None if this rank has no row of it."""
        ...

    def allocate_parts(self, name: str) -> Parts | None:
        """Returns memory for the state of one parameter, flat, which may be where its state is.

        None if this rank has no row of it.
        """
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
        self._parts: dict[int, Parts] = {}
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
            self.host_bytes += sum(one.nbytes for one in flat)
            begin = 0
            for group in own:
                self._parts[group.index] = Parts(*(one[begin : begin + group.numel] for one in flat))
                for segment in group.segments:
                    if segment.begin == 0:
                        at = begin + segment.offset
                        self._whole[segment.name] = Parts(
                            *(one[at : at + sizes[segment.name]] for one in flat)
                        )
                begin += _whole_vectors(group.numel)

    def stream(self, order: Sequence[Group], *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        for group in order:
            yield group, self._parts[group.index]

    def read_ahead(self, order: Sequence[Group]) -> None: ...

    def retain_previous(self) -> None:
        """Does nothing: each group stays as it is until the caller changes it."""

    def read_stream(self, order: Sequence[Group], *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        yield from self.stream(order)

    def read_parts(self, name: str) -> Parts | None:
        return self._whole.get(name)

    allocate_parts = read_parts

    def settle(self) -> None: ...

    def close(self) -> None: ...


def sizes_of(groups: Iterable[Group]) -> dict[str, int]:
    """Returns the number of elements of each parameter."""
    return {segment.name: segment.end for group in groups for segment in group.segments}


def dtypes_of(master: str, moments: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the dtypes of the parts, for a master of this dtype."""
    own = torch_dtype(master)
    return own, moments or own, moments or own


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of this name: `float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _whole_vectors(numel: int) -> int:
    return -(-numel // 64) * 64
