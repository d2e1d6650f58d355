"""Reads tokens in object stores and on web servers by blocks, through a cache of bounded size on the disk.

[Note: a cache without bookkeeping]
The cache is one file of slots. Each block of a token file has one slot, and replaces the block that is in it.
A slot holds the key of its block and a digest of the bytes. So the processes of a node share the file without
locks: a slot that another process is writing, that a crash cut off, or that holds another block does not
match, and its block is downloaded. The file cannot grow beyond its slots. If all blocks fit, no two share a
slot. Otherwise rows are shuffled over all blocks, and each block is as likely as any other to be needed next:
an order of replacement, such as least recently used, would not find more of them.
"""

import hashlib
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fullshard.data.cache import make_cache_directory, unwritable_cache_error
from fullshard.data.files import SourceFile, unreadable_path_error
from fullshard.data.remote_files import PAUSES_SECONDS
from fullshard.data.token_store import Integers
from fullshard.errors import DataError
from fullshard.system.object_store import ObjectStore, read_object_range, without_secrets

BLOCK_BYTES = 256 << 10
"""Size of a block: several sequences of tokens, and little enough that a request is most of its time."""

_KEY_BYTES = 16
_HEAD_BYTES = 2 * _KEY_BYTES
SLOT_BYTES = _HEAD_BYTES + BLOCK_BYTES
# A longer range, such as that of a pass over all tokens, is read at once, and not kept.
_KEPT_BYTES = 8 * BLOCK_BYTES


class BlockCache:
    """Blocks of remote token files, in a file of at most `limit_bytes`.

    See [Note: a cache without bookkeeping]. The file is created when the first block is read.
    """

    def __init__(self, root: Path, *, limit_bytes: int) -> None:
        self.path = root / "blocks.bin"
        self._slots = max(1, limit_bytes // SLOT_BYTES)
        self._reserved = 0
        self._file: int | None = None

    def reserve_blocks(self, count: int) -> int:
        """Returns the number of the first of `count` blocks, which have slots of their own if all fit."""
        self._reserved += count
        return self._reserved - count

    def find_block(self, number: int, *, key: bytes, size: int) -> bytes | None:
        """Returns the block `number`, of `size` bytes, if its slot holds it."""
        slot = os.pread(self._open(), _HEAD_BYTES + size, number % self._slots * SLOT_BYTES)
        data = slot[_HEAD_BYTES:]
        return data if len(data) == size and slot[:_HEAD_BYTES] == _head(key, data) else None

    def keep_block(self, number: int, *, key: bytes, data: bytes) -> None:
        """Writes a block into its slot. Raises DataError if the file cannot be written."""
        try:
            os.pwrite(self._open(), _head(key, data) + data, number % self._slots * SLOT_BYTES)
        except OSError as error:
            raise unwritable_cache_error(self.path.parent, error) from error

    def _open(self) -> int:
        if self._file is None:
            make_cache_directory(self.path.parent)
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                weakref.finalize(self, os.close, file)
                if os.fstat(file).st_size > self._slots * SLOT_BYTES:  # of a larger limit
                    os.ftruncate(file, self._slots * SLOT_BYTES)
            except OSError as error:
                raise unwritable_cache_error(self.path.parent, error) from error
            self._file = file
        return self._file


class RemoteNumbers:
    """An array of numbers in a remote file. A slice of it is read when it is taken.

    vocabulary_size: if known, each slice is checked to hold only tokens below it
    """

    def __init__(
        self,
        file: SourceFile,
        blocks: BlockCache,
        *,
        dtype: np.dtype[Any],
        begin_bytes: int,
        count: int,
        vocabulary_size: int | None,
    ) -> None:
        self.dtype = dtype
        self._file, self._blocks = file, blocks
        self.vocabulary_size = vocabulary_size
        self._begin_bytes, self._count = begin_bytes, count
        self._first_block = blocks.reserve_blocks(-(-file.size // BLOCK_BYTES))
        self._store = ObjectStore(file.path)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, span: slice) -> Integers:
        """Returns the numbers of a slice without a step. Raises DataError if they cannot be read."""
        first, last, _ = span.indices(self._count)
        begin, end = (self._begin_bytes + place * self.dtype.itemsize for place in (first, max(first, last)))
        if end - begin > _KEPT_BYTES:
            data = self._download(begin, end)
        else:
            data = b"".join(self._read_blocks(begin, end))
        numbers = np.frombuffer(data, self.dtype)
        known = self.vocabulary_size
        if known is not None and len(numbers) and not (numbers.min() >= 0 and numbers.max() < known):
            raise DataError(
                f"{without_secrets(self._file.path)} holds a value that is not a token.",
                got=f"values from {numbers.min()} to {numbers.max()}; the tokenizer has {known} tokens",
                fix="the tokenizer that it was made with, or the right data.dtype",
            )
        return numbers

    def _read_blocks(self, begin: int, end: int) -> Iterator[bytes]:
        """Yields the bytes from `begin` to `end`, block by block."""
        for index in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            first = index * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, self._file.size)
            text = f"{self._file.version} {index}".encode()
            key = hashlib.blake2b(text, digest_size=_KEY_BYTES).digest()
            number = self._first_block + index
            data = self._blocks.find_block(number, key=key, size=last - first)
            if data is None:
                data = self._download(first, last)
                self._blocks.keep_block(number, key=key, data=data)
            yield data[max(begin - first, 0) : end - first]

    def _download(self, begin: int, end: int) -> bytes:
        url = self._file.path
        try:
            return read_object_range(self._store, url, begin=begin, end=end, pauses_seconds=PAUSES_SECONDS)
        except OSError as error:
            raise unreadable_path_error(url, error) from error


def _head(key: bytes, data: bytes) -> bytes:
    return key + xxhash.xxh3_128(data).digest()
