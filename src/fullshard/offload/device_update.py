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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard.offload.store import MasterAndMoments, master_and_moment_dtypes
from fullshard.spec.groups import OffloadGroup, ShardSegment, copy_chunk_elements

_BUFFERS = 2


class GroupPieceOnDevice(NamedTuple):
    """A piece of a group in device memory, as a group of its own. `gradient` is laid out like each part."""

    group: OffloadGroup
    state: MasterAndMoments
    gradient: Tensor


class WorkStream:
    """Stream of device work: enqueued functions issue work, which runs in order. The host need not wait.

    Any thread may add functions. Without CUDA, `enqueue` runs the function before it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def enqueue(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        """Enqueues `act`, to run after the events `after` of other streams. Returns the event of its end."""
        if self._stream is None:
            act()
            return None
        for event in after:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):  # which also sets the current device
            act()
            return self._stream.record_event()

    def make_memory_usable_in_stream(self, memory: Tensor) -> None:
        """Makes memory that was just allocated safe for use by the functions of this stream."""
        if self._stream is not None:
            # Work enqueued earlier on the current stream may still use this memory, so this stream waits.
            # When the memory is freed, the allocator must not reuse it before this stream is done with it.
            self._stream.wait_stream(torch.cuda.current_stream(memory.device))
            memory.record_stream(self._stream)

    def synchronize(self) -> None:
        """Waits until all enqueued functions have run."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceUpdateStreams(NamedTuple):
    """The streams that copy pieces to the device, update them, and copy them back."""

    into: WorkStream
    change: WorkStream
    out: WorkStream


class DeviceUpdate:
    """Updates `groups` through buffers in the memory of `device`: see [Note: two buffers].

    moments: dtype of the moments; None for the masters' dtype
    streams: by default three CUDA streams; without CUDA, the calling thread does all work
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        *,
        device: torch.device,
        moments: torch.dtype | None,
        streams: DeviceUpdateStreams | None = None,
    ) -> None:
        self._elements, self._moments = copy_chunk_elements(groups), moments
        self._streams = streams or DeviceUpdateStreams(*(WorkStream(device) for _ in range(3)))
        sizes = [sum(dtype.itemsize for dtype in _buffer_dtypes(group, moments)) for group in groups]
        size = max(sizes, default=0) * self._elements
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        for stream in self._streams:
            for buffer in self.buffers:
                stream.make_memory_usable_in_stream(buffer)

    def update_group(
        self,
        group: OffloadGroup,
        parts: MasterAndMoments,
        *,
        gradients: Mapping[str, Tensor],
        change: Callable[[GroupPieceOnDevice], None],
    ) -> None:
        """Calls `change` on each piece that has a gradient, and returns when the results are in `parts`.

        parts: the group's state, in host memory
        gradients: flat gradients of this rank's shards by parameter, in host memory, in the masters' dtype
        change: updates a piece in place, except its segments without a gradient
        """
        streams, free = self._streams, [list[Any]() for _ in self.buffers]
        dtypes = _buffer_dtypes(group, self._moments)
        try:
            every = iterate_group_pieces(group, self._elements)
            changing = (one for one in every if any(name in gradients for name in one[1].names))
            for turn, (begin, piece) in enumerate(changing):
                at = turn % _BUFFERS
                *state, gradient = self._part_views(self.buffers[at], dtypes, numel=piece.padded_numel)
                here = GroupPieceOnDevice(piece, MasterAndMoments(*state), gradient)
                there = [part[begin : begin + piece.padded_numel] for part in parts]
                come = partial(_copy_piece_to_device, there, here, gradients=gradients)
                arrived = streams.into.enqueue(come, after=free[at])
                changed = streams.change.enqueue(partial(change, here), after=[arrived])
                free[at] = [streams.out.enqueue(partial(_copy_tensors, state, there), after=[changed])]
        finally:
            for stream in streams:
                stream.synchronize()

    def _part_views(self, buffer: Tensor, dtypes: Sequence[torch.dtype], *, numel: int) -> Iterator[Tensor]:
        begin = 0
        for dtype in dtypes:
            yield buffer[begin : begin + numel * dtype.itemsize].view(dtype)
            begin += self._elements * dtype.itemsize


def iterate_group_pieces(group: OffloadGroup, elements: int) -> Iterator[tuple[int, OffloadGroup]]:
    """Yields (position in the group, piece) for each run of `elements` elements that contains a segment's."""
    for begin in range(0, group.padded_numel, elements):
        segments = tuple(
            ShardSegment(
                one.name, one.begin + first - one.offset, one.begin + last - one.offset, first - begin
            )
            for one in group.segments
            if (first := max(begin, one.offset)) < (last := min(begin + elements, one.offset + one.numel))
        )
        if segments:
            yield begin, OffloadGroup(group.index, group.dtype, tuple(one.name for one in segments), segments)


def _copy_piece_to_device(
    parts: Sequence[Tensor], piece: GroupPieceOnDevice, *, gradients: Mapping[str, Tensor]
) -> None:
    _copy_tensors(parts, piece.state)
    for one in piece.group.segments:
        if (gradient := gradients.get(one.name)) is not None:
            piece.gradient[one.slice_in_group].copy_(gradient[one.slice_in_shard], non_blocking=True)


def _copy_tensors(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)


def _buffer_dtypes(group: OffloadGroup, moments: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the three parts, and of the gradient, which has the master's."""
    state = master_and_moment_dtypes(group.dtype, moments)
    return *state, state[0]
