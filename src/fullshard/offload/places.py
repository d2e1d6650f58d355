"""Places of each parameter's state in a store's records."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fullshard.offload.host_memory import allocate_host, as_memoryview
from fullshard.offload.lazy_tensor import lazy_tensor
from fullshard.offload.store import GroupLayout, Parts, dtypes_of
from fullshard.spec.groups import Group, Segment


class Read(Protocol):
    """Fills `target` with the bytes of the record `name` from `offset` on."""

    def __call__(self, name: str, target: memoryview, *, offset: int) -> None: ...


class ParameterRecords:
    """Finds the state of all parameters of `groups` in `records`, which are keyed by the groups' index."""

    def __init__(
        self, groups: Sequence[Group], records: Mapping[int, GroupLayout], *, moments: torch.dtype | None
    ) -> None:
        self._records, self._moments = records, moments
        self._segments: dict[str, list[tuple[Group, Segment]]] = {}
        for group in groups:
            for segment in group.segments:
                self._segments.setdefault(segment.name, []).append((group, segment))

    def read_parts(self, name: str, *, read: Read) -> Parts | None:
        """Returns the state of a parameter, flat, read with `read` when it is used; None if there is none."""
        if name not in self._segments:
            return None
        size = torch.Size([self._numel(name)])
        tensors = (
            lazy_tensor(size, dtype, read=partial(self._read, name, part, read=read))
            for part, dtype in enumerate(self._dtypes(name))
        )
        return Parts(*tensors)

    def allocate_parts(self, name: str) -> Parts | None:
        """Returns memory for the state of a parameter; None if it has none."""
        if name not in self._segments:
            return None
        return Parts(*(torch.empty(self._numel(name), dtype=dtype) for dtype in self._dtypes(name)))

    def _read(self, name: str, part: int, *, read: Read) -> Tensor:
        dtype, numel = self._dtypes(name)[part], self._numel(name)
        # Aligned to a page, so that it can be read into directly, bypassing the page cache.
        whole = allocate_host(numel * dtype.itemsize, pinned=False).view(dtype)[:numel]
        for group, segment in self._segments[name]:
            begin = self._records[group.index].begins[part] + segment.offset * dtype.itemsize
            target = whole[segment.begin : segment.end].view(torch.uint8)
            read(str(group.index), as_memoryview(target), offset=begin)
        return whole

    def _numel(self, name: str) -> int:
        return self._segments[name][-1][1].end

    def _dtypes(self, name: str) -> tuple[torch.dtype, ...]:
        return dtypes_of(self._segments[name][0][0].dtype, self._moments)
