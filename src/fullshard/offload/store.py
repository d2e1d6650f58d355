"""Stores of the groups' state, which is read and changed group by group:

    for group, parts in store.stream_for_update():
        ...                                         # changes to `parts` are kept

`HostMemoryStore` has all groups in memory, and `DriveStore` has three.
"""

import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fullshard.distributed.host import allocate_host_memory, as_memoryview
from fullshard.spec.groups import OffloadGroup, page_aligned_bytes
from fullshard.torch_private.fake_tensors import make_wrapper_subclass, schema
from fullshard.torch_private.tensors import tree_leaves, tree_map_only


class MasterAndMoments(NamedTuple):
    """The state of one group or parameter: three flat tensors with the same number of elements."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


GroupStream = Generator[tuple[OffloadGroup, MasterAndMoments], None, None]  # every group with its parts


class GroupLayout:
    """Layout of a group's parts in a buffer: consecutive, aligned to pages, at the byte offsets `begins`."""

    def __init__(self, group: OffloadGroup, *, moments: torch.dtype | None) -> None:
        self.group = group
        self.dtypes = master_and_moment_dtypes(group.dtype, moments)
        sizes = [page_aligned_bytes(group.numel_with_gaps, dtype.itemsize) for dtype in self.dtypes]
        self.begins = tuple(itertools.accumulate(sizes, initial=0))[:-1]
        self.size_bytes = sum(sizes)

    def part_views(self, buffer: Tensor) -> MasterAndMoments:
        numel, pairs = self.group.numel_with_gaps, zip(self.begins, self.dtypes, strict=True)
        views = (buffer[begin : begin + numel * dtype.itemsize].view(dtype) for begin, dtype in pairs)
        return MasterAndMoments(*views)

    def group_memoryview(self, buffer: Tensor) -> memoryview:
        """Returns the group's bytes in a buffer, for reading or writing."""
        return as_memoryview(buffer[: self.size_bytes])


class GroupStore(Protocol):
    """The state of a rank's groups. Used by one thread at a time.

    host_bytes: host memory that the store has allocated
    """

    @property
    def host_bytes(self) -> int: ...

    def stream_for_update(self, *, fresh: bool = False) -> GroupStream:
        """Yields every group with its parts, whose content is stored when the next group is requested.

        If `fresh`, the old state is not read: the parts are zeros in a new store, otherwise arbitrary.
        """
        ...

    def prefetch_first_groups(self) -> None:
        """Starts to read the first groups of the next `stream_for_update`. Called when a stream has ended."""
        ...

    def stream_read_only(self, *, verify: bool = False) -> GroupStream:
        """Yields every group with its parts, not to be changed. If `verify`, checks a drive's digests."""
        ...

    def read_parameter_state(self, name: str) -> MasterAndMoments | None:
        """Returns a parameter's state, flat, not to be changed; None if this rank has no elements of it."""
        ...

    def parameter_state_to_fill(self, name: str) -> MasterAndMoments | None:
        """Returns memory for a parameter's new state (or the old's memory); None if this rank has no part."""
        ...

    def wait_for_writes(self) -> None:
        """Waits until all streamed state is written. Raises the error of a failed write."""
        ...

    def close(self) -> None: ...


class HostMemoryStore:
    """Store in host memory: three flat tensors per master dtype, with all groups in order.

    So a parameter that is split over several groups is contiguous too.
    """

    def __init__(self, groups: Sequence[OffloadGroup], *, moments: torch.dtype | None, pinned: bool) -> None:
        self._groups, self._parts = groups, dict[int, MasterAndMoments]()
        self._whole: dict[str, MasterAndMoments] = {}
        self.host_bytes = 0
        sizes = {segment.name: segment.end for group in groups for segment in group.segments}
        for dtype in dict.fromkeys(group.dtype for group in groups):
            own = [group for group in groups if group.dtype == dtype]
            total = sum(_round_up_to_vectors(group.numel_with_gaps) for group in own)
            flat = [
                allocate_host_memory(total * kind.itemsize, pinned=pinned).view(kind)
                for kind in master_and_moment_dtypes(dtype, moments)
            ]
            self.host_bytes += sum(slab.nbytes for slab in flat)
            begin = 0
            for group in own:
                end = begin + group.numel_with_gaps
                self._parts[group.index] = MasterAndMoments(*(slab[begin:end] for slab in flat))
                for segment in (one for one in group.segments if one.begin == 0):
                    whole = slice(begin + segment.offset, begin + segment.offset + sizes[segment.name])
                    self._whole[segment.name] = MasterAndMoments(*(slab[whole] for slab in flat))
                begin += _round_up_to_vectors(group.numel_with_gaps)

    def stream_for_update(self, *, fresh: bool = False) -> GroupStream:
        for group in self._groups:
            yield group, self._parts[group.index]

    def prefetch_first_groups(self) -> None: ...

    def stream_read_only(self, *, verify: bool = False) -> GroupStream:
        return self.stream_for_update()

    def read_parameter_state(self, name: str) -> MasterAndMoments | None:
        return self._whole.get(name)

    def parameter_state_to_fill(self, name: str) -> MasterAndMoments | None:
        return self._whole.get(name)

    def wait_for_writes(self) -> None: ...

    def close(self) -> None: ...


def master_and_moment_dtypes(
    master: str, moments: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Returns the dtypes of a group's parts. `master` names the masters'; `moments` = None means the same."""
    own = getattr(torch, master)
    assert isinstance(own, torch.dtype), master
    return own, moments or own, moments or own


def _round_up_to_vectors(numel: int) -> int:
    return -(-numel // 64) * 64


_STILL_ON_DRIVE = frozenset(
    {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}
)
_OF_A_MOVE = {"device", "dtype", "layout", "non_blocking"}


class RereadingTensor(torch.Tensor):
    """Tensor on the meta device whose elements `read` returns, on the CPU, at each use.

    It cannot be changed in place. `make_lazy_tensor` makes it.
    """

    read: Callable[[], Tensor]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDrive({tuple(self.shape)}, {self.dtype})"

    # Torch would neither copy nor save the elements of a tensor on the meta device.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.cpu()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # signature: torch's
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _STILL_ON_DRIVE:
            one = cast(RereadingTensor, args[0])
            shape = torch.empty(one.shape, device="meta").view(*args[1:] or (one.shape,)).shape
            return make_lazy_tensor(shape, one.dtype, read=lambda: one.read().view(shape))
        kwargs = kwargs or {}
        written = tree_leaves(
            [
                args[place] if place < len(args) else kwargs.get(argument.name)
                for place, argument in enumerate(schema(func).arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        )
        if any(isinstance(leaf, RereadingTensor) for leaf in written):
            raise TypeError(f"{func} would change a tensor that is on a drive")
        if func is torch.ops.aten._to_copy.default and kwargs.keys() <= _OF_A_MOVE:
            # The tensor just read has no other owner, so it is not copied again if nothing changes.
            return args[0].read().to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        read = tree_map_only(RereadingTensor, lambda one: one.read(), (args, kwargs))
        return func(*read[0], **read[1])


def make_lazy_tensor(shape: torch.Size, dtype: torch.dtype, *, read: Callable[[], Tensor]) -> RereadingTensor:
    """Returns a tensor on the meta device whose elements `read` returns, for example in `.cpu()`."""
    one: RereadingTensor = make_wrapper_subclass(
        RereadingTensor, shape, dtype=dtype, device="meta", requires_grad=False
    )
    one.read = read
    return one
