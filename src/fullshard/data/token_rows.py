"""Reads rows of tokens that another program made: lists of numbers, and masks of the same length."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.data.row_fields import ABSENT, UntokenizableRecordError, look_up_field
from fullshard.data.row_marks import (
    DOCUMENT_BEGINS,
    DOCUMENT_LENGTHS,
    DOCUMENT_NUMBERS,
    IGNORED_LABEL,
    LOSS_MASKS,
    POSITIONS,
    PROMPT_MASK,
    check_unused_marks,
    names_beside,
)
from fullshard.spec.data_section import DataSourceFields

TOKEN_LIMIT = 1 << 32
"""Number of different tokens that a token store can hold."""

Numbers = NDArray[Any]


def read_token_row(
    row: Mapping[str, Any], tokens: Any, *, fields: DataSourceFields, vocabulary_size: int
) -> tuple[Numbers, NDArray[np.bool_], list[int]]:
    """Returns (tokens of `row` without padding, mask of the trained tokens, index behind each document).

    tokens: value of the row's field of tokens, a list or an array of integers
    vocabulary_size: largest valid token, plus one

    Raises UntokenizableRecordError for tokens outside of the vocabulary, and for labels or masks that do not
    fit the tokens. See [Note: marks].
    """
    marks = _MarkReader(row, fields.tokens_field)
    found = _one_dim_array(tokens, fields.tokens_field)
    if found.size and found.dtype.kind not in "iu":
        raise UntokenizableRecordError(f"{fields.tokens_field!r} holds {found.dtype}, not integers")
    length, trained, padding = len(found), np.ones(len(found), np.bool_), np.zeros(len(found), np.bool_)
    begins = np.zeros(length, np.bool_)
    for name, attention in marks.read((fields.attention_mask_field,), length=length):
        if (attention < 0).any() or (attention % 1).any():
            raise UntokenizableRecordError(f"{name!r} has other values than 0 and 1, or numbers of documents")
        padding |= attention == 0
        if attention.max(initial=0) > 1:  # as axolotl packs: the number of the document
            begins |= _begins_of_numbers(name, attention, padding=padding)
    for name, mask in marks.read((fields.loss_mask_field, *LOSS_MASKS[1:]), length=length):
        trained &= _mask_values(mask, name)
    for name, mask in marks.read((PROMPT_MASK,), length=length):
        trained &= ~_mask_values(mask, name)
    for name, labels in marks.read((fields.labels_field,), length=length):
        trained &= _labelled_positions(labels, name, tokens=found)
    begins |= _find_document_begins(marks, padding)
    check_unused_marks(row, fields.tokens_field, used=marks.used)
    documents = np.cumsum(begins)[~padding]
    found, trained = found[~padding], trained[~padding]
    if found.size and not 0 <= (wrong := found.max() if found.min() >= 0 else found.min()) < vocabulary_size:
        raise UntokenizableRecordError(
            f"{fields.tokens_field!r} has the token {wrong}; the vocabulary has {vocabulary_size}"
        )
    return found, trained, [*(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(found)]


class _MarkReader:
    """Reads the marks of a row of tokens, and remembers which were used."""

    def __init__(self, row: Mapping[str, Any], tokens_field: str) -> None:
        self._row, self._tokens_field = row, tokens_field
        self.used = {"labels", "loss_mask", "attention_mask"}  # or the fields that replace them

    def read(self, names: Iterable[str], *, length: int | None = None) -> Iterator[tuple[str, Numbers]]:
        """Yields (name, numbers) of the fields `names` that the row has, which must have `length` numbers."""
        for name in names:
            self.used.add(name)
            for beside in names_beside(name, self._tokens_field):
                value = look_up_field(self._row, beside)
                if value is ABSENT or value is None:
                    continue
                numbers = _one_dim_array(value, beside)
                if length is not None and len(numbers) != length:
                    raise UntokenizableRecordError(
                        f"{beside!r} has {len(numbers)} values for {length} tokens"
                    )
                yield beside, numbers


def _find_document_begins(marks: _MarkReader, padding: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns the mask of the tokens with which another document begins, after the marks of a packed row."""
    length, begins = len(padding), np.zeros(len(padding), np.bool_)
    for name, numbers in marks.read(POSITIONS, length=length):
        starts, places = (numbers == 0)[~padding], np.arange(length - padding.sum())
        last_start = np.maximum.accumulate(np.where(starts, places, 0))
        if not np.array_equal(numbers[~padding], places - last_start):
            raise UntokenizableRecordError(f"{name!r} does not count from 0 in each document")
        begins |= (numbers == 0) & ~padding
    for name, numbers in marks.read(DOCUMENT_NUMBERS, length=length):
        begins |= _begins_of_numbers(name, numbers, padding=padding)
    cuts = [(name, numbers) for name, numbers in marks.read(DOCUMENT_BEGINS)]
    cuts += [(name, np.cumsum([0, *numbers])) for name, numbers in marks.read(DOCUMENT_LENGTHS)]
    for name, numbers in cuts:
        whole = numbers.size and not numbers[0] and (numbers[-1] == length or name.endswith("seq_start_id"))
        if not whole or (np.diff(numbers) < 0).any() or (numbers > length).any():
            raise UntokenizableRecordError(f"{name!r} does not divide {length} tokens")
        begins[numbers[numbers < length]] = True
    return begins


def _begins_of_numbers(name: str, numbers: Numbers, *, padding: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns the mask of the tokens where the number of the document changes."""
    own = numbers[~padding]
    if own.size and (own.min() < 0 or (own[-1] == 0 and own[0] != 0)):
        raise UntokenizableRecordError(
            f"{name!r} ends with {own[-1]}, which is padding in other programs; an attention mask whose 0 is "
            "padding says so"
        )
    begins = np.zeros(len(numbers), np.bool_)
    begins[np.flatnonzero(~padding)[1:]] = np.diff(own) != 0
    return begins


def iterate_list_rows(batch: Any, names: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a pyarrow.RecordBatch, with lists of numbers as arrays that share its memory.

    names: path of each column, see `row_fields.find_arrow_path`, by the name of the field
    """
    columns = [_split_list_column(batch, path) for path in names.values()]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _split_list_column(batch: Any, path: Sequence[str]) -> list[Any]:
    """Returns the lists of a column, as arrays if they are lists of numbers without nulls."""
    import pyarrow.compute

    compute: Any = pyarrow.compute
    column = batch.column(path[0])
    if path[1:]:
        column = compute.struct_field(column, [*path[1:]])
    kind = column.type
    is_list = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    if not any(check(kind) for check in is_list) or not pyarrow.types.is_primitive(kind.value_type):
        return column.to_pylist()
    values = compute.list_flatten(column)
    if values.null_count:
        return column.to_pylist()
    lengths = compute.fill_null(compute.list_value_length(column), 0)
    cuts = np.cumsum(lengths.to_numpy(zero_copy_only=False))[:-1]
    parts = np.split(values.to_numpy(zero_copy_only=False), cuts)
    valid = column.is_valid().to_pylist()
    return [part if there else None for part, there in zip(parts, valid, strict=True)]


def _one_dim_array(value: Any, name: str) -> Numbers:
    if not isinstance(value, list | np.ndarray):
        kind = "null" if value is None else type(value).__name__
        raise UntokenizableRecordError(f"{name!r} is not a list of numbers but {kind}")
    try:
        array: Numbers = np.asarray(value)  # pyright: ignore[reportUnknownArgumentType]
    except ValueError as error:  # lists of different lengths
        raise UntokenizableRecordError(f"{name!r} is not a list of numbers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        held = f"of shape {list(array.shape)}" if array.ndim != 1 else "with other values"
        raise UntokenizableRecordError(f"{name!r} is not a list of numbers but one {held}")
    return array


def _mask_values(mask: Numbers, name: str) -> NDArray[np.bool_]:
    if not (valid := np.isin(mask, (0, 1))).all():
        raise UntokenizableRecordError(f"{name!r} has weights, such as {mask[~valid][0]}")
    return mask != 0


def _labelled_positions(labels: Numbers, name: str, *, tokens: Numbers) -> NDArray[np.bool_]:
    """Returns the mask of the positions whose label is not IGNORED_LABEL."""
    labelled = labels != IGNORED_LABEL
    differing = np.flatnonzero(labelled & (labels != tokens))
    if len(differing):
        at = differing[0]
        raise UntokenizableRecordError(
            f"{name!r} has {labels[at]} at position {at}, where {tokens[at]} is the token; a label is the "
            f"token at its own position, or {IGNORED_LABEL}"
        )
    return labelled
