"""Readers of a state's shards while it is saved.

[Note: copied before they change] Shards in host memory are written from where they lie: forward and backward
do not change them. Before an update does, `copy_unwritten` copies those that are not yet written, after it
has waited for the one that is being written. So the written bytes of every shard are of one moment.
"""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

from torch import Tensor

from fullshard.errors import CheckpointError


class FrozenShards:
    """Shards that nothing changes while they are saved.

    They lie in malloc's small pages, from which writing is faster through aligned blocks of large pages
    (docs/log.md).
    """

    in_step = False  # see `shard_file.ShardFileWriter`

    def read(self, name: str, shard: Tensor, *, last: bool) -> AbstractContextManager[Tensor]:
        """Yields the elements of `shard`, unchanged while the context is open; the `last` read frees them."""
        return nullcontext(shard)

    def finish(self) -> None:
        """Ends all reading."""


class LiveShards:
    """Shards that training keeps using. See [Note: copied before they change].

    They are written in place, because a copy on the way would take processor time from training. One thread
    reads, and one calls `copy_unwritten`.

    shards: shards by the name of their tensor
    copied: makes a copy of a shard, given its name and the shard
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
    def read(self, name: str, shard: Tensor, *, last: bool) -> Generator[Tensor]:
        """Yields the shard or its copy. Raises CheckpointError for a shard that could not be copied."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._held)
            if name in self._lost:
                raise _not_copied(name, self._lost[name])
            source = self._copies.get(name, self._live.get(name))
            assert source is not None or name not in self._names, f"{name} is read after the last time"
            self._held.add(name)
        try:
            yield shard if source is None else source
        finally:
            with self._changed:
                if last:
                    self._live.pop(name, None)
                    self._copies.pop(name, None)
                self._release(name)

    def finish(self) -> None:
        with self._changed:
            self._live.clear()
            self._copies.clear()

    def copy_unwritten(self) -> None:
        """Copies the unwritten shards, from the last one on; after it returns, they may change."""
        for name in reversed(list(self._live)):
            with self._changed:
                self._changed.wait_for(lambda name=name: name not in self._held)
                source = self._live.get(name)
                if source is None:
                    continue
                self._held.add(name)
            self._copy(name, source)

    def _copy(self, name: str, source: Tensor) -> None:
        copy: Tensor | None = None
        try:
            copy = self._copied(name, source)
        except (OSError, RuntimeError, MemoryError) as error:  # the save's failure, not that of training
            self._lost[name] = error
        with self._changed:
            if copy is not None and name in self._live:
                self._copies[name] = copy
            self._live.pop(name, None)
            self._release(name)

    def _release(self, name: str) -> None:
        self._held.discard(name)
        self._changed.notify_all()


ShardReader: TypeAlias = FrozenShards | LiveShards


def _not_copied(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} is not saved.",
        got=f"{type(error).__name__}: {error}",
        why="it had to be copied before training changed it, and could not be",
        fix='memory for a copy of the state besides training, or checkpoint.mode = "sync"',
    )
