"""Token stores, and the cache of tokens and row layouts: directories that appear only when complete.

[Note: what a name stands for]
An entry is named by a digest of everything that determines it: the content of the files, the tokenizer, the
settings. The digest covers content, not paths or times, so a copied or moved data set has the same name and
an edited one has another. See [Note: digests of files] in `first_reading`.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.system.files import (
    find_lock_holder,
    fsync_path,
    hold_exclusive_file_lock,
    open_new_file,
)
from fullshard.system.small_files import VALUE_BYTES, parse_json, read_bytes

Integers = NDArray[Any]
T = TypeVar("T")
Item = TypeVar("Item")

MANIFEST = "manifest.json"
FORMAT = 1
_OWN_FILE = re.compile(
    r"manifest\.json|(tokens|trained)\.bin|(offsets|begins|ends|(training|held-out)-\w+)\.npy"
)

Heartbeat = Callable[[], None]
"""Called regularly during long work, so that a watchdog sees progress."""


def no_heartbeat() -> None:
    """A Heartbeat that does nothing."""


def cache_key(facts: Mapping[str, Any]) -> str:
    """Returns a digest of `facts` (plain data) as 32 hexadecimal digits, for the name of a cache entry."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def make_cache_directory(directory: str | Path) -> Path:
    """Returns the cache directory, and creates it if needed. Raises DataError if it cannot be created."""
    root = Path(os.path.expanduser(directory)).absolute()
    if os.path.expanduser(directory).startswith("~"):
        raise DataError(
            f"data.cache = {str(directory)!r} cannot be used.",
            got="no home: neither HOME nor an entry of this user in /etc/passwd",
            fix="data.cache = a directory that begins with /",
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable_cache_error(root, error) from error
    return root


def read_manifest(entry: Path) -> dict[str, Any]:
    """Returns the manifest of a cache entry: the data that `build` returned, and `files` (name -> bytes)."""
    return cast(dict[str, Any], parse_json(read_bytes(entry / MANIFEST, most_bytes=VALUE_BYTES)))


def get_or_build_entry(
    root: Path,
    name: str,
    *,
    build: Callable[[Path], Mapping[str, Any]],
    alive: Heartbeat = no_heartbeat,
    waits: bool = True,
    unless: Callable[[], object] = lambda: None,
) -> Path:
    """Returns the cache entry `root/name`. If it does not exist yet, `build` fills an empty draft directory.

    The data that `build` returns is written to the manifest. The draft is renamed to the entry after all its
    files are synced to disk, or removed if `build` raises. One process at a time builds an entry; others wait
    (calling `alive`) and then find it, or without `waits` raise BuiltElsewhere. Raises DataError if the
    cache cannot be written.

    unless: returns None, or else the entry is not needed, and may be absent
    """
    root = make_cache_directory(root)
    entry, lock = root / name, root / f".{name}.lock"

    def build_entry() -> Path:
        drafts = list[Path]()
        with suppress(OSError):  # on a file system without locks, others may be writing their drafts
            if find_lock_holder(lock):
                drafts += root.glob(f".{name}.tmp-{'[0-9a-f]' * 8}")
        for left in [entry, *drafts]:  # left by a crash, or files were removed
            remove_entry(left)
        draft = root / f".{name}.tmp-{secrets.token_hex(4)}"
        try:
            draft.mkdir()
            _commit_draft(draft, entry, facts=build(draft))
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return entry

    def find() -> Path | None:
        return entry if find_complete_entry(entry) or unless() is not None else None

    return find_or_build(find, build_entry, lock=lock, alive=alive, waits=waits)


def save_array(path: Path, array: Integers) -> None:
    """Writes `array` into the new file `path`, which `numpy.load` reads. Raises OSError."""
    with open_new_file(path) as file:
        np.save(file, array)


def remove_entry(directory: Path) -> None:
    """Removes the files of an entry or a draft, and its directory unless other files are in it."""
    own = set[str]()
    with suppress(OSError, ValueError, KeyError, TypeError):
        own |= {*read_manifest(directory)["files"]}
    with suppress(OSError):
        for path in [] if directory.is_symlink() else [*directory.iterdir()]:
            if path.name in own or _OWN_FILE.fullmatch(path.name):
                path.unlink()
        directory.rmdir()


def remove_entries(root: Path, pattern: str, *, kept_key: str | None = None) -> None:
    """Removes the entries whose names match `pattern` and do not end with `kept_key`, and their locks.

    A process that waits for an entry may make its lock again, so each that may have waited must call this.
    """
    for path in (*root.glob(pattern), *root.glob(f".{pattern}.lock")):
        name = path.name.removeprefix(".").removesuffix(".lock")
        if kept_key is None or not name.endswith(kept_key):
            remove_entry(root / name)
            (root / f".{name}.lock").unlink(missing_ok=True)


class BuiltElsewhere(Exception):
    """Raised instead of waiting for what another process builds or reads at this moment."""


def find_or_build(
    find: Callable[[], T | None], build: Callable[[], T], *, lock: Path, alive: Heartbeat, waits: bool
) -> T:
    """Returns what `find` returns, or if that is None, what `build` makes with the file `lock` locked.

    Processes that wait for the lock call `alive` and `find`, ever more rarely. Without `waits`, they raise
    BuiltElsewhere at once. On a file system without locks, several processes may build.
    """
    if (found := find()) is not None:
        return found

    def look() -> None:
        alive()
        if find() is not None:
            raise BuiltElsewhere

    patience = math.inf if waits else 0.0
    try:
        with hold_exclusive_file_lock(
            lock, held_error=BuiltElsewhere, patience_seconds=patience, waiting=look, required=False
        ):
            found = find()
            return build() if found is None else found
    except BuiltElsewhere:
        if not waits:
            raise
        return find_or_build(find, build, lock=lock, alive=alive, waits=waits)
    except OSError as error:
        raise _unwritable_cache_error(lock.parent, error) from error


def count_ranks_of_job_and_node() -> tuple[int, int]:
    """Returns (number of ranks that start together, number of those on this node)."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def divide_by_rank(items: Sequence[Item], get: Callable[[Item, bool], T], *, waits: bool) -> list[T]:
    """Returns `get(item, waits)` for each item. Ranks that start together divide the items.

    Ranks of a node begin at the same item or near it, and leave to others those for which `get` raises
    BuiltElsewhere. With `waits`, a rank gets these at the end, and does the work of ranks that have failed.
    """
    rank, (ranks, neighbours) = int(os.environ.get("RANK", "0")), count_ranks_of_job_and_node()
    first, found, passed = len(items) * rank // ranks, dict[int, T](), 0
    for i in [*range(first, len(items)), *range(first)]:
        try:
            found[i], passed = get(items[i], False), 0
        except BuiltElsewhere:
            passed += 1
            # Thousands of ranks would ask for each item. Those of a node may be alone with their cache.
            if ranks > len(items) and passed == neighbours:
                break
    return [found[i] if i in found else get(item, waits) for i, item in enumerate(items)]


def find_complete_entry(entry: Path) -> Path | None:
    """Returns `entry` if each of its files has its recorded size, else None: files may be deleted later."""
    try:
        files = read_manifest(entry)["files"]
        return entry if all((entry / name).stat().st_size == size for name, size in files.items()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _commit_draft(draft: Path, entry: Path, *, facts: Mapping[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
    text = json.dumps({**facts, "format": FORMAT, "files": files}, indent=1)
    with open_new_file(draft / MANIFEST) as file:
        file.write(f"{text}\n".encode())
    for path in (*draft.iterdir(), draft):
        fsync_path(path)
    try:
        draft.rename(entry)
    except OSError:
        if find_complete_entry(entry) is None:  # without locks another process may have been first
            raise
    fsync_path(entry.parent)


def _unwritable_cache_error(root: Path, error: OSError) -> DataError:
    """Returns the error for a cache directory that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        f"the cache of data in {root} cannot be written.",
        got=error.strerror or str(error),
        why="tokens are made once, and kept there" + ("; the incomplete entry was removed" if full else ""),
        fix="data.cache = a directory with room, that can be written",
    )


@dataclass
class TokenizeNotes:
    """Counts of records that became other tokens than expected.

    skipped: number of records left out
    skip_messages: messages about the first few records left out
    unended: number of conversations whose last answer has nothing that ends the turn
    doubled: number of texts that already had the tokens that were put around them
    unwritten: name of content that is not in the tokens, or not trained on -> number of records that have it
    empty: number of documents without a token, which are not among the documents
    """

    skipped: int = 0
    skip_messages: list[str] = field(default_factory=list[str])
    unended: int = 0
    doubled: int = 0
    unwritten: Counter[str] = field(default_factory=Counter[str])
    empty: int = 0

    def add(self, other: "TokenizeNotes") -> None:
        """Adds the counts of `other`."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Tokens of a source, with the document boundaries.

    key: identifier that changes whenever the tokens or the documents change; None for tokens in memory
    tokens: tokens of all documents: in memory, or mapped from a file
    begins, ends: document i is tokens[begins[i]:ends[i]]
    trained_token_count: number of tokens that are trained on
    vocabulary_size: the tokenizer's; of tokens that another program made, the largest one plus one
    loss_mask: mask of the tokens that are trained on; None if all are
    """

    name: str
    key: str | None
    tokens: Integers
    begins: Integers
    ends: Integers
    trained_token_count: int
    vocabulary_size: int
    notes: TokenizeNotes
    loss_mask: Integers | None = None

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
        notes = self.notes
        warnings = [
            f"{number:,} records of {self.name} have content that is not in the tokens or not trained: {name}"
            for name, number in sorted(notes.unwritten.items())
        ]
        if notes.empty:
            warnings.append(f"{notes.empty:,} documents of {self.name} are empty, and left out")
        if notes.doubled:
            warnings.append(
                f"{notes.doubled:,} texts of {self.name} already begin or end with the tokens that the "
                "tokenizer puts around a document, and now have them twice: take them out of the texts"
            )
        if notes.unended:
            warnings.append(
                f"{notes.unended:,} of {self.document_count:,} conversations of {self.name} end without a "
                "token that ends the assistant's turn, so that the model does not learn to stop. Write one "
                "behind the content in the chat template, such as {{ eos_token }}: data.chat_template = "
                '"<file>.jinja" is used in place of the tokenizer\'s template'
            )
        return warnings


def make_token_store(
    name: str, key: str | None, *, tokens: Integers, offsets: Integers, facts: Mapping[str, Any]
) -> TokenStore:
    """Returns a store of tokens whose document i is tokens[offsets[i]:offsets[i + 1]].

    facts: the counts of the tokenization, which are the manifest of a cache entry
    """
    known = {one.name: facts[one.name] for one in fields(TokenizeNotes) if one.name in facts}
    known["unwritten"] = Counter[str](known.get("unwritten", {}))
    return TokenStore(
        name=name,
        key=key,
        tokens=tokens,
        begins=offsets[:-1],
        ends=offsets[1:],
        trained_token_count=facts["trained"],
        vocabulary_size=facts["vocabulary"],
        notes=TokenizeNotes(**known),
    )


def memory_map_numbers(path: Path, dtype: str) -> Integers:
    """Maps a file of little-endian numbers into memory, as a read-only array."""
    if path.stat().st_size == 0:  # mmap refuses empty files
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Several stores joined in order. A place is the index of a token in the joined stream."""

    stores: tuple[TokenStore, ...]

    @cached_property
    def store_bounds(self) -> list[int]:
        """First place of each store, and the end of the last store."""
        return [0, *accumulate(len(store.tokens) for store in self.stores)]

    def slice_tokens_in_one_store(self, begin: int, end: int) -> Integers:
        """Returns the tokens from `begin` to before `end`, which must lie in one store."""
        store, base = self._find_store_and_its_begin(begin)
        return store.tokens[begin - base : end - base]

    def slice_loss_mask_in_one_store(self, begin: int, end: int) -> Integers | None:
        """Returns the mask of the trained tokens from `begin` to before `end`; None if all are trained on."""
        store, base = self._find_store_and_its_begin(begin)
        return None if store.loss_mask is None else store.loss_mask[begin - base : end - base]

    def document_begins_and_lengths(self) -> tuple[Integers, Integers]:
        """Returns (first place of each document, its number of tokens), as arrays in memory."""
        pairs = zip(self.stores, self.store_bounds, strict=False)
        begins = [store.begins.astype(np.int64) + base for store, base in pairs]
        lengths = [(store.ends - store.begins).astype(np.int64) for store in self.stores]
        return np.concatenate(begins), np.concatenate(lengths)

    def _find_store_and_its_begin(self, place: int) -> tuple[TokenStore, int]:
        i = bisect_right(self.store_bounds, place) - 1
        return self.stores[i], self.store_bounds[i]
