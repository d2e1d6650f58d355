"""Saving during training: a thread writes the state, or a copy of it.

[Note: staged before the update] Forward and backward change no parameter and no optimizer state, so these are
copied while they run. An update before the copy is done would silently tear the snapshot. So the optimizer
itself calls a hook before each step, and the hook waits for the copy.

[Note: written from where it lies] A copy costs as much processor time as the rest of the save, and training
misses that time. If the previous save was written before the next update came, this one is expected to be,
too. Shards in host memory are then not copied, unless the update comes first
([Note: copied before they change]). This applies to file systems only: with an object store, the update would
have to wait for the network.

[Note: not copied at all] State on a drive is read as it is written to the checkpoint
(`fullshard.offload.lazy_tensor`): a copy would take the memory that the drive saves. The next update leaves
this state as it is, because it writes another generation. The update after that would overwrite it, and waits
for the save.

[Note: a group of its own] The thread's collectives run concurrently with training's, in no order among them.
On one group they would be mistaken for each other, so the thread has its own gloo group.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.checkpointable import Checkpointable
from fullshard.checkpoint.location import CheckpointLocation, LocalLocation, location_of
from fullshard.checkpoint.per_node import NodeLocalDirectory
from fullshard.checkpoint.save import Layout, Saver, Snapshot, take_snapshot
from fullshard.checkpoint.shard_file import local_shard
from fullshard.checkpoint.snapshot_reader import FrozenShards, LiveShards
from fullshard.distributed.agreement import Group, distributed, on_all_ranks
from fullshard.errors import CheckpointError
from fullshard.spec.plan import Plan
from fullshard.system.direct_io import LARGE_BYTES, aligned_memory

_NICENESS = 10  # of the writing thread; see `_step_back`
_MARGIN = 1.25  # how much longer than a save an update must have been away, to be expected after it

logger = logging.getLogger("fullshard")


class Updated(Protocol):
    """A state that can report when it is about to change. `TrainState` is one."""

    def before_update(self, act: Callable[[], None]) -> None:
        """Calls `act` once, before the next update of parameters or optimizer state."""
        ...


@dataclass(frozen=True)
class SaveResult:
    """Result of one save.

    step: step of the state that was saved
    path: the checkpoint, or None if the save failed
    error: the error, or None
    seconds: duration of the save
    stalled_seconds: time that training waited
    """

    step: int
    path: Path | str | None
    error: CheckpointError | None
    seconds: float
    stalled_seconds: float


class BackgroundSaver:
    """Saves in the background, one checkpoint at a time. Leaving the context waits for the last save.

    Collective: every rank creates one, and calls `save` alike. It holds a copy of this rank's shards in host
    memory, pinned if they are on a GPU. The first save allocates the copy, and later saves reuse it;
    [Note: written from where it lies] says which shards need none. Call `wait` before changing parameters or
    optimizer state in any way other than the optimizer's step and `load`.

        with BackgroundSaver("checkpoints", keep=2) as saver:
            for step in train(state, plan):
                if step.index % 100 == 0:
                    saver.save(state)

    The arguments are those of `save`.
    """

    def __init__(
        self,
        directory: str | Path | CheckpointLocation | NodeLocalDirectory,
        *,
        keep: int = 0,
        keep_every: int = 0,
        layout: Layout = "sharded",
        plan: Plan | None = None,
        read_back: bool = False,
    ) -> None:
        place = directory if isinstance(directory, NodeLocalDirectory) else location_of(directory)
        self._saving = Saver(
            place, keep=keep, keep_every=keep_every, layout=layout, plan=plan, read_back=read_back
        )
        self._group = cast(Group, dist.new_group(backend="gloo") if distributed() else None)
        self._staging = _StagingBuffers()
        self._running: Future[SaveResult] | None = None
        self._stalled = 0.0
        self._pace = _SaveTiming()
        self._on_disk = isinstance(place, LocalLocation | NodeLocalDirectory)
        self._outcomes: list[SaveResult] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    @property
    def staged_bytes(self) -> int:
        """Host memory that the copies take, in bytes."""
        return self._staging.bytes

    @property
    def done(self) -> bool:
        """True if no save is running on this rank; other ranks may still be saving."""
        return self._running is None or self._running.done()

    def save(self, state: Checkpointable) -> None:
        """Starts to save `state`.

        First waits for a save that is still running. If `state` cannot report when it will change, also waits
        for the copy. See [Note: staged before the update].

        Raises CheckpointError if the state cannot be saved at all. Later failures are reported by `outcomes`.
        """
        started = time.perf_counter()
        self.wait()
        mine = on_all_ranks(lambda: take_snapshot(state), doing="taking the state to save")
        self._pace.begin()
        can_tell = hasattr(state, "before_update")
        live = can_tell and self._on_disk and self._pace.is_ahead
        staged = self._staging.begin(mine, live=live)
        settled = threading.Event()
        # A thread for each save: one that has stepped back cannot come forward again to copy.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running = thread.submit(self._run, staged, settled, started=started)
        thread.shutdown(wait=False)
        self._stalled = time.perf_counter() - started
        if can_tell:
            updated, pace = cast(Updated, state), self._pace
            updated.before_update(pace.update_came)
            updated.before_update(lambda: self._settle(settled))
            if self._staging.leaves_some:
                running = self._running
                updated.before_update(lambda: updated.before_update(lambda: self._await(running)))
        else:
            self._settle(settled)

    def outcomes(self) -> list[SaveResult]:
        """Returns the results of the saves that finished since the last call."""
        if self._running is not None and self.done:
            self._take(self._running)
        ended, self._outcomes = self._outcomes, []
        return ended

    def wait(self) -> None:
        """Waits until no save is running."""
        if self._running is not None:
            self._take(self._running)

    def _take(self, running: "Future[SaveResult]") -> None:
        self._outcomes.append(replace(running.result(), stalled_seconds=self._stalled))
        self._running = None

    def _await(self, running: "Future[SaveResult]") -> None:
        started = time.perf_counter()
        futures.wait([running])
        self._stalled += time.perf_counter() - started

    def _settle(self, settled: threading.Event) -> None:
        started = time.perf_counter()
        settled.wait()
        self._staging.settle()
        self._stalled += time.perf_counter() - started

    def _run(self, mine: Snapshot, settled: threading.Event, *, started: float) -> SaveResult:
        path: Path | str | None = None
        error: CheckpointError | None = None

        def stage() -> None:
            try:
                self._staging.fill(mine)
            finally:
                settled.set()

        try:
            on_all_ranks(stage, doing=f"copying step {mine.step} aside", group=self._group)
            _step_back()
            self._staging.arrived()
            path = self._saving.run(mine, group=self._group)
            self._pace.written()
        except CheckpointError as failed:
            error = failed
        except (OSError, RuntimeError) as failed:  # another rank has gone
            error = CheckpointError(
                f"saving step {mine.step} in the background failed.", got=f"{type(failed).__name__}: {failed}"
            )
        finally:
            mine.held.finish()
        return SaveResult(mine.step, path, error, time.perf_counter() - started, stalled_seconds=0.0)


class _SaveTiming:
    """Predicts, from the last completed measurement, whether a save ends before the next update."""

    def __init__(self) -> None:
        self.is_ahead = False
        self._began = 0.0
        self._update: float | None = None
        self._end: float | None = None

    def begin(self) -> None:
        """Starts timing a save. No other save may be running."""
        if self._update is not None and self._end is not None:
            self.is_ahead = self._update > _MARGIN * self._end
        self._began, self._update, self._end = time.perf_counter(), None, None

    def update_came(self) -> None:
        if self._update is None:
            self._update = time.perf_counter() - self._began

    def written(self) -> None:
        self._end = time.perf_counter() - self._began


class _StagingBuffers:
    """This rank's shards during a save, and reusable buffers for their copies."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._sources: dict[str, Tensor] = {}
        self._live: LiveShards | None = None
        self._stream: torch.cuda.Stream | None = None
        self.leaves_some = False  # of a snapshot: see [Note: not copied at all]

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def begin(self, mine: Snapshot, *, live: bool) -> Snapshot:
        """Returns the snapshot to save, whose shards are still to be copied.

        Small plain tensors (buffers, random states), which forward changes, are copied now. Shards are copied
        by `fill`. If `live`, and all of them are in host memory, they are copied by `settle` instead, as far
        as they are not written by then.
        """
        shards = {n: local_shard(t) for n, t in mine.tensors.items() if isinstance(t, DTensor)}
        self._sources = {name: shard for name, shard in shards.items() if not shard.is_meta}
        self.leaves_some = len(self._sources) < len(shards)
        self._live = None
        if live and not any(source.is_cuda for source in self._sources.values()):
            self._live = LiveShards(self._sources, copied=self._copied)
            self._sources = {}
        if any(source.is_cuda for source in self._sources.values()):
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        tensors = {
            name: tensor if name in shards else tensor.detach().to("cpu", copy=True)
            for name, tensor in mine.tensors.items()
        }
        return replace(mine, tensors=tensors, held=self._live or FrozenShards())

    def fill(self, mine: Snapshot) -> None:
        """Copies the shards, and puts the copies into the snapshot."""
        with torch.cuda.stream(self._stream):  # for None it does nothing
            for name, source in self._sources.items():
                mine.tensors[name] = _as_shard_of(mine.tensors[name], self._copied(name, source))
        self._sources = {}

    def _copied(self, name: str, source: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = self._buffers[name] = _buffer_for(source)
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def settle(self) -> None:
        """Makes later work on the device wait for the copies, and copies unwritten live shards."""
        if self._live is not None:
            self._live.copy_unwritten()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def arrived(self) -> None:
        """Waits until the copies are on the host."""
        if self._stream is not None:
            self._stream.synchronize()


def _buffer_for(source: Tensor) -> Tensor:
    """Returns host memory for a copy: pinned for a GPU tensor, else a mapping of its own for a large one.

    `malloc` would keep large memory for the thread that asked: after a few saves, gigabytes that no other
    thread can use. Both kinds begin at a page, so they are written without another copy:
    [Note: past the page cache].
    """
    if source.is_cuda or source.nbytes < LARGE_BYTES:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return torch.frombuffer(aligned_memory(source.nbytes), dtype=source.dtype).view(source.shape)


def _as_shard_of(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Returns a DTensor like `tensor` whose local shard is `buffer`."""
    whole = cast(DTensor, tensor)
    return DTensor.from_local(
        buffer,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _step_back() -> None:
    """Lowers the priority of this thread, so that threads that compute come first; a disk needs little time.

    On Linux the priority belongs to the thread, not to the process.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
