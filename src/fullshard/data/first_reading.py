"""The first reading of source files, divided over ranks: digests of their content, and scans of tokens.

[Note: digests of files]
Reading terabytes at each start to compute the names of cache entries would take longer than the start itself.
So the digest of a file is remembered together with its size and modification time, and is valid as long as
both are unchanged. A file modified less than two seconds before it was read is not remembered, because a
later change could leave the same time.

The digest is the XXH3-128 of the file's bytes. A file of more than RANGE_BYTES is read in ranges, by several
ranks at once, and has the XXH3-128 of their digests. Ranges depend on its size alone, not on the ranks.
XXH3 cannot be computed in parts, and earlier versions named cache entries, and with them the row order that
a checkpoint records, by the digests of whole files. So a digest that they remembered stays valid.
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from io import BufferedReader
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from fullshard.data import token_store
from fullshard.data.files import SourceFile, unreadable_path_error
from fullshard.errors import DataError
from fullshard.quantities import format_bytes, format_seconds
from fullshard.system.files import write_file_atomically
from fullshard.system.small_files import VALUE_BYTES, parse_json, read_bytes
from fullshard.system.terminal import print_to_stderr

T = TypeVar("T")

RANGE_BYTES = 4 << 30
"""Size of the ranges in which a larger file is read; a multiple of it if there would be more than 256."""

_MOST_RANGES = 256
_SETTLED_SECONDS = 2.0
_READ_BYTES = 4 << 20
_FIRST_LINE_SECONDS = 10.0
_ENDS = "ends.npy"

Blocks = Iterator[tuple[int, memoryview]]
"""(byte of the file at which a block begins, its bytes, which are valid until the next block is taken)."""

TokenFacts = tuple[int, NDArray[np.int64]]
"""(largest token of a range, or -1; index in the file after each of its tokens that ends a document)."""


def _scan_nothing(blocks: Blocks) -> TokenFacts:
    deque(blocks, maxlen=0)
    return -1, np.empty(0, np.int64)


@dataclass(frozen=True)
class FirstReading:
    """Reads files that are not known yet, together with the ranks that start at the same time.

    root: directory of the cache, which remembers digests
    alive: called for each block that is read, and while another process is waited for
    range_bytes: see RANGE_BYTES; a multiple of 8, so that no range cuts a token
    """

    root: Path
    alive: token_store.Heartbeat = token_store.no_heartbeat
    range_bytes: int = RANGE_BYTES

    def digests(self, files: Sequence[SourceFile], *, waits: bool = True) -> list[str]:
        """Returns a digest of the content of each file. Raises as `read` does."""

        def find_or_compute(path: str, waits: bool) -> str:
            find = partial(self.find_digest, path)
            return self.read(path, find=find, finish=lambda digest, _: digest, waits=waits)

        return token_store.divide_by_rank([file.path for file in files], find_or_compute, waits=waits)

    def read(
        self,
        path: str,
        *,
        find: Callable[[], T | None],
        finish: Callable[[str, list[TokenFacts]], T],
        waits: bool,
        scan: Callable[[Blocks], TokenFacts] = _scan_nothing,
        scanned_for: str = "",
    ) -> T:
        """Returns what `find` returns, or if that is None, reads the file, and returns what `finish` makes.

        The digest is remembered. Ranges that were read are entries of the cache until all are: an interrupted
        reading continues with them. Raises DataError for a file that is unreadable or changes, and without
        `waits` BuiltElsewhere if another process reads a part of it.

        finish: makes the result from the digest of the file and the facts of its ranges
        scan: finds the facts of a range; scanned_for: text that identifies what it looks for
        """
        try:
            seen = _size_and_time(path)
        except OSError as error:
            raise unreadable_path_error(path, error) from error
        is_settled = time.time() - seen[1] / 1e9 >= _SETTLED_SECONDS
        ranges = [*pairwise([*(range(0, seen[0], self._range_size(seen[0])) or [0]), seen[0]])]
        read_range = partial(self._read_range, path, seen=seen, scan=scan)
        key = token_store.cache_key({"seen": seen, "size": self.range_bytes, "for": scanned_for})

        def get_range(bounds: tuple[int, int], waits: bool) -> Path:
            def write(draft: Path) -> Mapping[str, Any]:
                digest, (largest, ends) = read_range(bounds)
                token_store.save_array(draft / _ENDS, ends)
                return {"digest": digest, "largest": largest}

            name = f"{self._range_prefix(path)}{bounds[0]}-{key}"
            return token_store.get_or_build_entry(
                self.root, name, build=write, alive=self.alive, waits=waits, unless=find
            )

        is_divided = len(ranges) > 1 and is_settled and find() is None
        if is_divided:  # ranges with another key are of the file before it changed
            token_store.remove_entries(self.root, f"{self._range_prefix(path)}*", kept_key=key)
            token_store.divide_by_rank(ranges, get_range, waits=waits)

        def finish_file() -> T:
            read = [_load_range(get_range(one, waits)) if is_divided else read_range(one) for one in ranges]
            digests, facts = [digest for digest, _ in read], [facts for _, facts in read]
            joined = f"ranges-{xxhash.xxh3_128_hexdigest(''.join(digests).encode())}"
            digest = self.find_digest(path) or (joined if len(ranges) > 1 else digests[0])
            if is_settled:
                with suppress(OSError):  # else it is read again next time
                    text = json.dumps({"seen": seen, "digest": digest})
                    write_file_atomically(self._remembered_digest_path(path), text)
            return finish(digest, facts)

        lock = self.lock_of_digest(path)
        found = token_store.find_or_build(find, finish_file, lock=lock, alive=self.alive, waits=waits)
        if is_divided and find() is not None:  # other ranks find the result now, not the ranges
            token_store.remove_entries(self.root, f"{self._range_prefix(path)}*-{key}")
        return found

    def reporting(
        self, files: Sequence[SourceFile], now: Callable[[], float] = time.monotonic
    ) -> "FirstReading":
        """Returns a reading that on rank 0 also prints how long the ranks will take to read `files` once.

        It is for files whose digest is not known: bytes that are read again for another reason do not count.
        """
        if os.environ.get("RANK", "0") != "0":
            return self
        what, hint = "reading the data once", "; `fullshard data prepare` does it before a job"
        count, total = partial(self._count_read_bytes, files), sum(file.size for file in files)
        return replace(
            self, alive=report_progress(what, total, count_bytes=count, alive=self.alive, hint=hint, now=now)
        )

    def find_digest(self, path: str) -> str | None:
        """Returns the remembered digest of a file that has not changed since, else None."""
        try:
            known = parse_json(read_bytes(self._remembered_digest_path(path), most_bytes=VALUE_BYTES))
            return str(known["digest"]) if known["seen"] == _size_and_time(path) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def lock_of_digest(self, path: str) -> Path:
        """Returns the file that is locked while the digest of `path` is made, one of 256."""
        digests = token_store.make_cache_directory(self.root / "digests")
        return digests / f".lock-{self._remembered_digest_path(path).name[:2]}"

    def _read_range(
        self, path: str, bounds: tuple[int, int], *, seen: list[int], scan: Callable[[Blocks], TokenFacts]
    ) -> tuple[str, TokenFacts]:
        """Returns (digest of a range, its facts). Raises DataError if its size or time is not `seen`."""
        hasher, buffer, (begin, end) = xxhash.xxh3_128(), bytearray(_READ_BYTES), bounds

        def read_blocks(file: BufferedReader) -> Blocks:
            file.seek(begin)
            for at in range(begin, end, _READ_BYTES):
                block = memoryview(buffer)[: end - at]
                file.readinto(block)  # all of it, unless the file has changed
                hasher.update(block)
                self.alive()
                yield at, block

        try:
            with open(path, "rb") as file:
                facts = scan(read_blocks(file))
                now = _size_and_time(file.fileno())
        except OSError as error:
            raise unreadable_path_error(path, error) from error
        if now != seen:
            got = f"{now[0]:,} bytes, and {seen[0]:,} before"
            raise DataError(f"{path} changed while it was read.", got=got, fix="a file that nobody writes")
        return hasher.hexdigest(), facts

    def _range_size(self, file_size: int) -> int:
        return self.range_bytes * max(-(-file_size // (self.range_bytes * _MOST_RANGES)), 1)

    def _count_read_bytes(self, files: Sequence[SourceFile]) -> int:
        done = 0
        for file in files:
            if self.find_digest(file.path) is not None:
                done += file.size
            elif file.size > self.range_bytes:
                ranges = len([*self.root.glob(f"{self._range_prefix(file.path)}*")])
                done += min(ranges * self._range_size(file.size), file.size)
        return done

    def _range_prefix(self, path: str) -> str:
        return f"range-{self._remembered_digest_path(path).name}-"

    def _remembered_digest_path(self, path: str) -> Path:
        name = hashlib.blake2b(os.fsencode(os.path.abspath(path)), digest_size=16).hexdigest()
        return self.root / "digests" / name


def report_progress(
    what: str,
    total_bytes: int,
    *,
    count_bytes: Callable[[], int],
    alive: token_store.Heartbeat,
    hint: str = "",
    now: Callable[[], float] = time.monotonic,
) -> token_store.Heartbeat:
    """Returns a function that calls `alive`, and prints the bytes done and how long the rest takes.

    The first line is printed after ten seconds, and each further one after twice as long.
    """
    began, due, count_bytes_before = now(), _FIRST_LINE_SECONDS, cache(count_bytes)

    def print_if_due() -> None:
        nonlocal due
        alive()
        before = count_bytes_before()  # at the first call: without one, nothing is done
        if (seconds := now() - began) < due:
            return
        due, done = 2 * seconds, count_bytes()
        left = (total_bytes - done) * seconds / max(done - before, 1)
        time_left = f", {format_seconds(left)} left" if done > before else ""
        with suppress(OSError):  # the reader of standard error has gone
            print_to_stderr(f"{what}: {format_bytes(done)} of {format_bytes(total_bytes)}{time_left}{hint}")

    return print_if_due


def _load_range(entry: Path) -> tuple[str, TokenFacts]:
    known = token_store.read_manifest(entry)
    return known["digest"], (known["largest"], np.load(entry / _ENDS, mmap_mode="r"))


def _size_and_time(file: str | int) -> list[int]:
    status = os.stat(file)
    return [status.st_size, status.st_mtime_ns]
