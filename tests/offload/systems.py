"""Drives that fail: calls for `offload.drive.DriveSystemCalls`, some of them with a fault."""

import errno
import fcntl
import itertools
import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.offload.drive import SYSTEM, DriveSystemCalls
from fullshard.system.direct_io import DIRECT


def without_direct() -> DriveSystemCalls:
    """A file system that does not know O_DIRECT."""

    def open_(path: Path, flags: int, mode: int) -> int:
        if DIRECT and flags & DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.open(path, flags, mode)

    return replace(SYSTEM, open=open_)


def that_takes_the_flag_alone() -> DriveSystemCalls:
    """One that opens with O_DIRECT, and then refuses to transfer."""

    def refused(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    return after_leaving(replace(SYSTEM, preadv=refused, pwritev=refused))


def after_leaving(system: DriveSystemCalls) -> DriveSystemCalls:
    """`system` for as long as a descriptor is direct; then the real one."""

    def either(name: str) -> Callable[[int, Sequence[memoryview], int], int]:
        def call(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT
            return getattr(system if direct else SYSTEM, name)(descriptor, buffers, offset)

        return call

    return replace(SYSTEM, preadv=either("preadv"), pwritev=either("pwritev"))


def with_short_transfers(seed: int) -> DriveSystemCalls:
    """Every transfer moves a part of what was asked for.

    Of a write, whole sectors: that is what a drive can take. Of a read, any number: the rest is garbage.
    """
    rng = random.Random(seed)

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        count = os.preadv(descriptor, buffers, offset)
        short = rng.randint(1, count) if count else 0
        buffer[short:count] = rng.randbytes(count - short)
        return short

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        short = rng.randint(1, buffer.nbytes)
        return os.pwritev(descriptor, [buffer[: short + -short % 512]], offset)

    return replace(SYSTEM, preadv=preadv, pwritev=pwritev)


def failing(name: str, number: int) -> DriveSystemCalls:
    """One call fails, with this errno, always."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return replace(SYSTEM, **{name: fail})


def turning_bad(  # signature: what a test says of a fault
    call: str, number: int, *, file: str, after: int, times: int = 1 << 30
) -> DriveSystemCalls:
    """All is well until `after` generations are committed; then calls of this name on files whose name has
    `file` in it fail with `number`, this many `times`."""
    names: dict[int, str] = {}
    committed, failed = itertools.count(1), itertools.count()
    ill = threading.Event()

    def open_(path: Path, flags: int, mode: int) -> int:
        descriptor = os.open(path, flags, mode)
        names[descriptor] = path.name
        return descriptor

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        own = bad if call == "pwritev" else os.pwritev
        count = own(descriptor, buffers, offset)
        if re.search(r"state-.\.json", names.get(descriptor, "")) and next(committed) == after:
            ill.set()
        return count

    def bad(descriptor: int, *arguments: Any) -> Any:
        if not ill.is_set() or file not in names.get(descriptor, "") or next(failed) >= times:
            return getattr(SYSTEM, call)(descriptor, *arguments)
        raise OSError(number, os.strerror(number))

    return replace(SYSTEM, **{"open": open_, call: bad, "pwritev": pwritev})


@dataclass
class Watched:
    """The real calls. `unflushed`: the names of files written to and not flushed since, at each write.

    `calls`: their names, in order.
    """

    calls: list[str] = field(default_factory=list)

    names: dict[int, str] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    unflushed: list[tuple[str, frozenset[str]]] = field(default_factory=list)

    def system(self) -> DriveSystemCalls:
        return replace(
            SYSTEM, open=self._open, pwritev=self._pwritev, fdatasync=self._fdatasync, fsync=self._fsync
        )

    def _open(self, path: Path, flags: int, mode: int) -> int:
        descriptor = os.open(path, flags, mode)
        self.names[descriptor] = path.name
        return descriptor

    def _pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        name = self.names[descriptor]
        self.calls.append("pwritev")
        self.unflushed.append((name, frozenset(self.dirty - {name})))
        self.dirty.add(name)
        return os.pwritev(descriptor, buffers, offset)

    def _fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)
        self.calls.append("fdatasync")
        self.dirty.discard(self.names[descriptor])

    def _fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.calls.append("fsync")


class PowerCut(Exception):
    """The process is gone: nothing that is ours handles it."""


@dataclass
class Cut:
    """The system's calls until the one of number `after`, of which a part may be done."""

    after: int
    calls: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def system(self) -> DriveSystemCalls:
        return DriveSystemCalls(
            open=self._counted(SYSTEM.open),
            preadv=SYSTEM.preadv,
            pwritev=self._pwritev,
            fdatasync=self._counted(SYSTEM.fdatasync),
            fsync=self._counted(SYSTEM.fsync),
            posix_fallocate=self._counted(SYSTEM.posix_fallocate),
        )

    def _counted(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object) -> object:
            self._count()
            return call(*arguments)

        return counted

    def _pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            self._count()
        except PowerCut:
            (buffer,) = buffers
            if self.rng.random() < 0.7:  # else nothing of it
                part = self.rng.randint(0, buffer.nbytes)
                os.pwritev(descriptor, [buffer[: part - part % 4096 or part]], offset)
            raise
        return os.pwritev(descriptor, buffers, offset)

    def _count(self) -> None:
        self.calls += 1
        if self.calls >= self.after:
            raise PowerCut
