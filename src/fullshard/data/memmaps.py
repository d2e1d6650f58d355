"""Token files made by other programs: .npy, .bin of a dtype, and Megatron-LM's .bin with its .idx."""

import os
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.data import token_store
from fullshard.data.files import SourceFile, list_matching_files, stat_files, unreadable_path_error
from fullshard.data.first_reading import RANGE_BYTES, Blocks, FirstReading, TokenFacts
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.system.small_files import ForeignErrorTranslator

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
# Keys are the dtype codes in the index: Megatron-LM, megatron/core/datasets/indexed_dataset.py (DType).
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BEGINS, _ENDS = "begins.npy", "ends.npy"
_MOST_HEADER_BYTES = 1 << 16

Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(index of each document's first token, index behind its last token)."""


def open_memmap_stores(
    fields: DataSourceFields, *, root: Path, alive: token_store.Heartbeat, range_bytes: int = RANGE_BYTES
) -> list[token_store.TokenStore]:
    """Returns a store for each token file that matches `fields.paths`; an .idx stands for its .bin.

    The tokens stay in their files. The document boundaries and the largest token are cached in `root`. Ranks
    that start together divide the first reading. Raises DataError for files that are not token files or hold
    invalid tokens.
    """
    listed = [file.path for file in list_matching_files(fields.paths, kind="memmap")]
    paths = {f"{path.removesuffix('.idx')}.bin" if path.endswith(".idx") else path for path in listed}
    files = stat_files(sorted(paths))
    quiet = FirstReading(root, alive, range_bytes)
    reading = quiet.reporting(files)

    def open_store(path: str, waits: bool) -> token_store.TokenStore:
        tokens, bounds, index = _open_tokens(path, fields)
        digests, eod = quiet.digests(index, waits=waits), fields.eod_token
        prepare = partial(_index_documents, bounds=bounds, eod_token=eod, index_digests=digests, waits=waits)
        entry = prepare(path, tokens, reading=reading if quiet.find_digest(path) is None else quiet)
        manifest = token_store.read_manifest(entry)
        return token_store.TokenStore(
            name=path.rpartition("/")[2],
            key=entry.name,
            tokens=tokens,
            begins=np.load(entry / _BEGINS, mmap_mode="r"),
            ends=np.load(entry / _ENDS, mmap_mode="r"),
            trained_token_count=len(tokens),
            vocabulary_size=manifest["vocabulary"],
            notes=token_store.TokenizeNotes(empty=manifest.get("empty", 0)),
        )

    return token_store.divide_by_rank([file.path for file in files], open_store, waits=True)


def _open_tokens(
    path: str, fields: DataSourceFields
) -> tuple[token_store.Integers, Bounds | None, list[SourceFile]]:
    """Returns (tokens of a file, bounds of its documents if it has them, its .idx if there is one)."""
    index = path.removesuffix(".bin") + ".idx"
    has_index = path.endswith(".bin") and os.path.exists(index)
    try:
        if path.endswith(".npy"):
            tokens, bounds = _open_npy_tokens(path)
        elif has_index:
            tokens, bounds = _open_megatron_tokens(path, index)
        else:
            tokens, bounds = _open_bin_tokens(path, fields.dtype), None
    except OSError as error:
        raise unreadable_path_error(path, error) from error
    _check_settings(fields, path, dtype=tokens.dtype, has_bounds=bounds is not None)
    return tokens, bounds, stat_files([index] if has_index else [])


def _index_documents(
    path: str,
    tokens: token_store.Integers,
    *,
    bounds: Bounds | None,
    eod_token: int | None,
    index_digests: Sequence[str],
    reading: FirstReading,
    waits: bool,
) -> Path:
    """Returns the cache entry with the bounds of a token file's documents.

    Reads the file if the cache has no such entry.

    bounds: those in the file or in its .idx; None to find the ends of documents by `eod_token`
    index_digests: the digest of the .idx, if there is one
    """

    def name_entry(digest: str) -> str:
        facts = {"files": [digest, *index_digests], "dtype": str(tokens.dtype), "eod_token": eod_token}
        key = token_store.cache_key({"kind": "memmap", **facts, "rows": bounds is not None})
        return f"index-{key}"

    def find() -> Path | None:
        digest = reading.find_digest(path)
        return None if digest is None else token_store.find_complete_entry(reading.root / name_entry(digest))

    def finish(digest: str, ranges: Sequence[TokenFacts]) -> Path:
        def write_document_bounds(draft: Path) -> Mapping[str, Any]:
            found = np.unique(np.concatenate([*(ends for _, ends in ranges), [len(tokens)]]))
            begins, ends = bounds or (np.append(0, found[:-1]), found)
            kept = ends > begins
            token_store.save_array(draft / _BEGINS, begins[kept])
            token_store.save_array(draft / _ENDS, ends[kept])
            documents, vocabulary = int(kept.sum()), max(largest for largest, _ in ranges) + 1
            empty = len(kept) - documents
            return {"vocabulary": vocabulary, "documents": documents, "empty": empty, "path": path}

        return token_store.get_or_build_entry(reading.root, name_entry(digest), build=write_document_bounds)

    scan = partial(_scan_tokens, tokens=tokens, path=path, eod_token=eod_token)
    facts = f"{tokens.dtype} {eod_token}"
    return reading.read(path, find=find, finish=finish, waits=waits, scan=scan, scanned_for=facts)


def _check_settings(fields: DataSourceFields, path: str, *, dtype: np.dtype[Any], has_bounds: bool) -> None:
    """Raises DataError for settings that contradict a file that says its dtype and documents itself."""
    if fields.dtype is not None and np.dtype(fields.dtype) != dtype:
        raise DataError(
            f"{path} has another dtype.",
            got=f"{dtype}, and data.dtype = {fields.dtype!r}",
            fix=f"data.dtype = {str(dtype)!r}, or left out",
        )
    if fields.eod_token is not None and has_bounds:
        raise DataError(
            f"{path} says itself where documents end.",
            got=f"data.eod_token = {fields.eod_token}",
            why="its rows, or the .idx beside it, are the documents",
            fix="leave data.eod_token out",
        )


def _scan_tokens(
    blocks: Blocks, *, tokens: token_store.Integers, path: str, eod_token: int | None
) -> TokenFacts:
    """Returns the largest of the `tokens` in `blocks` of their file, and where documents end."""
    largest, ends, header = -1, [np.empty(0, np.int64)], int(getattr(tokens, "offset", 0))
    for at, block in blocks:
        begin, end = (min(max(place - at, 0), len(block)) for place in (header, header + tokens.nbytes))
        found, first = np.frombuffer(block[begin:end], tokens.dtype), (at + begin - header) // tokens.itemsize
        if not len(found):
            continue
        if found.min() < 0:
            raise DataError(f"{path} holds a value that is not a token.", got=f"{found.min()}, below 0")
        largest = max(largest, int(found.max()))
        if eod_token is not None:
            ends.append(np.flatnonzero(found == eod_token) + first + 1)
            _check_document_count(path, sum(map(len, ends)), token_count=first + len(found))
    return largest, np.concatenate(ends)


def _check_document_count(path: str, count: int, *, token_count: int) -> None:
    if count > max(1 << 22, token_count // 8):  # their bounds would take many times the file's bytes
        raise DataError(f"{path} has too many documents.", got=f"{count:,} in {token_count:,} tokens")


def _open_npy_tokens(path: str) -> tuple[token_store.Integers, Bounds | None]:
    """Returns (tokens of an .npy file, bounds of its rows if it has two dims)."""
    what = f"{path} is not an array of tokens."
    with open(path, "rb") as file:
        head = file.read(12)
    if head[6:7] > b"\1" and int.from_bytes(head[8:], "little") > _MOST_HEADER_BYTES:  # numpy reads it whole
        raise DataError(what, got=f"a header of more than {_MOST_HEADER_BYTES} bytes")
    with ForeignErrorTranslator(lambda got: DataError(what, got=got)):
        array = np.lib.format.open_memmap(path, mode="r")
        order = "" if array.flags.c_contiguous else ", column by column"
        if not array.flags.aligned:
            order = f" that begins at byte {array.offset}, which is not a multiple of {array.itemsize}"
        if order or not array.size or array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise DataError(
                what,
                got=f"{array.dtype} of shape {list(array.shape)}{order}",
                fix="whole numbers, in one dimension, or in two with a document a row",
            )
    if array.ndim == 1:
        return array, None
    _check_document_count(path, len(array), token_count=array.size)
    ends = np.arange(1, len(array) + 1, dtype=np.int64) * array.shape[1]
    return array.reshape(-1), (ends - array.shape[1], ends)


def _open_bin_tokens(path: str, dtype: str | None) -> token_store.Integers:
    if dtype is None:
        raise DataError(
            f"{path} does not state its dtype.",
            got=f"no {Path(path).with_suffix('.idx').name} beside it",
            why="its bytes are numbers of some dtype",
            fix='data.dtype = "uint16", or the dtype that it was written with',
        )
    size, each = os.path.getsize(path), np.dtype(dtype).itemsize
    if size % each or not size:
        raise DataError(
            f"{path} does not hold whole tokens.",
            got=f"{size} bytes, for a dtype of {each} ({dtype})",
            fix="the dtype that it was written with, or a file that is whole",
        )
    return token_store.memory_map_numbers(Path(path), dtype)


def _open_megatron_tokens(path: str, index: str) -> tuple[token_store.Integers, Bounds]:
    """Returns (tokens of a .bin, bounds of the documents in its .idx).

    The index holds a header, sizes (int32), byte offsets (int64), and the first sequence of each document
    (int64).
    """
    data = token_store.memory_map_numbers(Path(index), "uint8")  # only the bytes that are accessed are read
    head = len(_MAGIC) + struct.calcsize("<QBQQ")
    start = bytes(data[:head])
    if not start.startswith(_MAGIC) or len(start) < head:
        raise DataError(f"{index} is not an index of tokens.", got=f"it begins with {start[: len(_MAGIC)]!r}")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", start, len(_MAGIC))
    if version != _VERSION or code not in _DTYPES:
        raise DataError(f"{index} cannot be used.", got=f"version {version}, dtype {code}, not of integers")
    if len(data) < head + 12 * sequences + 8 * documents or documents < 1:
        raise DataError(f"{index} is cut off.", got=f"{len(data)} bytes for {sequences} sequences")
    tokens = _open_bin_tokens(path, _DTYPES[code])
    _check_document_count(index, max(sequences, documents), token_count=len(tokens))
    sizes = np.frombuffer(data, "<i4", sequences, head).astype(np.int64)
    places = np.frombuffer(data, "<i8", sequences, head + 4 * sequences) // tokens.itemsize
    first = np.frombuffer(data, "<i8", documents, head + 12 * sequences)
    bad_order = first[0] < 0 or first[-1] != sequences or (np.diff(first) < 0).any()
    outside = (sizes < 0) | (places < 0) | (places > len(tokens) - sizes)
    if bad_order or outside.any():
        raise DataError(
            f"{index} does not fit its .bin.",
            got=f"{len(tokens)} tokens of {tokens.dtype} in {path}",
            fix="the two files that were written together",
        )
    whole = np.flatnonzero(np.diff(first) > 0)
    begins, last = places[first[whole]], first[whole + 1] - 1
    ends = places[last] + sizes[last]
    if not len(whole) or (ends - begins != np.add.reduceat(sizes, first[whole])).any():
        raise DataError(f"{index} has documents in several places.", got=f"{len(whole)} documents in {path}")
    return tokens, (begins, ends)
