"""Where the groups' state lives, and the one way through it: group by group.

    for group, parts in store.stream(order):
        ...                                    # what is changed in `parts` is kept

`HostStore` has it all in memory. `DriveStore` has three groups in memory: one is read, one is in the caller's
hands, one is written.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.offload.host_memory import allocate_host
from fullshard.spec.groups import Group, part_bytes


class Parts(NamedTuple):
    """The state of one group, each flat, with `group.numel` elements."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class GroupLayout:
    """How the parts of a group lie in its bytes: one after the other, each from a page on, at `begins`."""

    def __init__(self, group: Group, *, moments: torch.dtype | None) -> None:
        self.group = group
        self._dtypes = dtypes_of(group.dtype, moments)
        sizes = [part_bytes(group.numel, dtype.itemsize) for dtype in self._dtypes]
        self.begins = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self.size_bytes = sum(sizes)

    def parts(self, buffer: Tensor) -> Parts:
        """Views of the first `size_bytes` of a slab."""
        return Parts(
            *(
                buffer[begin : begin + self.group.numel * dtype.itemsize].view(dtype)
                for begin, dtype in zip(self.begins, self._dtypes, strict=True)
            )
        )


class GroupStore(Protocol):
    """The state of a rank's groups. One thread at a time uses it. `host_bytes`: what it takes of the host's
    memory, once it is used."""

    @property
    def host_bytes(self) -> int: ...

    def stream(self, order: Sequence[Group], *, fresh: bool = False) -> Iterator[tuple[Group, Parts]]:
        """Every group of the store once, in `order`. What is in the parts when the next group is asked for
        (or the iterator ends) is the new state; the parts are not to be used after that. `fresh`: what was
        there is not wanted: they begin as zeros in a new store, as anything in another."""
        ...

    def read_ahead(self, order: Sequence[Group]) -> None:
        """The next `stream` is of this order: its first groups may be read now. Called when one has ended."""
        ...

    def retain_previous(self) -> None:
        """What is there now can be read, by `whole`, while the next `stream` goes on, and after one that was
        broken off."""
        ...

    def read_stream(self, order: Sequence[Group], *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        """The same for some groups, which are not changed. `verify`: held against digests, if there are."""
        ...

    def read_parts(self, name: str) -> Parts | None:
        """The state of one parameter, flat; not to be changed. None: this rank has no row of it."""
        ...

    def allocate_parts(self, name: str) -> Parts | None:
        """Memory for the state of one parameter, flat. It may be where its state is."""
        ...

    def settle(self) -> None:
        """Returns when all that `stream` was given is where it stays. Raises what failed."""
        ...

    def close(self) -> None: ...


class HostStore:
    """All in the host's memory: of each dtype of a master three flat slabs, in the order of the groups, so
    that also a parameter cut over groups is in one piece."""

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
        """Each group stays as it is until it is the caller's."""

    def read_stream(self, order: Sequence[Group], *, verify: bool = False) -> Iterator[tuple[Group, Parts]]:
        yield from self.stream(order)

    def read_parts(self, name: str) -> Parts | None:
        return self._whole.get(name)

    allocate_parts = read_parts

    def settle(self) -> None: ...

    def close(self) -> None: ...


def sizes_of(groups: Iterable[Group]) -> dict[str, int]:
    """Elements of each parameter."""
    return {segment.name: segment.end for group in groups for segment in group.segments}


def dtypes_of(master: str, moments: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of the parts, for a master of this dtype."""
    own = torch_dtype(master)
    return own, moments or own, moments or own


def torch_dtype(name: str) -> torch.dtype:
    """`float32` -> torch.float32."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _whole_vectors(numel: int) -> int:
    return -(-numel // 64) * 64
