"""Reads rows of tokens that another program made: lists of numbers, and masks of the same length.

[Note: marks]
A row may have more than its text: flags of messages that are context only, positions that begin again in a
packed row. Such a mark is used where the kind of record allows it. Otherwise, a row whose mark excludes or
separates something is an error, and its field has to be removed if it means something else. A mark that
excludes nothing is ignored. The names are those of OpenAI, Mistral, axolotl, torchtune, TRL, LLaMA-Factory,
ms-swift, xtuner, NeMo, MaxText, open-instruct, and the tokenizers and collators of transformers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data.row_fields import ABSENT, UntokenizableRecordError, look_up_field
from fullshard.spec.settings.data_section import DataSourceFields

TOKEN_LIMIT = 1 << 32
"""Number of different tokens that a token store can hold."""

Numbers = NDArray[Any]

IGNORED_LABEL = -100

LOSS_MASKS = (
    "loss_mask",
    "completion_mask",
    "assistant_masks",
    "assistant_mask",
    "response_mask",
    "label_mask",
    "labels_mask",
    "loss_weights",
    "token_weights",
)
"""Masks of a row's tokens. 0 excludes a token."""

PROMPT_MASK = "prompt_mask"
"""Mask of a row's tokens. 1 excludes a token."""

POSITIONS = ("position_ids", "input_pos", "positions")
"""Position of each token in its document."""

DOCUMENT_NUMBERS = (
    "seq_idx",
    "sequence_ids",
    "document_ids",
    "doc_ids",
    "segment_ids",
    "inputs_segmentation",
)
"""Number of each token's document."""

DOCUMENT_BEGINS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q", "seq_start_id")
"""Index of each document's first token, and of the end of the last document."""

DOCUMENT_LENGTHS = ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths")
"""Number of tokens of each document."""

_TRAINED_IF_ONE = (
    "weight",
    "loss_weight",
    "sample_weight",
    "train",
    "training",
    "trainable",
    "is_trainable",
    "do_train",
    "train_on",
)
_TRAINED_IF_ZERO = ("masked", "is_masked", "ignore_loss", "skip_loss")
_UNCLEAR = (
    "mask",
    "train_detail",
    "training_detail",
)  # a mask of 1 includes in some programs, and excludes in others


def _all_equal(numbers: Numbers) -> bool:
    return bool((numbers == numbers[:1]).all())


# Field of a row -> whether its numbers exclude and separate nothing.
_EXCLUDES_NOTHING: dict[str, Callable[[Numbers], bool]] = {
    "labels": lambda numbers: IGNORED_LABEL not in numbers,
    **dict.fromkeys(
        (*_TRAINED_IF_ONE, *LOSS_MASKS, "attention_mask"), lambda numbers: bool((numbers == 1).all())
    ),
    **dict.fromkeys(
        (*_TRAINED_IF_ZERO, PROMPT_MASK, "special_tokens_mask"), lambda numbers: not numbers.any()
    ),
    **dict.fromkeys((*DOCUMENT_NUMBERS, "token_type_ids"), _all_equal),
    **dict.fromkeys(POSITIONS[:2], lambda numbers: np.array_equal(numbers, np.arange(len(numbers)))),
    **dict.fromkeys(DOCUMENT_BEGINS, lambda numbers: len(numbers) < 3),
    **dict.fromkeys(DOCUMENT_LENGTHS, lambda numbers: len(numbers) < 2),
    **dict.fromkeys(_UNCLEAR, lambda numbers: not len(numbers)),
}
_SINGLE = {*_TRAINED_IF_ONE, *_TRAINED_IF_ZERO, *_UNCLEAR}  # of a whole row; a number in another is no mark


def mark_names(main_field: str) -> list[str]:
    """Returns the names of all marks that a row may have, see `names_beside`."""
    names = ("loss", *_EXCLUDES_NOTHING, *POSITIONS[2:])
    return [beside for name in names for beside in names_beside(name, main_field)]


def names_beside(name: str, main_field: str) -> list[str]:
    """Returns `name`, and the dotted name of such a field beside `main_field` if that is nested."""
    parent, dot, _ = main_field.rpartition(".")
    return [name, f"{parent}.{name}"] if dot else [name]


def check_unused_marks(row: Mapping[str, Any], main_field: str, *, used: Collection[str] = ()) -> None:
    """Raises UntokenizableRecordError for a mark of `row`, except those in `used`, that excludes something.

    main_field: name of the field with the row's text, messages or tokens
    """
    parent = main_field.rpartition(".")[0]
    inner = look_up_field(row, parent) if parent else None
    for beside in (row, inner):
        for key, value in cast(Mapping[str, Any], beside if isinstance(beside, Mapping) else {}).items():
            name = key.removeprefix(f"{parent}.")
            if name in used or key == main_field or value is None:
                continue
            numbers = _numbers_of(value, single=name in _SINGLE) if name in _EXCLUDES_NOTHING else None
            excludes = numbers is not None and not _EXCLUDES_NOTHING[name](numbers)
            # A number is a measured loss; NeMo's mask is the name of a role.
            if excludes or (name == "loss" and value is False) or (name == "mask" and isinstance(value, str)):
                raise _unused_mark_error(repr(key), value)


def is_message_trained(message: Mapping[str, Any], what: str) -> bool:
    """Returns False for a message that one of its own fields excludes from training.

    Raises UntokenizableRecordError for a weight other than 0 and 1, and for a mark that is not used.
    """
    trained = True
    for names, included in (((*_TRAINED_IF_ONE, "loss", "loss_mask"), 1), (_TRAINED_IF_ZERO, 0)):
        for name in names:
            value = message.get(name, included)
            if value not in (0, 1):
                raise UntokenizableRecordError(f"{name!r} of {what} is {value!r:.40}; 0 and 1 are used")
            trained &= value == included
    for name in _UNCLEAR:
        if name in message and message[name] != []:
            raise _unused_mark_error(f"{name!r} of {what}", message[name])
    return trained


def _numbers_of(value: Any, *, single: bool) -> Numbers | None:
    """Returns a number or a list of numbers as an array; None for other values. `single`: allows a number."""
    if not isinstance(value, bool | int | float | list | np.ndarray):
        return None
    try:
        array: Numbers = np.asarray(value)  # pyright: ignore[reportUnknownArgumentType]
    except ValueError:  # lists of different lengths
        return None
    array = array[None] if single and array.ndim == 0 else array
    return array if array.ndim == 1 and (array.dtype.kind in "iufb" or not array.size) else None


def _unused_mark_error(name: str, value: Any) -> UntokenizableRecordError:
    return UntokenizableRecordError(
        f"{name} is {value!r:.40}, which in other programs excludes or separates parts, and is not "
        "used here; remove the field if it means something else"
    )


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
