"""Saving during training: a thread writes a copy of the state.

[Note: staged before the update] Forward and backward change no parameter and no optimizer state, so these are
copied while they run. If an update changed them before the copy is done, the snapshot would mix two steps. So
the optimizer calls a hook before each step, and the hook waits for the copy.

[Note: not copied at all] State on a drive is read as it is written to the checkpoint
(`fullshard.offload.store`): a copy would take the memory that the drive saves. The next update does not
change this state, because it writes another generation. The second update would overwrite it, and waits for
the save.

[Note: a group of its own] The thread's collectives run concurrently with training's, in any order. In one
process group they would be mistaken for each other, so the thread has its own gloo group.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol, Self, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.location import CheckpointLocation, location_of
from fullshard.checkpoint.manifest import Checkpointable
from fullshard.checkpoint.save import CheckpointSaver, Snapshot, take_snapshot
from fullshard.distributed.agreement import Group, all_ranks_have, is_distributed, raise_on_all_ranks
from fullshard.distributed.host import allocate_host_memory, make_device_thread
from fullshard.distributed.tensors import detached_local_tensor, dtensor_from_local_part
from fullshard.errors import CheckpointError
from fullshard.spec.groups import page_aligned_bytes
from fullshard.spec.plan import Plan
from fullshard.system.direct_io import LARGE_BYTES
from fullshard.torch_private.groups import find_default_timeout

_NICENESS = 10  # of the writing thread


@runtime_checkable
class UpdateNotifier(Protocol):
    """A state, such as `TrainState`, that calls hooks before it changes."""

    def register_before_next_update(self, act: Callable[[], None]) -> None:
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
        plan: Plan | None = None,
    ) -> None:
        place = location_of(directory)
        self._saving = CheckpointSaver(place, keep=keep, keep_every=keep_every, plan=plan)
        self._group = _connect_ranks()
        self._has_lost_connection = False  # with another rank
        self._staging = _StagingBuffers()
        self._running: Future[SaveResult] | None = None
        self._stalled = 0.0
        self._outcomes: list[SaveResult] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    @property
    def staged_bytes(self) -> int:
        """Host memory of this rank's copies of shards, in bytes."""
        return 0 if self._staging.memory is None else self._staging.memory.nbytes

    @property
    def is_idle(self) -> bool:
        """True if no save is running on this rank; other ranks may still be saving."""
        return self._running is None or self._running.done()

    def save(self, state: Checkpointable) -> None:
        """Waits for a save that is still running, then starts to save `state`.

        Also waits for the copy, unless `state` is an `UpdateNotifier`. See [Note: staged before the update].
        If the save before lost its connection with a rank, the ranks connect again. Raises CheckpointError if
        the state cannot be saved at all; other failures are in `outcomes`.
        """
        started = time.perf_counter()
        self.wait()
        if not all_ranks_have(not self._has_lost_connection):
            self._close_group()
            self._group, self._has_lost_connection = _connect_ranks(), False
        with raise_on_all_ranks("taking the state to save"):
            mine = take_snapshot(state)
        staged = self._staging.copy_all_but_shards(mine)
        copy_ended = threading.Event()
        # A thread for each save: one that has stepped back cannot come forward again to copy.
        thread = make_device_thread("checkpoint")
        running = self._running = thread.submit(self._run_save, staged, copy_ended, started=started)
        thread.shutdown(wait=False)
        self._stalled = time.perf_counter() - started
        if isinstance(state, UpdateNotifier):
            register = state.register_before_next_update
            register(lambda: self._stall_until_copied(copy_ended))
            if self._staging.leaves_some:
                register(lambda: register(lambda: self._stall_until_saved(running)))
        else:
            self._stall_until_copied(copy_ended)

    def outcomes(self) -> list[SaveResult]:
        """Returns the results of the saves that finished since the last call."""
        if self.is_idle:
            self.wait()
        ended, self._outcomes = self._outcomes, []
        return ended

    def wait(self) -> None:
        """Waits until no save is running."""
        if self._running is not None:
            self._outcomes.append(replace(self._running.result(), stalled_seconds=self._stalled))
            self._running = None

    def _stall_until_saved(self, running: Future[SaveResult]) -> None:
        started = time.perf_counter()
        futures.wait([running])
        self._stalled += time.perf_counter() - started

    def _stall_until_copied(self, copy_ended: threading.Event) -> None:
        started = time.perf_counter()
        copy_ended.wait()
        self._staging.make_gpu_wait_for_copies()
        self._stalled += time.perf_counter() - started

    def _run_save(self, mine: Snapshot, copy_ended: threading.Event, *, started: float) -> SaveResult:
        path: Path | str | None = None
        error: CheckpointError | None = None
        try:
            with raise_on_all_ranks(f"copying step {mine.step} aside", group=self._group):
                try:
                    self._staging.copy_shards(mine)
                finally:
                    copy_ended.set()
            if sys.platform == "linux":  # threads that compute go first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            self._staging.wait_for_copies()
            path = self._saving.save_snapshot(mine, group=self._group)
        except CheckpointError as failed:
            error = failed
        except (OSError, RuntimeError) as failed:  # not agreed on: another rank has gone
            got = f"{type(failed).__name__}: {failed}"
            error = CheckpointError(f"saving step {mine.step} in the background failed.", got=got)
            self._has_lost_connection = True
            self._close_group()  # so that other ranks' threads do not wait for this one
        return SaveResult(mine.step, path, error, time.perf_counter() - started, stalled_seconds=0.0)

    def _close_group(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _connect_ranks() -> Group:
    """Returns a group for the threads of saves; None without ranks. Collective."""
    if not is_distributed():
        return None
    group = cast(Group, dist.new_group(backend="gloo", timeout=find_default_timeout()))
    # Connects the ranks now: one that was not connected yet would be waited for, not missed, if it is lost.
    all_ranks_have(True, group=group)
    return group


class _StagingBuffers:
    """This rank's shards during a save, and reusable host memory for their copies."""

    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self._sources: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self.leaves_some = False  # whether some shards are not copied: see [Note: not copied at all]

    def copy_all_but_shards(self, mine: Snapshot) -> Snapshot:
        """Returns the snapshot to save, whose shards `copy_shards` copies.

        Plain tensors (buffers, step counts, random states), which forward or the next update may change, are
        copied now. From a GPU, the host waits for them in `wait_for_copies`.
        """
        shards = {n: detached_local_tensor(t) for n, t in mine.tensors.items() if isinstance(t, DTensor)}
        self._sources = {name: shard for name, shard in shards.items() if not shard.is_meta}
        self.leaves_some = len(self._sources) < len(shards)
        plain = {n: t.detach() for n, t in mine.tensors.items() if n not in shards}
        copies = {n: t.to("cpu", copy=True, non_blocking=t.is_cuda) for n, t in plain.items()}
        if any(source.is_cuda for source in (*self._sources.values(), *plain.values())):
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        return replace(mine, tensors=mine.tensors | copies)

    def copy_shards(self, mine: Snapshot) -> None:
        """Copies the shards into host memory, and puts the copies into the snapshot `mine`.

        The memory is one slab, pinned for a GPU. Large copies are aligned to pages, for direct I/O.
        """
        # Large ones first, which are whole pages, so that all of them are aligned.
        order = sorted(self._sources.items(), key=lambda item: -item[1].nbytes)
        sizes = [source.nbytes for _, source in order]
        *begins, total = accumulate((_aligned_bytes(size) for size in sizes), initial=0)
        if self.memory is None or self.memory.nbytes < total:
            self.memory = None  # freed before the new memory is allocated
            pinned = any(source.is_cuda for source in self._sources.values())
            self.memory = allocate_host_memory(total, pinned=pinned)
        with torch.cuda.stream(self._stream):  # for None it does nothing
            for (name, source), begin in zip(order, begins, strict=True):
                copy = self.memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
                copy.copy_(source, non_blocking=True)
                mine.tensors[name] = dtensor_from_local_part(cast(DTensor, mine.tensors[name]), copy)
        self._sources = {}

    def make_gpu_wait_for_copies(self) -> None:
        """Makes later work on the GPU wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait_for_copies(self) -> None:
        """Waits until the copies from the GPU are in host memory."""
        if self._stream is not None:
            self._stream.synchronize()


def _aligned_bytes(size_bytes: int) -> int:
    return page_aligned_bytes(size_bytes, 1) if size_bytes >= LARGE_BYTES else -(-size_bytes // 64) * 64
