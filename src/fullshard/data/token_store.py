"""Tokens on disk, as ranks read them: memory maps, which the ranks of a node share."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.data.cache import manifest_of

Integers = NDArray[Any]


@dataclass(frozen=True, eq=False)
class TokenStore:
    """`tokens`: of all documents; document i is tokens[begins[i]:ends[i]]. `trained`: which of them are
    labels; None for all. `key`: another one for other tokens, or other documents. `vocabulary`: the largest
    token that there may be, plus one. `skipped`: records left out, the first few `told`."""

    name: str
    key: str
    tokens: Integers
    begins: Integers
    ends: Integers
    trained: Integers | None
    vocabulary: int
    skipped: int = 0
    skip_messages: tuple[str, ...] = ()

    @property
    def documents(self) -> int:
        return len(self.begins)


TOKENS, OFFSETS, TRAINED = "tokens.bin", "offsets.npy", "trained.bin"


def open_entry(entry: Path, *, name: str) -> TokenStore:
    """The store that `corpus.tokens_of` made: documents one behind the other."""
    facts = manifest_of(entry)
    offsets = mapped_npy(entry / OFFSETS)
    masked = (entry / TRAINED).exists()
    return TokenStore(
        name=name,
        key=entry.name,
        tokens=mapped(entry / TOKENS, facts["dtype"]),
        begins=offsets[:-1],
        ends=offsets[1:],
        trained=mapped(entry / TRAINED, "uint8") if masked else None,
        vocabulary=facts["vocabulary"],
        skipped=facts["skipped"],
        skip_messages=tuple(facts["skip_messages"]),
    )


def mapped(path: Path, dtype: str) -> Integers:
    """A file of plain numbers (little-endian) as an array, which nothing can write to."""
    if path.stat().st_size == 0:  # which mmap refuses
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def mapped_npy(path: Path) -> Integers:
    """An .npy file likewise."""
    return np.load(path, mmap_mode="r")


@dataclass(frozen=True, eq=False)
class Stream:
    """Several stores as one: place p is a token of the store that p falls into, in their order."""

    stores: tuple[TokenStore, ...]

    @cached_property
    def bases(self) -> list[int]:
        """Where each store begins, and where the last ends."""
        return [0, *accumulate(len(store.tokens) for store in self.stores)]

    def tokens(self, begin: int, end: int) -> Integers:
        """Places `begin` to `end`, which lie in one store."""
        store, base = self._at(begin)
        return store.tokens[begin - base : end - base]

    def trained(self, begin: int, end: int) -> Integers | None:
        """Which of them are labels; None for all."""
        store, base = self._at(begin)
        return None if store.trained is None else store.trained[begin - base : end - base]

    @property
    def masked(self) -> bool:
        return any(store.trained is not None for store in self.stores)

    def documents(self) -> tuple[Integers, Integers]:
        """(begins, lengths) of all documents, in memory."""
        pairs = zip(self.stores, self.bases, strict=False)
        begins = [store.begins.astype(np.int64) + base for store, base in pairs]
        lengths = [(store.ends - store.begins).astype(np.int64) for store in self.stores]
        return np.concatenate(begins), np.concatenate(lengths)

    def _at(self, place: int) -> tuple[TokenStore, int]:
        i = bisect_right(self.bases, place) - 1
        return self.stores[i], self.bases[i]


def names(stores: Sequence[TokenStore]) -> str:
    """For people."""
    return " + ".join(store.name for store in stores)
