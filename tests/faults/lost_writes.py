"""A disk after a power cut, of which any part of what was not flushed may be lost.

A `Recorder`, given to `watched`, records the calls that change files and directories. `iterate_crashes`
goes through the moments of the record. Of a file, each write after its last flush may be lost, or done by
half; of a directory, each entry that was made, renamed or removed after its last flush. The changes that are
lost do not depend on each other.
"""

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.calls import WRITES, Call

FEW = 4  # changes that may be lost: up to this number, each subset of them is tried


class Killed(BaseException):
    """The process is gone: it makes no call any more."""


@dataclass(eq=False)
class Node:
    """A file (`entries` is None) or a directory, as it is while the record is made."""

    entries: "dict[str, Node] | None" = None


@dataclass(frozen=True)
class Change:
    """`node` gets `data` at `offset`; or, without data, the size `offset`; or `entries` (None: removed)."""

    node: Node
    offset: int = 0
    data: bytes | None = None
    entries: "tuple[tuple[str, Node | None], ...]" = ()

    def half(self) -> "Change":
        assert self.data is not None, "an entry is there or not"
        return Change(self.node, self.offset, self.data[: len(self.data) // 2])


@dataclass
class Recorder:
    """Records the calls below the directory `root`, which is empty at first.

    record: changes, and flushed nodes
    kill_after: length of the record after which each call raises Killed; None for never
    """

    root: Path
    kill_after: int | None = None
    tree: Node = field(default_factory=lambda: Node({}))
    record: list[Change | Node] = field(default_factory=list)
    _files: dict[int, Node] = field(default_factory=dict)

    def __call__(self, call: Call) -> Any:
        if self.kill_after is not None and len(self.record) >= self.kill_after:
            raise Killed
        existed = call.name == "open" and os.path.lexists(call.path)
        result = call.make()
        first, *others = call.arguments
        if call.name == "open":
            self._files[result] = self._opened(call.path, others[0], existed=existed)
        elif call.name in (*WRITES, "ftruncate", "posix_fallocate"):
            self.record.append(self._change(call.name, first, others, count=result))
        elif call.name in ("fsync", "fdatasync"):
            self.record.append(self._files[first])
        elif call.name in ("rename", "replace"):
            self._rename(call.path, Path(others[0]))
        elif call.name in ("mkdir", "unlink", "remove", "rmdir"):
            self._enter(call.path, Node({}) if call.name == "mkdir" else None)
        return result

    def _opened(self, path: Path, flags: int, *, existed: bool) -> Node:
        node = self._find(path) if existed else Node()
        if not existed:
            self._enter(path, node)
        elif flags & os.O_TRUNC:
            self.record.append(Change(node))
        return node

    def _change(self, name: str, descriptor: int, others: list[Any], *, count: int) -> Change:
        node = self._files[descriptor]
        if name in ("ftruncate", "posix_fallocate"):  # of new files alone: they shrink none
            return Change(node, sum(others))
        at = others[1] if name != "write" else os.lseek(descriptor, 0, os.SEEK_CUR) - count
        parts = others[0] if name == "pwritev" else [others[0]]
        return Change(node, at, b"".join(map(bytes, parts))[:count])

    def _find(self, path: Path) -> Node:
        node = self.tree
        for part in path.relative_to(os.path.realpath(self.root)).parts:
            assert node.entries is not None, f"{path} is in a file"
            node = node.entries[part]
        return node

    def _enter(self, path: Path, node: Node | None) -> None:
        self._note(self._find(path.parent), ((path.name, node),))

    def _rename(self, path: Path, to: Path) -> None:
        assert path.parent.name == to.parent.name, "within a directory: it is one change"
        self._note(self._find(path.parent), ((path.name, None), (to.name, self._find(path))))

    def _note(self, directory: Node, entries: tuple[tuple[str, Node | None], ...]) -> None:
        _apply(directory.entries, entries)
        self.record.append(Change(directory, entries=entries))


def _apply(there: dict[str, Node] | None, entries: tuple[tuple[str, Node | None], ...]) -> None:
    assert there is not None, "a file has no entries"
    for name, node in entries:
        there.pop(name, None)
        if node is not None:
            there[name] = node


def iterate_crashes(
    recorder: Recorder, *, begin: int = 0, rng: random.Random, samples: int
) -> Iterator[tuple[int, list[Change]]]:
    """Yields (moment, what is on the disk) of crashes at the moments from `begin` on, each state once.

    samples: random states of each moment, beside those with nothing, everything, or all but one of what is
        uncertain. If there are any, also those with only one, and all states where little is uncertain
    """
    seen: set[tuple[tuple[int, int], ...]] = set()
    for moment in range(begin, len(recorder.record) + 1):
        flushed: set[Node] = set()
        certain: list[int] = []
        uncertain: list[int] = []
        for i in reversed(range(moment)):
            entry = recorder.record[i]
            if isinstance(entry, Node):
                flushed.add(entry)
            else:
                (certain if entry.node in flushed else uncertain).append(i)
        for kept in _choices(recorder, uncertain, rng=rng, samples=samples):
            state = tuple(sorted([*((i, 1) for i in certain), *kept]))
            if state not in seen:
                seen.add(state)
                changes = [(recorder.record[i], share) for i, share in state]
                yield moment, [c if share == 1 else c.half() for c, share in changes if isinstance(c, Change)]


def _choices(
    recorder: Recorder, uncertain: list[int], *, rng: random.Random, samples: int
) -> Iterator[list[tuple[int, int]]]:
    """Yields which of the uncertain changes are on the disk: as (index, 1), or (index, 2) for a half."""
    shares = [(0, 1, 2) if getattr(recorder.record[i], "data", None) else (0, 1) for i in uncertain]
    if samples and len(uncertain) <= FEW:
        chosen: Iterator[tuple[int, ...]] = itertools.product(*shares)
    else:
        ones = range(len(uncertain))
        alone = (tuple(int(i == one) for i in ones) for one in ones if samples)
        missing = (tuple(int(i != one) for i in ones) for one in ones)
        drawn = (tuple(map(rng.choice, shares)) for _ in range(samples))
        chosen = itertools.chain([(0,) * len(ones), (1,) * len(ones)], alone, missing, drawn)
    for choice in chosen:
        yield [(i, share) for i, share in zip(uncertain, choice, strict=True) if share]


def build(root: Path, tree: Node, changes: list[Change]) -> None:
    """Makes the directory `root` with what the disk holds after these changes."""
    contents: dict[Node, bytearray] = {}
    entries: dict[Node, dict[str, Node]] = {tree: {}}
    for one in changes:
        if one.node.entries is not None:
            _apply(entries.setdefault(one.node, {}), one.entries)
            continue
        data, end = contents.setdefault(one.node, bytearray()), one.offset + len(one.data or b"")
        if one.data is None:
            del data[end:]
        data.extend(bytes(max(end - len(data), 0)))
        data[one.offset : end] = one.data or b""

    def make(path: Path, node: Node) -> None:
        if node.entries is None:
            path.write_bytes(contents.get(node, b""))
            return
        path.mkdir()
        for name, child in entries.get(node, {}).items():
            make(path / name, child)

    make(root, tree)
