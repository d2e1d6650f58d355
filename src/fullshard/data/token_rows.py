"""Reads rows of tokens that another program made: lists of numbers, and masks of the same length."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fullshard.data.row_fields import ABSENT, UntokenizableRecordError, look_up_field
from fullshard.spec.data_section import DataSourceFields

TOKEN_LIMIT = 1 << 32
"""Number of different tokens that a token store can hold."""

_IGNORED_LABEL = -100

Numbers = NDArray[Any]


def read_token_row(
    row: Mapping[str, Any], tokens: Any, *, fields: DataSourceFields, vocabulary_size: int
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Returns (tokens of `row` without padding, mask of the trained tokens).

    tokens: value of the row's field of tokens, a list or an array of integers
    vocabulary_size: largest valid token, plus one

    Raises UntokenizableRecordError for tokens outside of the vocabulary, and for labels or masks that do not
    fit the tokens.
    """
    found = _one_dim_array(tokens, fields.tokens_field)
    if found.size and found.dtype.kind not in "iu":
        raise UntokenizableRecordError(f"{fields.tokens_field!r} holds {found.dtype}, not integers")
    kept, trained = np.ones(len(found), np.bool_), np.ones(len(found), np.bool_)
    for name, mask in ((fields.attention_mask_field, kept), (fields.loss_mask_field, trained)):
        value = look_up_field(row, name)
        if value is not ABSENT and value is not None:
            mask &= _mask_values(value, name, length=len(found))
    labels = look_up_field(row, fields.labels_field)
    if labels is not ABSENT and labels is not None:
        trained &= _labelled_positions(labels, fields.labels_field, tokens=found)
    found, trained = found[kept], trained[kept]
    if found.size and not 0 <= (wrong := found.max() if found.min() >= 0 else found.min()) < vocabulary_size:
        raise UntokenizableRecordError(
            f"{fields.tokens_field!r} has the token {wrong}; the vocabulary has {vocabulary_size}"
        )
    return found, trained


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


def _array_of_length(value: Any, name: str, *, length: int) -> Numbers:
    array = _one_dim_array(value, name)
    if len(array) != length:
        raise UntokenizableRecordError(f"{name!r} has {len(array)} values for {length} tokens")
    return array


def _mask_values(value: Any, name: str, *, length: int) -> NDArray[np.bool_]:
    array = _array_of_length(value, name, length=length)
    if array.dtype.kind == "f" and not np.isin(array, (0, 1)).all():
        raise UntokenizableRecordError(f"{name!r} has weights, such as {array[~np.isin(array, (0, 1))][0]}")
    return array != 0


def _labelled_positions(value: Any, name: str, *, tokens: Numbers) -> NDArray[np.bool_]:
    """Returns the mask of the positions whose label is not _IGNORED_LABEL."""
    labels = _array_of_length(value, name, length=len(tokens))
    labelled = labels != _IGNORED_LABEL
    differing = np.flatnonzero(labelled & (labels != tokens))
    if len(differing):
        at = differing[0]
        raise UntokenizableRecordError(
            f"{name!r} has {labels[at]} at position {at}, where {tokens[at]} is the token; a label is the "
            f"token at its own position, or {_IGNORED_LABEL}"
        )
    return labelled
