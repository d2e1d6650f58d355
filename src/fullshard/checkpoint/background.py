"""Saving during training: a thread writes the state, or a copy of it.

[Note: staged before the update] Forward and backward change no parameter and no optimizer state, so these are
copied while they run. If an update changed them before the copy is done, the snapshot would mix two steps. So
the optimizer calls a hook before each step, and the hook waits for the copy.

[Note: written from where it lies] A copy costs as much processor time as the rest of the save, and training
misses that time. If the previous save ended before the next update came, this save is expected to do so, too.
Shards in host memory are then not copied, unless the update comes first ([Note: copied before they change]).
This applies to file systems only: with an object store, the update would have to wait for the network.

[Note: not copied at all] State on a drive is read as it is written to the checkpoint
(`fullshard.offload.lazy_tensor`): a copy would take the memory that the drive saves. The next update does not
change this state, because it writes another generation. The second update would overwrite it, and waits for
the save.

[Note: a group of its own] The thread's collectives run concurrently with training's, in any order. In one
process group they would be mistaken for each other, so the thread has its own gloo group.
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
from typing import Protocol, Self, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.checkpointable import Checkpointable
from fullshard.checkpoint.location import CheckpointLocation, location_of
from fullshard.checkpoint.save import Layout, Saver, Snapshot, take_snapshot
from fullshard.checkpoint.snapshot_reader import FrozenShards, LiveShards
from fullshard.distributed.agreement import Group, agreed, distributed
from fullshard.distributed.tensors import local_shard, shard_like
from fullshard.errors import CheckpointError
from fullshard.spec.plan import Plan
from fullshard.system.direct_io import LARGE_BYTES, aligned_memory

_NICENESS = 10  # of the writing thread; see `_step_back`
_MARGIN = 1.25  # a save is expected to end first if the last update came this many times later than its save

logger = logging.getLogger("fullshard")


@runtime_checkable
class Updated(Protocol):
    """A state, such as `TrainState`, that calls hooks before it changes."""

    def before_update(self, act: Callable[[], None]) -> None:
        """Registers `act`, to be called once, before the next update of parameters or optimizer state."""


@dataclass(frozen=True)
class SaveResult:
    """Result of one save.

    step: finished steps of the saved state
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

    Collective: every rank creates one, with the arguments of `fullshard.save`, and calls `save` at the same
    steps. A copy of this rank's shards stays in host memory, pinned if they are on a GPU, for reuse by later
    saves. Call `wait` before you change parameters or optimizer state, except by the optimizer and `load`.

        with BackgroundSaver("checkpoints", keep=2) as saver:
            for step in train(state, plan):
                if step.index % 100 == 0:
                    saver.save(state)
    """

    def __init__(
        self,
        directory: str | Path | CheckpointLocation,
        *,
        keep: int = 0,
        keep_every: int = 0,
        layout: Layout = "sharded",
        plan: Plan | None = None,
        read_back: bool = False,
    ) -> None:
        place = location_of(directory)
        self._saving = Saver(
            place, keep=keep, keep_every=keep_every, layout=layout, plan=plan, read_back=read_back
        )
        self._group = cast(Group, dist.new_group(backend="gloo") if distributed() else None)
        self._staging = _StagingBuffers()
        self._running: Future[SaveResult] | None = None
        self._stalled = 0.0
        self._pace = _SaveTiming()
        self._outcomes: list[SaveResult] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()

    @property
    def staged_bytes(self) -> int:
        """Host memory of this rank's copies of shards, in bytes."""
        return self._staging.bytes

    @property
    def done(self) -> bool:
        """True if no save is running on this rank; other ranks may still be saving."""
        return self._running is None or self._running.done()

    def save(self, state: Checkpointable) -> None:
        """Waits for a save that is still running, then starts to save `state`.

        Also waits for the copy, unless `state` is `Updated`. See [Note: staged before the update]. Raises
        CheckpointError if the state cannot be saved at all; later failures are in `outcomes`.
        """
        started = time.perf_counter()
        self.wait()
        with agreed("taking the state to save"):
            mine = take_snapshot(state)
        self._pace.begin()
        live = isinstance(state, Updated) and self._saving.place.is_local and self._pace.is_ahead
        staged = self._staging.begin(mine, live=live)
        settled = threading.Event()
        # A thread for each save: one that has stepped back cannot come forward again to copy.
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running = thread.submit(self._run, staged, settled, started=started)
        thread.shutdown(wait=False)
        self._stalled = time.perf_counter() - started
        if isinstance(state, Updated):
            state.before_update(self._pace.update_came)
            state.before_update(lambda: self._settle(settled))
            if self._staging.leaves_some:
                running = self._running
                state.before_update(lambda: state.before_update(lambda: self._await(running)))
        else:
            self._settle(settled)

    def outcomes(self) -> list[SaveResult]:
        """Returns the results of the saves that finished since the last call."""
        if self.done:
            self.wait()
        ended, self._outcomes = self._outcomes, []
        return ended

    def wait(self) -> None:
        """Waits until no save is running."""
        if self._running is not None:
            self._outcomes.append(replace(self._running.result(), stalled_seconds=self._stalled))
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

        try:
            with agreed(f"copying step {mine.step} aside", group=self._group):
                try:
                    self._staging.fill(mine)
                finally:
                    settled.set()
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
    """Times of the running save, and of the update after it; predicts which of the two comes first.

    is_ahead: whether the save is expected to end before the next update
    """

    def __init__(self) -> None:
        self.is_ahead = False
        self._began = 0.0
        self._update: float | None = None
        self._end: float | None = None

    def begin(self) -> None:
        """Starts timing a save, and sets `is_ahead` by the last save, if both of its times are known."""
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
        """Returns the snapshot to save, whose shards are not copied yet.

        Plain tensors (buffers, random states), which forward changes, are copied now. If `live`, and all
        shards are in host memory, `settle` copies the shards that are not written by then; else `fill` copies
        all shards.
        """
        shards = {n: local_shard(t) for n, t in mine.tensors.items() if isinstance(t, DTensor)}
        self._sources = {name: shard for name, shard in shards.items() if not shard.is_meta}
        self.leaves_some = len(self._sources) < len(shards)
        self._live = None
        if any(source.is_cuda for source in self._sources.values()):
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        elif live:
            self._live = LiveShards(self._sources, copied=self._copied)
            self._sources = {}
        tensors = {
            name: tensor if name in shards else tensor.detach().to("cpu", copy=True)
            for name, tensor in mine.tensors.items()
        }
        return replace(mine, tensors=tensors, held=self._live or FrozenShards())

    def fill(self, mine: Snapshot) -> None:
        """Copies the shards into buffers, and puts the copies into the snapshot `mine`."""
        with torch.cuda.stream(self._stream):  # for None it does nothing
            for name, source in self._sources.items():
                whole = cast(DTensor, mine.tensors[name])
                mine.tensors[name] = shard_like(whole, self._copied(name, source))
        self._sources = {}

    def _copied(self, name: str, source: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = self._buffers[name] = _buffer_for(source)
        return buffer.copy_(source, non_blocking=source.is_cuda)

    def settle(self) -> None:
        """Copies live shards that are not written yet; makes later work on the GPU wait for the copies."""
        if self._live is not None:
            self._live.copy_unwritten()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def arrived(self) -> None:
        """Waits until the copies from the GPU are in host memory."""
        if self._stream is not None:
            self._stream.synchronize()


def _buffer_for(source: Tensor) -> Tensor:
    """Returns a host tensor for a copy of `source`: pinned for a GPU, else page-aligned if it is large.

    `malloc` would keep large memory for the thread that allocated it: after a few saves, gigabytes that no
    other thread can use.
    """
    if source.is_cuda or source.nbytes < LARGE_BYTES:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return torch.frombuffer(aligned_memory(source.nbytes), dtype=source.dtype).view(source.shape)


def _step_back() -> None:
    """Lowers the priority of this thread below that of threads that compute (Linux only)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
