"""Splits files into two byte arrays: training data and held-out data."""

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fullshard.data.documents import Document, unreadable
from fullshard.data.tokenizer import SEPARATOR
from fullshard.errors import DataError


def hold_out(documents: Sequence[Document], *, fraction: float) -> tuple[list[Document], list[Document]]:
    """Returns (training, held out), with about `fraction` of the bytes held out.

    Documents are visited in the order of a hash of their names, and each that still fits into the fraction is
    held out whole. The split therefore depends only on names and sizes, and not on the machine, the seed or
    the ranks. If the documents are few and large, so that less than half of the fraction is filled, the tail
    of the largest document fills the rest.
    """
    budget = left = round(fraction * sum(document.size for document in documents))
    training: list[Document] = []
    held_out: list[Document] = []
    for document in sorted(documents, key=lambda document: _hash("hold out", document.name)):
        if document.size <= left:
            held_out.append(document)
            left -= document.size
        else:
            training.append(document)
    if 2 * left > budget:
        # This document did not fit, so it is longer than `left`: both parts are non-empty.
        largest = max(training, key=lambda document: document.size)
        training.remove(largest)
        head, tail = largest.cut(largest.size - left)
        training.append(head)
        held_out.append(tail)
    return training, held_out


def shuffle(documents: Sequence[Document], *, seed: int) -> list[Document]:
    """Returns the documents in an order that depends only on the seed and their names.

    The order is the same for all versions of numpy.
    """
    return sorted(documents, key=lambda document: _hash(f"shuffle {seed}", document.name))


def pack(documents: Sequence[Document]) -> NDArray[np.uint8]:
    """Returns the bytes of the documents with SEPARATOR between them.

    Reads each document once, into its place.

    Raises DataError for a file that cannot be read, changed since it was listed, or contains SEPARATOR.
    """
    size = sum(document.size for document in documents) + max(len(documents) - 1, 0)
    packed = np.full(size, SEPARATOR, dtype=np.uint8)
    start = 0
    for document in documents:
        _read(document, packed[start : start + document.size])
        start += document.size + 1
    return packed


def _read(document: Document, into: NDArray[np.uint8]) -> None:
    try:
        with document.path.open("rb") as file:
            file.seek(document.offset)
            count = file.readinto(into.data)
    except OSError as error:
        raise unreadable(document.path, error) from error
    if count != document.size:
        raise DataError(
            f"{document.path} changed while it was read.",
            got=f"{count} bytes where {document.size} were listed",
        )
    smallest = int(into.argmin())
    if into[smallest] == SEPARATOR:
        raise DataError(
            f"{document.path} is no plain text.",
            got=f"a NUL byte at offset {document.offset + smallest}",
            why="NUL is the token that separates documents",
            fix="leave the file out of data.paths, or convert it to UTF-8",
        )


def _hash(purpose: str, name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(f"{purpose}\0{name}"), digest_size=16).digest()
