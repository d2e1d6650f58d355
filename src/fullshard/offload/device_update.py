"""Update, in device memory, of state that is kept in host memory: each group is copied in and out in pieces.

[Note: two buffers] Each piece is copied into one of two buffers, updated there, and copied back. On a GPU,
each of these three operations has its own stream, so that one piece is copied in while the previous piece is
updated and copied out. A buffer is refilled only after its content was copied out. All pieces of a group are
enqueued at once, and the host waits at the end of the group. The group's state is then complete in host
memory, and may be written to the drive.

Host memory is registered with the GPU; otherwise each copy would block. A segment may be split over pieces. A
piece begins at a multiple of CUT_ELEMENTS of its group, and segments begin at full vectors, so that on a CPU
the results equal those of an update of the whole group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fullshard.offload.store import Parts, dtypes_of
from fullshard.spec.groups import Group, Segment, piece_elements

_BUFFERS = 2


class Slice(NamedTuple):
    """A piece of a group in device memory, as a group of its own. `gradient` is laid out like each part."""

    group: Group
    state: Parts
    gradient: Tensor


class CopyStream(Protocol):
    """Runs enqueued functions in order, without blocking the host."""

    def put(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        """Enqueues `act`, to run after the events `after` of other streams. Returns the event of its end."""
        ...

    def use(self, memory: Tensor) -> None:
        """Makes memory that was just allocated safe for use by the functions of this stream."""
        ...

    def settle(self) -> None:
        """Waits until all enqueued functions have run."""
        ...


class CopyStreams(NamedTuple):
    """The streams that copy pieces to the device, update them, and copy them back."""

    into: CopyStream
    change: CopyStream
    out: CopyStream


class SyncCopy:
    """Stream without CUDA: `put` runs the function before it returns."""

    def put(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        act()

    def use(self, memory: Tensor) -> None: ...

    def settle(self) -> None: ...


class AsyncCopy:
    """CUDA stream to which any thread may add functions: `put` sets the current device for each."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def put(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            act()
            return self._stream.record_event()

    def use(self, memory: Tensor) -> None:
        # Work enqueued earlier on the current stream may still use this memory, so this stream waits for it.
        # When the memory is freed, the allocator must not reuse it before this stream is done with it.
        self._stream.wait_stream(torch.cuda.current_stream(memory.device))
        memory.record_stream(self._stream)

    def settle(self) -> None:
        self._stream.synchronize()


class DeviceUpdate:
    """Updates `groups` through buffers in the memory of `device`: see [Note: two buffers].

    moments: dtype of the moments; None for the masters' dtype
    streams: by default three CUDA streams; without CUDA, the calling thread does all work
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        device: torch.device,
        moments: torch.dtype | None,
        streams: CopyStreams | None = None,
    ) -> None:
        self._elements, self._moments = piece_elements(groups), moments
        on_gpu = device.type == "cuda"
        self._streams = streams or CopyStreams(
            *((AsyncCopy(device) if on_gpu else SyncCopy()) for _ in CopyStreams._fields)
        )
        sizes = [sum(dtype.itemsize for dtype in _dtypes(group, moments)) for group in groups]
        size = max(sizes, default=0) * self._elements
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        for stream in self._streams:
            for buffer in self.buffers:
                stream.use(buffer)

    def update(
        self,
        group: Group,
        parts: Parts,
        *,
        gradients: Mapping[str, Tensor],
        change: Callable[[Slice], None],
    ) -> None:
        """Calls `change` on each piece that has a gradient, and returns when the results are in `parts`.

        parts: the group's state, in host memory
        gradients: flat gradients of this rank's shards by parameter, in host memory, in the masters' dtype
        change: updates a piece in place, except its segments without a gradient
        """
        streams, free = self._streams, [list[Any]() for _ in self.buffers]
        dtypes = _dtypes(group, self._moments)
        try:
            every = pieces(group, self._elements)
            changing = (one for one in every if any(name in gradients for name in one[1].names))
            for turn, (begin, piece) in enumerate(changing):
                at = turn % _BUFFERS
                *state, gradient = self._views(self.buffers[at], dtypes, numel=piece.numel)
                there = [part[begin : begin + piece.numel] for part in parts]
                come = partial(_copy_in, there, state, gradients=gradients, piece=piece, into=gradient)
                arrived = streams.into.put(come, after=free[at])
                whole = Slice(piece, Parts(*state), gradient)
                changed = streams.change.put(partial(change, whole), after=[arrived])
                free[at] = [streams.out.put(partial(_copy, state, there), after=[changed])]
        finally:
            for stream in streams:
                stream.settle()

    def _views(self, buffer: Tensor, dtypes: Sequence[torch.dtype], *, numel: int) -> Iterator[Tensor]:
        begin = 0
        for dtype in dtypes:
            yield buffer[begin : begin + numel * dtype.itemsize].view(dtype)
            begin += self._elements * dtype.itemsize


def pieces(group: Group, elements: int) -> Iterator[tuple[int, Group]]:
    """Yields (position in the group, piece) for each run of `elements` elements that contains a segment's."""
    for begin in range(0, group.numel, elements):
        segments = tuple(
            Segment(one.name, one.begin + first - one.offset, one.begin + last - one.offset, first - begin)
            for one in group.segments
            if (first := max(begin, one.offset)) < (last := min(begin + elements, one.offset + one.numel))
        )
        if segments:
            yield begin, Group(group.index, group.dtype, tuple(one.name for one in segments), segments)


def _copy_in(
    there: Sequence[Tensor],
    state: Sequence[Tensor],
    *,
    gradients: Mapping[str, Tensor],
    piece: Group,
    into: Tensor,
) -> None:
    _copy(there, state)
    for one in piece.segments:
        if (gradient := gradients.get(one.name)) is not None:
            into[one.in_group].copy_(gradient[one.in_shard], non_blocking=True)


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)


def _dtypes(group: Group, moments: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the three parts, and of the gradient, which has the master's."""
    state = dtypes_of(group.dtype, moments)
    return *state, state[0]
