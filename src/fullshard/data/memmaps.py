"""Token files made by other programs: .npy, .bin of a dtype, and Megatron-LM's .bin with its .idx."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.data.cache import Heartbeat, digests, get_or_build, key_of, manifest_of
from fullshard.data.files import list_files, unreadable
from fullshard.data.token_store import Integers, TokenStore, mapped, mapped_npy
from fullshard.errors import DataError
from fullshard.spec.data_section import SourceFields
from fullshard.spec.libraries import ForeignErrors

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
# Keys are the dtype codes in the index: Megatron-LM, megatron/core/datasets/indexed_dataset.py (DType).
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_BEGINS, _ENDS = "begins.npy", "ends.npy"
_BLOCK = 1 << 22


@dataclass(frozen=True)
class _Raw:
    """A token file before its tokens are read.

    path: the file
    tokens: its tokens
    begins, ends: document boundaries; None if the file does not define them
    """

    path: Path
    tokens: Integers
    begins: NDArray[np.int64] | None = None
    ends: NDArray[np.int64] | None = None


def memmap_stores(fields: SourceFields, *, root: Path, alive: Heartbeat) -> list[TokenStore]:
    """Returns a store for each file that matches `fields.paths`; an .idx belongs to its .bin.

    The tokens stay in their files. The cache holds the document boundaries and the largest token. Raises
    DataError for files that are not token files or hold invalid tokens.
    """
    bins = {path.with_suffix(".bin") if path.suffix == ".idx" else path for path in list_files(fields.paths)}
    return [_store(_opened(path, fields), fields, root=root, alive=alive) for path in sorted(bins)]


def _store(raw: _Raw, fields: SourceFields, *, root: Path, alive: Heartbeat) -> TokenStore:
    index = raw.path.with_suffix(".idx")
    files = [raw.path, index] if raw.path.suffix == ".bin" and index.exists() else [raw.path]
    facts = {
        "kind": "memmap",
        "files": digests(files, root=root, alive=alive),
        "dtype": str(raw.tokens.dtype),
        "document_end": fields.document_end,
        "rows": raw.ends is not None,
    }
    entry = get_or_build(
        root,
        f"index-{key_of(facts)}",
        build=lambda draft: _indexed(raw, fields, draft=draft, alive=alive),
        alive=alive,
    )
    return TokenStore(
        name=raw.path.name,
        key=entry.name,
        tokens=raw.tokens,
        begins=mapped_npy(entry / _BEGINS),
        ends=mapped_npy(entry / _ENDS),
        trained=None,
        vocabulary=manifest_of(entry)["vocabulary"],
    )


def _indexed(raw: _Raw, fields: SourceFields, *, draft: Path, alive: Heartbeat) -> Mapping[str, Any]:
    largest, ends = -1, list[NDArray[np.int64]]()
    for first, block in _blocks(raw.tokens):
        alive()
        if block.min() < 0:
            raise DataError(f"{raw.path} holds what is no token.", got=f"{block.min()}, below 0")
        largest = max(largest, int(block.max()))
        if fields.document_end is not None:
            ends.append(np.flatnonzero(block == fields.document_end) + first + 1)
    begins, found = raw.begins, raw.ends
    if begins is None or found is None:
        found = np.unique(np.concatenate([*ends, [len(raw.tokens)]])).astype(np.int64)
        begins = np.concatenate([[0], found[:-1]])
    kept = found > begins  # drops empty documents
    np.save(draft / _BEGINS, begins[kept])
    np.save(draft / _ENDS, found[kept])
    return {"vocabulary": largest + 1, "documents": int(kept.sum()), "path": str(raw.path)}


def _blocks(tokens: Integers) -> Iterator[tuple[int, Integers]]:
    for first in range(0, len(tokens), _BLOCK):
        yield first, tokens[first : first + _BLOCK]


def _opened(path: Path, fields: SourceFields) -> _Raw:
    try:
        if path.suffix == ".npy":
            return _npy(path)
        index = path.with_suffix(".idx")
        if path.suffix == ".bin" and index.exists():
            return _megatron(path, index)
        return _bin(path, fields)
    except OSError as error:
        raise unreadable(path, error) from error


def _npy(path: Path) -> _Raw:
    if not path.is_file():
        raise DataError(f"{path} is not a regular file.")
    with ForeignErrors(
        lambda got: DataError(f"{path} is no array of tokens.", got=got)
    ):  # also for arrays of Python objects
        array = mapped_npy(path)
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        raise DataError(
            f"{path} is no array of tokens.",
            got=f"{array.dtype} of shape {list(array.shape)}",
            fix="whole numbers, in one dimension, or in two with a document a row",
        )
    if array.ndim == 1:
        return _Raw(path, array)
    ends = np.arange(1, len(array) + 1, dtype=np.int64) * array.shape[1]
    return _Raw(path, array.reshape(-1), ends - array.shape[1], ends)


def _bin(path: Path, fields: SourceFields) -> _Raw:
    if fields.dtype is None:
        raise DataError(
            f"{path} does not say what it holds.",
            got=f"no {path.with_suffix('.idx').name} beside it",
            why="its bytes are numbers of some dtype",
            fix='data.dtype = "uint16", or what it was written with',
        )
    _check_size(path, fields.dtype)
    return _Raw(path, mapped(path, fields.dtype))


def _check_size(path: Path, dtype: str) -> None:
    size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if size % each or not size:
        raise DataError(
            f"{path} does not hold whole tokens.",
            got=f"{size} bytes, for a dtype of {each} ({dtype})",
            fix="the dtype that it was written with, or a file that is whole",
        )


def _index(path: Path) -> Integers:
    """Maps the bytes of an .idx. Only accessed bytes are read."""
    if not path.is_file():
        raise DataError(f"{path} is not a regular file.")
    return mapped(path, "uint8")


def _megatron(path: Path, index: Path) -> _Raw:
    """Opens a .bin with its .idx.

    The index holds a header, sizes (int32), byte offsets (int64), and the first sequence of each document
    (int64).
    """
    data = _index(index)
    head = len(_MAGIC) + struct.calcsize("<QBQQ")
    start = bytes(data[:head])
    if not start.startswith(_MAGIC) or len(start) < head:
        raise DataError(f"{index} is no index of tokens.", got=f"it begins with {start[: len(_MAGIC)]!r}")
    version, code, sequences, documents = struct.unpack_from("<QBQQ", start, len(_MAGIC))
    dtype = _DTYPES.get(code, "unknown")
    if version != _VERSION or np.dtype(dtype if code in _DTYPES else "float32").kind not in "iu":
        raise DataError(f"{index} cannot be used.", got=f"version {version}, dtype {code} ({dtype})")
    if len(data) < head + 12 * sequences + 8 * documents or documents < 1:
        raise DataError(f"{index} is cut off.", got=f"{len(data)} bytes for {sequences} sequences")
    _check_size(path, dtype)
    sizes = np.frombuffer(data, "<i4", sequences, head).astype(np.int64)
    places = np.frombuffer(data, "<i8", sequences, head + 4 * sequences) // np.dtype(dtype).itemsize
    first = np.frombuffer(data, "<i8", documents, head + 12 * sequences)
    tokens = mapped(path, dtype)
    bad_order = first[0] < 0 or first[-1] != sequences or (np.diff(first) < 0).any()
    outside = (sizes < 0) | (places < 0) | (places > len(tokens) - sizes)
    if bad_order or outside.any():
        raise DataError(
            f"{index} does not fit its .bin.",
            got=f"{len(tokens)} tokens of {dtype} in {path.name}",
            fix="the two files that were written together",
        )
    whole = np.flatnonzero(np.diff(first) > 0)
    begins, last = places[first[whole]], first[whole + 1] - 1
    ends = places[last] + sizes[last]
    if (ends - begins != np.add.reduceat(sizes, first[whole])).any() if len(whole) else True:
        raise DataError(f"{index} has documents in several places.", got=f"{len(whole)} documents in {path}")
    return _Raw(path, tokens, begins, ends)
