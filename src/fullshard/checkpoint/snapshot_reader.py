"""Readers of a state's shards while it is saved.

[Note: copied before they change] Shards in host memory are written without a copy: forward and backward do
not change them. Before an update does, `copy_unwritten_shards` waits for the shard that is being written, and
copies the shards that are not written yet. So all written shards are of the same step.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

from torch import Tensor

from fullshard.errors import CheckpointError


class UnchangingShardReader:
    """Reader of shards that nothing changes while they are saved.

    The shards are written through aligned buffers of large pages, which is faster than from malloc's small
    pages (docs/log.md).
    """

    in_step = False  # see `shard_file.ShardFileWriter`

    def open_shard(self, name: str, shard: Tensor) -> AbstractContextManager[Tensor]:
        """Yields `shard` itself."""
        return nullcontext(shard)

    def release_shards(self) -> None:
        """Does nothing, since there are no copies to release."""


class LiveShardReader:
    """Reader of shards that training continues to use. See [Note: copied before they change].

    One thread reads, and another calls `copy_unwritten_shards`.

    shards: shards by the name of their tensor
    copied: function that returns a copy of a shard, given its name and the shard
    """

    in_step = True

    def __init__(self, shards: Mapping[str, Tensor], *, copied: Callable[[str, Tensor], Tensor]) -> None:
        self._names, self._live = frozenset(shards), dict(shards)
        self._copied = copied
        self._copies: dict[str, Tensor] = {}
        self._lost: dict[str, Exception] = {}  # why a shard could not be copied
        self._held: set[str] = set()  # read or copied at this moment
        self._changed = threading.Condition()

    @contextmanager
    def open_shard(self, name: str, shard: Tensor) -> Generator[Tensor]:
        """Yields the shard or its copy, unchanged while the context is open, and then releases it.

        Raises CheckpointError for a shard that could not be copied.
        """
        with self._changed:
            self._changed.wait_for(lambda: name not in self._held)
            if name in self._lost:
                error = self._lost[name]
                raise CheckpointError(
                    f"{name} is not saved.",
                    got=f"{type(error).__name__}: {error}",
                    why="it had to be copied before training changed it, and could not be",
                    fix='memory for a copy of the state besides training, or checkpoint.mode = "sync"',
                )
            source = self._copies.get(name, self._live.get(name))
            assert source is not None or name not in self._names, f"{name} is read a second time"
            self._held.add(name)
        try:
            yield shard if source is None else source
        finally:
            with self._changed:
                self._live.pop(name, None)
                self._copies.pop(name, None)
                self._end_shard_access(name)

    def release_shards(self) -> None:
        """Releases all shards and copies."""
        with self._changed:
            self._live.clear()
            self._copies.clear()

    def copy_unwritten_shards(self) -> None:
        """Copies the shards that are not written yet, last one first. After it returns, they may change."""
        for name in reversed(list(self._live)):
            with self._changed:
                self._changed.wait_for(lambda name=name: name not in self._held)
                source = self._live.get(name)
                if source is None:
                    continue
                self._held.add(name)
            self._copy_shard(name, source)

    def _copy_shard(self, name: str, source: Tensor) -> None:
        copy: Tensor | None = None
        try:
            copy = self._copied(name, source)
        except (OSError, RuntimeError, MemoryError) as error:  # the save's failure, not that of training
            self._lost[name] = error
        with self._changed:
            if copy is not None and name in self._live:
                self._copies[name] = copy
            self._live.pop(name, None)
            self._end_shard_access(name)

    def _end_shard_access(self, name: str) -> None:
        self._held.discard(name)
        self._changed.notify_all()


ShardReader: TypeAlias = UnchangingShardReader | LiveShardReader
