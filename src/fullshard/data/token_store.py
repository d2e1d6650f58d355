"""Token stores: tokens of a source in memory, or in files that the ranks of a node map into memory."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from fullshard.data.cache import read_manifest

Integers = NDArray[Any]


class SlicedTokens(Protocol):
    """An array of tokens, of which slices are read: in memory, mapped, or remote."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Integers: ...


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Tokens of a source, with the document boundaries.

    key: identifier that changes whenever the tokens or the documents change; None for tokens in memory
    tokens: tokens of all documents
    begins, ends: document i is tokens[begins[i]:ends[i]]
    loss_mask: mask of the tokens that are trained on; None if all are
    trained_token_count: number of tokens that are trained on
    vocabulary_size: largest possible token plus one
    skipped: number of records left out
    skip_messages: messages about the first few records left out
    unended: number of conversations whose last answer has nothing that ends the turn
    doubled: number of texts that already had the tokens that were put around them
    unwritten: name of content that is not in the tokens -> number of records that have it
    empty: number of documents without a token, which are not among the documents
    """

    name: str
    key: str | None
    tokens: SlicedTokens
    begins: Integers
    ends: Integers
    loss_mask: Integers | None
    trained_token_count: int
    vocabulary_size: int
    skipped: int = 0
    skip_messages: tuple[str, ...] = ()
    unended: int = 0
    doubled: int = 0
    unwritten: Mapping[str, int] = field(default_factory=dict[str, int])
    empty: int = 0

    @property
    def content_key(self) -> str:
        """The `key`, or for tokens in memory a digest of them."""
        if self.key is not None:
            return self.key
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.tokens[0 : len(self.tokens)]).data)
        digest.update(np.ascontiguousarray(self.begins).data)
        return digest.hexdigest()

    @property
    def document_count(self) -> int:
        return len(self.begins)

    @property
    def warnings(self) -> list[str]:
        """Warnings about tokens that train a model otherwise than expected."""
        warnings = [
            f"{number:,} records of {self.name} have content that is not in the tokens: {name}"
            for name, number in sorted(self.unwritten.items())
        ]
        if self.empty:
            warnings.append(f"{self.empty:,} documents of {self.name} are empty, and left out")
        if self.doubled:
            warnings.append(
                f"{self.doubled:,} texts of {self.name} already begin or end with the tokens that the "
                "tokenizer puts around a document, and now have them twice: take them out of the texts"
            )
        if not self.unended:
            return warnings
        return [
            *warnings,
            f"{self.unended:,} of {self.document_count:,} conversations of {self.name} end without a token "
            "that ends the assistant's turn, so that the model does not learn to stop. Write one behind the "
            'content in the chat template, such as {{ eos_token }}: data.chat_template = "<file>.jinja" is '
            "used in place of the tokenizer's template",
        ]


TOKENS, OFFSETS, TRAINED = "tokens.bin", "offsets.npy", "trained.bin"


def open_cached_token_store(entry: Path, *, name: str) -> TokenStore:
    """Opens a cache entry of `sources.open_token_stores` as the token store of the source `name`."""
    facts = read_manifest(entry)
    offsets = memory_map_npy(entry / OFFSETS)
    return TokenStore(
        name=name,
        key=entry.name,
        tokens=memory_map_numbers(entry / TOKENS, facts["dtype"]),
        begins=offsets[:-1],
        ends=offsets[1:],
        loss_mask=memory_map_numbers(entry / TRAINED, "uint8") if (entry / TRAINED).exists() else None,
        trained_token_count=facts["trained"],
        vocabulary_size=facts["vocabulary"],
        skipped=facts["skipped"],
        skip_messages=tuple(facts["skip_messages"]),
        unended=facts["unended"],
        doubled=facts.get("doubled", 0),
        unwritten=facts["unwritten"],
        empty=facts.get("empty", 0),
    )


def memory_map_numbers(path: Path, dtype: str) -> Integers:
    """Maps a file of little-endian numbers into memory, as a read-only array."""
    if path.stat().st_size == 0:  # mmap refuses empty files
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


def memory_map_npy(path: Path) -> Integers:
    """Maps an .npy file into memory, as a read-only array."""
    return np.load(path, mmap_mode="r")


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Several stores joined in order. A place is the index of a token in the joined stream."""

    stores: tuple[TokenStore, ...]

    @property
    def joined_store_names(self) -> str:
        return " + ".join(store.name for store in self.stores)

    @cached_property
    def is_remote(self) -> bool:
        """True if reading tokens may wait for a network."""
        return not all(isinstance(store.tokens, np.ndarray) for store in self.stores)

    @cached_property
    def store_begins(self) -> list[int]:
        """First place of each store, and the end of the last store."""
        return [0, *accumulate(len(store.tokens) for store in self.stores)]

    def slice_tokens_in_one_store(self, begin: int, end: int) -> Integers:
        """Returns the tokens from `begin` to before `end`, which must lie in one store."""
        store, base = self._locate_store(begin)
        return store.tokens[begin - base : end - base]

    def slice_loss_mask_in_one_store(self, begin: int, end: int) -> Integers | None:
        """Returns the mask of the trained tokens from `begin` to before `end`; None if all are trained on."""
        store, base = self._locate_store(begin)
        return None if store.loss_mask is None else store.loss_mask[begin - base : end - base]

    @property
    def has_loss_mask(self) -> bool:
        return any(store.loss_mask is not None for store in self.stores)

    def document_begins_and_lengths(self) -> tuple[Integers, Integers]:
        """Returns (first place of each document, its number of tokens), as arrays in memory."""
        pairs = zip(self.stores, self.store_begins, strict=False)
        begins = [store.begins.astype(np.int64) + base for store, base in pairs]
        lengths = [(store.ends - store.begins).astype(np.int64) for store in self.stores]
        return np.concatenate(begins), np.concatenate(lengths)

    def _locate_store(self, place: int) -> tuple[TokenStore, int]:
        i = bisect_right(self.store_begins, place) - 1
        return self.stores[i], self.store_begins[i]
