"""Token files made by other programs: .npy, .bin of a dtype, and Megatron-LM's .bin with its .idx."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.data.cache import Heartbeat, cache_key, get_or_build_entry, read_manifest, source_file_digests
from fullshard.data.files import (
    PAUSES_SECONDS,
    SourceFile,
    find_source_file,
    list_matching_files,
    open_source_file,
    unreadable_path_error,
)
from fullshard.data.token_store import (
    Integers,
    SlicedTokens,
    TokenStore,
    memory_map_npy,
    memory_map_numbers,
)
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.system.object_store import ObjectStore, read_object_range, without_secrets
from fullshard.system.small_files import ForeignErrorTranslator

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
# Keys are the dtype codes in the index: Megatron-LM, megatron/core/datasets/indexed_dataset.py (DType).
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_BEGINS, _ENDS = "begins.npy", "ends.npy"
_BLOCK = 1 << 22

Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(index of each document's first token, index behind its last token)."""


def open_memmap_stores(
    fields: DataSourceFields,
    *,
    root: Path,
    vocabulary_size: int | None,
    alive: Heartbeat,
) -> list[TokenStore]:
    """Returns a store for each token file that matches `fields.paths`; an .idx stands for its .bin.

    The tokens stay in their files; those of remote files are read when they are needed. The document
    boundaries and the largest token are cached in `root`. Remote files with known boundaries are not read to
    find the largest token if `vocabulary_size` is known: then each read is checked. Raises DataError for
    files that are not token files or hold invalid tokens.
    """
    listed = {file.path: file for file in list_matching_files(fields.paths, kind="memmap")}
    paths = {f"{path.removesuffix('.idx')}.bin" if path.endswith(".idx") else path for path in listed}
    stores: list[TokenStore] = []
    for path in sorted(paths):
        file = listed.get(path) or find_source_file(path)
        if file is None:
            raise unreadable_path_error(path, FileNotFoundError(2, "no such file, only its .idx"))
        index = path.removesuffix(".bin") + ".idx"
        indexed = path.endswith(".bin")
        index_file = (listed.get(index) or find_source_file(index)) if indexed else None
        reader = _TokenFileReader(file, vocabulary_size)
        stores.append(_open_memmap_store(reader, index_file, fields=fields, root=root, alive=alive))
    return stores


@dataclass(frozen=True)
class _RemoteTokens:
    """An array of tokens in a remote file. A slice of it is read when it is taken.

    begin_bytes, count: place of the first token in the file, and number of tokens
    vocabulary_size: if known, each slice is checked to hold only tokens below it
    """

    file: SourceFile
    dtype: np.dtype[Any]
    begin_bytes: int
    count: int
    vocabulary_size: int | None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> Integers:
        """Returns the tokens of a slice without a step. Raises DataError if they cannot be read."""
        first, last, _ = span.indices(self.count)
        if last <= first:
            return np.empty(0, self.dtype)
        begin, end = (self.begin_bytes + at * self.dtype.itemsize for at in (first, last))
        url, store = self.file.path, ObjectStore(self.file.path)
        try:
            data = read_object_range(store, url, begin=begin, end=end, pauses_seconds=PAUSES_SECONDS)
        except OSError as error:
            raise unreadable_path_error(url, error) from error
        tokens, known = np.frombuffer(data, self.dtype), self.vocabulary_size
        if known is not None and not (tokens.min() >= 0 and tokens.max() < known):
            raise DataError(
                f"{without_secrets(url)} holds a value that is not a token.",
                got=f"values from {tokens.min()} to {tokens.max()}; the tokenizer has {known} tokens",
                fix="the tokenizer that it was made with, or the right data.dtype",
            )
        return tokens


@dataclass(frozen=True)
class _TokenFileReader:
    """A token file, and how its tokens are read if it is remote: see `open_memmap_stores`."""

    file: SourceFile
    vocabulary_size: int | None

    @property
    def name(self) -> str:
        return without_secrets(self.file.path)

    def open_tokens(
        self, dtype: Any, *, begin_bytes: int = 0, count: int | None = None, bounded: bool
    ) -> SlicedTokens:
        """Returns `count` tokens (all if None). `bounded`: whether the document boundaries are known."""
        tokens = np.dtype(dtype).newbyteorder("<") if isinstance(dtype, str) else np.dtype(dtype)
        if count is None:
            count = (self.file.size - begin_bytes) // tokens.itemsize
        if self.file.version is None:
            return np.memmap(self.file.path, tokens, mode="r", offset=begin_bytes, shape=(count,))
        known = self.vocabulary_size if bounded else None
        return _RemoteTokens(self.file, tokens, begin_bytes, count, known)

    def check_holds_whole_tokens(self, dtype: str) -> None:
        size, each = self.file.size, np.dtype(dtype).itemsize
        if size % each or not size:
            raise DataError(
                f"{self.name} does not hold whole tokens.",
                got=f"{size} bytes, for a dtype of {each} ({dtype})",
                fix="the dtype that it was written with, or a file that is whole",
            )


def _open_memmap_store(
    reader: _TokenFileReader,
    index: SourceFile | None,
    *,
    fields: DataSourceFields,
    root: Path,
    alive: Heartbeat,
) -> TokenStore:
    file = reader.file
    try:
        if reader.name.endswith(".npy"):
            tokens, bounds = _open_npy_tokens(reader, eod_token=fields.eod_token)
        elif index is not None:
            tokens, bounds = _open_megatron_tokens(reader, index)
        else:
            tokens, bounds = _open_bin_tokens(reader, fields), None
    except OSError as error:
        raise unreadable_path_error(file.path, error) from error

    def write_document_bounds(draft: Path) -> Mapping[str, Any]:
        largest, found = _max_token_and_document_ends(
            tokens, reader.name, eod_token=fields.eod_token if bounds is None else None, alive=alive
        )
        begins, ends = bounds or (np.append(0, found[:-1]), found)
        kept = ends > begins
        np.save(draft / _BEGINS, begins[kept])
        np.save(draft / _ENDS, ends[kept])
        documents = int(kept.sum())
        empty = len(kept) - documents
        return {"vocabulary": largest + 1, "documents": documents, "empty": empty, "path": reader.name}

    facts = {
        "kind": "memmap",
        "files": source_file_digests([file] if index is None else [file, index], root=root, alive=alive),
        "dtype": str(tokens.dtype),
        "eod_token": fields.eod_token,
        "rows": bounds is not None,
        "checked": tokens.vocabulary_size if isinstance(tokens, _RemoteTokens) else None,
    }
    entry = get_or_build_entry(root, f"index-{cache_key(facts)}", build=write_document_bounds, alive=alive)
    manifest = read_manifest(entry)
    return TokenStore(
        name=reader.name.rpartition("/")[2],
        key=entry.name,
        tokens=tokens,
        begins=memory_map_npy(entry / _BEGINS),
        ends=memory_map_npy(entry / _ENDS),
        loss_mask=None,
        trained_token_count=len(tokens),
        vocabulary_size=manifest["vocabulary"],
        empty=manifest.get("empty", 0),
    )


def _max_token_and_document_ends(
    tokens: SlicedTokens, path: str, *, eod_token: int | None, alive: Heartbeat
) -> tuple[int, NDArray[np.int64]]:
    """Returns (largest token, index behind each `eod_token` and behind the last token, sorted).

    Reads no tokens that are checked whenever they are read; the largest is then the largest possible one.
    """
    if isinstance(tokens, _RemoteTokens) and tokens.vocabulary_size is not None:
        return tokens.vocabulary_size - 1, np.array([len(tokens)])
    largest, ends = -1, [np.array([len(tokens)])]
    for first in range(0, len(tokens), _BLOCK):
        alive()
        block = tokens[first : first + _BLOCK]
        if block.min() < 0:
            raise DataError(f"{path} holds a value that is not a token.", got=f"{block.min()}, below 0")
        largest = max(largest, int(block.max()))
        if eod_token is not None:
            ends.append(np.flatnonzero(block == eod_token) + first + 1)
    return largest, np.unique(np.concatenate(ends)).astype(np.int64)


def _open_npy_tokens(
    reader: _TokenFileReader, *, eod_token: int | None
) -> tuple[SlicedTokens, Bounds | None]:
    """Returns (tokens of an .npy file, bounds of its rows if it has two dims)."""
    with (
        open_source_file(reader.file.path) as file,
        ForeignErrorTranslator(lambda got: DataError(f"{reader.name} is not an array of tokens.", got=got)),
    ):
        version = np.lib.format.read_magic(file)
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read_header(file)
        begin, count = file.tell(), math.prod(shape)
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or not count or (is_fortran and len(shape) == 2):
        raise DataError(
            f"{reader.name} is not an array of tokens.",
            got=f"{dtype} of shape {list(shape)}" + (", column by column" if is_fortran else ""),
            fix="whole numbers, in one dimension, or in two with a document a row",
        )
    if begin + count * dtype.itemsize > reader.file.size:
        raise DataError(
            f"{reader.name} is not an array of tokens.",
            got=f"{reader.file.size} bytes, for shape {list(shape)}",
            fix="a file that is whole",
        )
    bounded = len(shape) == 2 or eod_token is None
    tokens = reader.open_tokens(dtype, begin_bytes=begin, count=count, bounded=bounded)
    if len(shape) == 1:
        return tokens, None
    ends = np.arange(1, shape[0] + 1, dtype=np.int64) * shape[1]
    return tokens, (ends - shape[1], ends)


def _open_bin_tokens(reader: _TokenFileReader, fields: DataSourceFields) -> SlicedTokens:
    if fields.dtype is None:
        index = reader.name.rpartition("/")[2].removesuffix(".bin") + ".idx"
        raise DataError(
            f"{reader.name} does not state its dtype.",
            got=f"no {index} beside it",
            why="its bytes are numbers of some dtype",
            fix='data.dtype = "uint16", or the dtype that it was written with',
        )
    reader.check_holds_whole_tokens(fields.dtype)
    return reader.open_tokens(fields.dtype, bounded=fields.eod_token is None)


def _open_megatron_tokens(reader: _TokenFileReader, index_file: SourceFile) -> tuple[SlicedTokens, Bounds]:
    """Returns (tokens of a .bin, bounds of the documents in its .idx).

    The index holds a header, sizes (int32), byte offsets (int64), and the first sequence of each document
    (int64).
    """
    index = without_secrets(index_file.path)
    if index_file.version is None:
        data = memory_map_numbers(Path(index), "uint8")  # only the bytes that are accessed are read
    else:
        with open_source_file(index_file.path) as file:
            data = np.frombuffer(file.read(), np.uint8)
    head = len(_MAGIC) + struct.calcsize("<QBQQ")
    start = bytes(data[:head])
    if not start.startswith(_MAGIC) or len(start) < head:
        raise DataError(f"{index} is not an index of tokens.", got=f"it begins with {start[: len(_MAGIC)]!r}")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", start, len(_MAGIC))
    dtype = _DTYPES.get(code, "unknown")
    if version != _VERSION or np.dtype(dtype if code in _DTYPES else "float32").kind not in "iu":
        raise DataError(f"{index} cannot be used.", got=f"version {version}, dtype {code} ({dtype})")
    if len(data) < head + 12 * sequences + 8 * documents or documents < 1:
        raise DataError(f"{index} is cut off.", got=f"{len(data)} bytes for {sequences} sequences")
    reader.check_holds_whole_tokens(dtype)
    sizes = np.frombuffer(data, "<i4", sequences, head).astype(np.int64)
    places = np.frombuffer(data, "<i8", sequences, head + 4 * sequences) // np.dtype(dtype).itemsize
    first = np.frombuffer(data, "<i8", documents, head + 12 * sequences)
    tokens = reader.open_tokens(dtype, bounded=True)
    bad_order = first[0] < 0 or first[-1] != sequences or (np.diff(first) < 0).any()
    outside = (sizes < 0) | (places < 0) | (places > len(tokens) - sizes)
    if bad_order or outside.any():
        raise DataError(
            f"{index} does not fit its .bin.",
            got=f"{len(tokens)} tokens of {dtype} in {reader.name}",
            fix="the two files that were written together",
        )
    whole = np.flatnonzero(np.diff(first) > 0)
    begins, last = places[first[whole]], first[whole + 1] - 1
    ends = places[last] + sizes[last]
    if not len(whole) or (ends - begins != np.add.reduceat(sizes, first[whole])).any():
        raise DataError(
            f"{index} has documents in several places.", got=f"{len(whole)} documents in {reader.name}"
        )
    return tokens, (begins, ends)
