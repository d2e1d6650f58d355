"""Finds the fields of a row by name, and reads the marks beside its tokens.

Dots in a name lead to nested fields.

[Note: marks]
A row may have more than its text: flags of messages that are context only, positions that begin again in a
packed row. Such a mark is used where the kind of record allows it. Otherwise, a row whose mark excludes or
separates something is an error, and its field has to be removed if it means something else. A mark that
excludes nothing is ignored. The names are those of OpenAI, Mistral, axolotl, torchtune, TRL, LLaMA-Factory,
ms-swift, xtuner, NeMo, MaxText, open-instruct, and the tokenizers and collators of transformers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product, takewhile
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.quantities import join_names
from fullshard.spec.settings.data_section import IGNORED_LABEL, DataSourceFields
from fullshard.system.small_files import parse_json

ABSENT = object()
"""Value of a field that a row does not have."""

TOKEN_LIMIT = 1 << 32
"""Number of different tokens that a token store can hold."""

Numbers = NDArray[Any]

SHAREGPT_LINES = (
    'role_field = "from"',
    'content_field = "value"',
    'roles = { human = "user", gpt = "assistant", observation = "tool", function_call = "assistant" }',
)
"""Settings of [data] that rename the fields and roles of ShareGPT's messages."""

_DEEPEST = 4
_MEDIA = ("images", "videos", "audios")  # large values, whose columns are not read
_ANSWERS = ("completion", "response", "chosen", "rejected", "answer", "output")
# Kind of records -> fields with further content, as in TRL, LLaMA-Factory, Alpaca, NeMo, ms-swift and Dolly.
_CONTENT_OF_OTHERS = {
    "messages": ("system", "system_prompt", "prompt", "messages", "conversations", *_MEDIA, *_ANSWERS),
    "completion": ("system", "input", "history", "context", *_MEDIA, *_ANSWERS),
}

# Masks of a row's tokens, where 0 excludes a token. 1 does in a prompt_mask.
_LOSS_MASKS = (
    *("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "response_mask"),
    *("label_mask", "labels_mask", "loss_weights", "token_weights"),
)
_POSITIONS = ("position_ids", "input_pos", "positions")  # of each token in its document
# Number of each token's document; places where documents begin, and the end; lengths of documents.
_DOCUMENT_IDS = ("seq_idx", "sequence_ids", "document_ids", "doc_ids", "segment_ids", "inputs_segmentation")
_DOCUMENT_BEGINS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q", "seq_start_id")
_DOCUMENT_LENGTHS = ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths")
_TRAINED_IF_TRUE = ("train", "training", "trainable", "is_trainable", "do_train", "train_on")
_TRAINED_IF_ONE = ("weight", "loss_weight", "sample_weight", *_TRAINED_IF_TRUE)
_TRAINED_IF_ZERO = ("masked", "is_masked", "ignore_loss", "skip_loss")
# A mask of 1 includes in some programs, and excludes in others.
_UNCLEAR = ("mask", "train_detail", "training_detail")


# Field of a row -> whether its numbers exclude and separate nothing.
_EXCLUDES_NOTHING: dict[str, Callable[[Numbers], bool]] = {
    "labels": lambda numbers: IGNORED_LABEL not in numbers,
    **dict.fromkeys((*_TRAINED_IF_ONE, *_LOSS_MASKS, "attention_mask"), lambda mask: bool((mask == 1).all())),
    **dict.fromkeys((*_TRAINED_IF_ZERO, "prompt_mask", "special_tokens_mask"), lambda mask: not mask.any()),
    **dict.fromkeys((*_DOCUMENT_IDS, "token_type_ids"), lambda ids: bool((ids == ids[:1]).all())),
    **dict.fromkeys(_POSITIONS[:2], lambda numbers: np.array_equal(numbers, np.arange(len(numbers)))),
    **dict.fromkeys(_DOCUMENT_BEGINS, lambda numbers: len(numbers) < 3),
    **dict.fromkeys(_DOCUMENT_LENGTHS, lambda numbers: len(numbers) < 2),
    **dict.fromkeys(_UNCLEAR, lambda numbers: not len(numbers)),
}
_SINGLE = {*_TRAINED_IF_ONE, *_TRAINED_IF_ZERO, *_UNCLEAR}  # may be one number for the row; others are lists
# Marks of a row of tokens that are used. Positions are counted without padding, so the mask comes first.
_USED = ("attention_mask", "labels", *_LOSS_MASKS, "prompt_mask", *_POSITIONS)


class UntokenizableRecordError(DataError):
    """Raised, with the reason, for a record that cannot be converted to tokens.

    lines: settings of [data] that fit the record
    """

    def __init__(self, reason: str, *, lines: Sequence[str] = ()) -> None:
        super().__init__(reason, fix=_suggested_settings_text(lines) if lines else None)


def required_field_names(fields: DataSourceFields) -> tuple[str, ...]:
    """Returns the names of the fields that every row must have, the main one first."""
    return {
        "messages": (fields.messages_field,),
        "completion": (fields.prompt_field, fields.completion_field),
        "text": (fields.text_field,),
        "tokens": (fields.tokens_field,),
    }[fields.records]


def list_unread_content_fields(fields: DataSourceFields) -> list[str]:
    """Returns names of fields that may have content which is not read, as other programs name them."""
    read, names = required_field_names(fields), _CONTENT_OF_OTHERS.get(fields.records, ())
    possible = [one for name in names for one in _name_and_sibling_of_main_field(name, read[0])]
    possible += [fields.completion_field] if names else []  # which may be no list of messages
    return [name for name in dict.fromkeys(possible) if name not in (*read, fields.rejected_field)]


def split_pair(row: Mapping[str, Any], fields: DataSourceFields) -> list[dict[str, Any]]:
    """Returns two rows like `row`, with the chosen and with the rejected answer in `completion_field`.

    See `DataSourceFields.rejected_field`. Raises UntokenizableRecordError unless two answers follow a prompt.
    """
    answer, rejected_name = fields.completion_field, fields.rejected_field
    assert rejected_name is not None, "only pairs are split"
    main = required_field_names(fields)[0]
    found = [look_up_field(row, name) for name in (main, answer, rejected_name)]
    if fields.records == "messages":
        found = [_decode_messages(one, fields) for one in found]
        for i in (1, 2):
            if found[i] and isinstance(found[i], str):
                found[i] = [{fields.role_field: "assistant", fields.content_field: found[i]}]
    prompt, chosen, rejected = found
    if chosen is ABSENT and isinstance(prompt, str | list) and type(prompt) is type(rejected):
        alike = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(prompt, rejected, strict=False)))
        prompt, chosen, rejected = prompt[:alike], prompt[alike:], rejected[alike:]
    are_alike = isinstance(chosen, str | list) and type(chosen) is type(rejected)
    if not (chosen and rejected and are_alike) or chosen == rejected:
        raise UntokenizableRecordError(f"{answer!r} and {rejected_name!r} are not two different answers")
    if isinstance(prompt, list) and any(prompt[-len(one) :] == one for one in (chosen, rejected)):
        raise UntokenizableRecordError(f"{main!r} ends with the answer of {answer!r} or {rejected_name!r}")
    return [{**row, main: prompt, answer: one} for one in (chosen, rejected)]


def _decode_messages(value: Any, fields: DataSourceFields) -> Any:
    """Returns a list for one message, as in axolotl, and for JSON text of messages; else `value`."""
    with suppress(ValueError):
        items: Any = parse_json(value) if isinstance(value, str) else None
        if isinstance(items, list) and all(isinstance(i, dict) and fields.role_field in i for i in items):
            return items
    return [value] if isinstance(value, dict) else value


def look_up_field(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of the field `name` of `row`; ABSENT if the row does not have it.

    `data.text` is the field `text` within the field `data`, unless a field is named `data.text`.
    """
    if name in row:
        return row[name]
    for head, rest in _iterate_splits_at_dots(name):
        inner = row.get(head)
        if isinstance(inner, Mapping):
            found = look_up_field(cast(Mapping[str, Any], inner), rest)
            if found is not ABSENT:
                return found
    return ABSENT


def find_arrow_path(fields: Any, name: str) -> list[str] | None:
    """Returns the names that lead to a column; None if there is none.

    fields: a pyarrow schema or struct type
    name: name of the column, with dots as in `look_up_field`
    """
    import pyarrow

    types: dict[str, Any] = {field.name: field.type for field in fields}
    if name in types:
        return [name]
    for head, rest in _iterate_splits_at_dots(name):
        if head in types and pyarrow.types.is_struct(types[head]):
            path = find_arrow_path(types[head], rest)
            if path is not None:
                return [head, *path]
    return None


def find_arrow_columns_to_read(
    schema: Any, fields: DataSourceFields, *, where: str, first_row: Callable[[], Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Returns the path of each column to read, see `find_arrow_path`, by the name of its field.

    These are the fields that are used, and those that are checked. Raises DataError, with the names in
    `first_row`, if a required column is missing.
    """
    required = required_field_names(fields)
    if fields.rejected_field is not None:  # see `split_pair`
        required = (required[0], fields.rejected_field)
    has_messages = fields.records == "messages"
    optional = ("tools", "chat_template_kwargs") if has_messages else ()
    optional += (fields.completion_field,) if has_messages or fields.rejected_field else ()
    marks = [
        beside
        for name in ("loss", *_EXCLUDES_NOTHING, *_USED)
        for beside in _name_and_sibling_of_main_field(name, required[0])
    ]
    others = {*marks, *list_unread_content_fields(fields), *optional}
    found = {name: find_arrow_path(schema, name) for name in (*required, *(others - {*_MEDIA, *required}))}
    for name in required:
        if found[name] is None:
            raise absent_field_error(name, first_row(), where=where)
    return {name: path for name, path in found.items() if path is not None}


def absent_field_error(name: str, row: Mapping[str, Any], *, where: str) -> DataError:
    lines = suggest_settings(row)
    return DataError(
        f"there is no field {name!r} in {where}.",
        got=f"the fields {join_names([*row], most=20) or '(none)'}",
        why=None if lines else "the settings of [data] name the fields: text_field, messages_field, …",
        fix=_suggested_settings_text(lines) if lines else "another data.records or field",
    )


def _suggested_settings_text(lines: Sequence[str]) -> str:
    """Returns the part of an error message that shows settings of [data] to write."""
    return "\n    ".join(["these settings in [data]:", *lines])


def suggest_settings(row: Mapping[str, Any]) -> list[str]:
    """Returns lines for [data] that fit the content of `row`; none if nothing is recognized."""
    found = [(name, value) for name, value in _iterate_fields(row) if value]
    lists = {name for name, value in found if isinstance(value, list)}
    answer = next((one for one in _ANSWERS if {"prompt", one} <= lists), None)
    for name, value in sorted(found, key=lambda one: answer is None or one[0] != "prompt"):
        items = cast(list[Any], value) if isinstance(value, list) else [None]
        lines = ['records = "messages"', f'messages_field = "{name}"']
        lines += [f'completion_field = "{answer}"'] if answer not in (None, "completion") else []
        if is_sharegpt_message(items[0]):
            return [*lines, *SHAREGPT_LINES]
        if isinstance(items[0], Mapping) and {"role", "content"} <= items[0].keys():
            return lines
        if isinstance(items[0], int) and not isinstance(items[0], bool):
            return ['records = "tokens"', f'tokens_field = "{name}"']
    names = dict(found)
    for prompt, completion in product(("prompt", "instruction", "question"), _ANSWERS):
        if isinstance(names.get(prompt), str) and isinstance(names.get(completion), str):
            fields = [f'prompt_field = "{prompt}"', f'completion_field = "{completion}"']
            return ['records = "completion"', *fields]
    texts = [name for name, value in found if isinstance(value, str)]
    longest = max(texts, key=lambda name: len(names[name]), default=None)
    return [] if longest is None else ['records = "text"', f'text_field = "{longest}"']


def is_sharegpt_message(message: Any) -> bool:
    return isinstance(message, Mapping) and {"from", "value"} <= message.keys()


def _iterate_splits_at_dots(name: str) -> Iterator[tuple[str, str]]:
    """Yields (name before a dot, name after it) for each dot, from the last to the first."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:i]), ".".join(parts[i:])


def _iterate_fields(row: Mapping[str, Any], prefix: str = "", *, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of the fields of `row`, those of nested fields after all others."""
    for name, value in row.items():
        yield f"{prefix}{name}", value
    for name, value in row.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            inner = cast(Mapping[str, Any], value)
            yield from _iterate_fields(inner, f"{prefix}{name}.", depth=depth + 1)


def _name_and_sibling_of_main_field(name: str, main_field: str) -> list[str]:
    """Returns `name`, and for a nested `main_field` also the dotted name of the field `name` beside it."""
    parent, dot, _ = main_field.rpartition(".")
    return [name, f"{parent}.{name}"] if dot else [name]


def check_exclusions_are_used(row: Mapping[str, Any], main_field: str, *, used: Collection[str] = ()) -> None:
    """Raises UntokenizableRecordError for marks of `row`, not in `used`, that exclude or separate something.

    main_field: name of the field with the row's text, messages or tokens
    """
    parent = main_field.rpartition(".")[0]
    inner = look_up_field(row, parent) if parent else None
    for beside in (row, inner):
        for key, value in cast(Mapping[str, Any], beside if isinstance(beside, Mapping) else {}).items():
            name = key.removeprefix(f"{parent}.")
            if name in used or key == main_field or value is None:
                continue
            numbers = (
                _numbers_or_none(value, accepts_number=name in _SINGLE) if name in _EXCLUDES_NOTHING else None
            )
            excludes = numbers is not None and not _EXCLUDES_NOTHING[name](numbers)
            # A number is a measured loss; NeMo's mask is the name of a role.
            if excludes or (name == "loss" and value is False) or (name == "mask" and isinstance(value, str)):
                raise _unused_mark_error(repr(key), value)


def is_message_trained(message: Mapping[str, Any], what: str) -> bool:
    """Returns False for a message that one of its own fields excludes from training.

    Raises UntokenizableRecordError for a weight other than 0 and 1, and for a mark of unclear meaning.
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


def true_train_flag_names(message: Mapping[str, Any]) -> list[str]:
    """Returns the names of the flags by which a message asks to be trained on."""
    return [name for name in _TRAINED_IF_TRUE if message.get(name) is True]


def _numbers_or_none(value: Any, *, accepts_number: bool) -> Numbers | None:
    """Returns a number or a list of numbers as an array; None for other values."""
    is_single = accepts_number and isinstance(value, bool | int | float)
    try:
        return _one_dim_array([value] if is_single else value, "")
    except UntokenizableRecordError:
        return None


def _unused_mark_error(name: str, value: Any) -> UntokenizableRecordError:
    return UntokenizableRecordError(
        f"{name} is {value!r:.40}, which in other programs excludes or separates parts, and is not "
        "used here; remove the field if it means something else (rows of tokens may have a loss_mask, an "
        "attention_mask, and position_ids, which begin at 0 in each document)"
    )


def read_token_row(
    row: Mapping[str, Any], tokens: Any, *, tokens_field: str, vocabulary_size: int
) -> tuple[Numbers, NDArray[np.bool_], list[int]]:
    """Returns (tokens of `row` without padding, mask of the trained tokens, index behind each document).

    tokens: value of the field `tokens_field`, a list or an array of integers
    vocabulary_size: largest valid token, plus one

    Raises UntokenizableRecordError for tokens outside of the vocabulary; for labels, masks or positions that
    do not fit the tokens; and for marks that cannot be used. See [Note: marks].
    """
    found = _one_dim_array(tokens, tokens_field)
    if found.size and found.dtype.kind not in "iu":
        raise UntokenizableRecordError(f"{tokens_field!r} holds {found.dtype}, not integers")
    trained, padding, begins = np.ones(len(found), np.bool_), *np.zeros((2, len(found)), np.bool_)
    for mark, name in [
        (one, beside) for one in _USED for beside in _name_and_sibling_of_main_field(one, tokens_field)
    ]:
        value = look_up_field(row, name)
        if value is ABSENT or value is None:
            continue
        numbers = _one_dim_array(value, name)
        if len(numbers) != len(found):
            raise UntokenizableRecordError(f"{name!r} has {len(numbers)} values for {len(found)} tokens")
        if mark == "labels":
            trained &= _labelled_positions(numbers, name, tokens=found)
        elif mark in _POSITIONS:
            begins |= _document_begin_mask_from_positions(numbers, name, padding=padding)
        else:
            mask = _bool_mask_of_zeros_and_ones(numbers, name)
            if mark == "attention_mask":
                padding |= ~mask
            else:
                trained &= mask != (mark == "prompt_mask")
    check_exclusions_are_used(row, tokens_field, used=_USED)
    found, trained, begins = found[~padding], trained[~padding], begins[~padding]
    if found.size and not 0 <= (wrong := found.max() if found.min() >= 0 else found.min()) < vocabulary_size:
        raise UntokenizableRecordError(
            f"{tokens_field!r} has the token {wrong}; the vocabulary has {vocabulary_size}"
        )
    return found, trained, [*(np.flatnonzero(begins[1:]) + 1).tolist(), len(found)]


def _document_begin_mask_from_positions(
    numbers: Numbers, name: str, *, padding: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Returns the mask of the tokens at position 0, with which a document begins."""
    own, places = numbers[~padding], np.arange(np.count_nonzero(~padding))
    if not np.array_equal(own, places - np.maximum.accumulate(np.where(own == 0, places, 0))):
        raise UntokenizableRecordError(f"{name!r} does not count from 0 in each document")
    return (numbers == 0) & ~padding


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


def _bool_mask_of_zeros_and_ones(mask: Numbers, name: str) -> NDArray[np.bool_]:
    if not (valid := np.isin(mask, (0, 1))).all():
        raise UntokenizableRecordError(f"{name!r} has other values than 0 and 1, such as {mask[~valid][0]}")
    return mask != 0


def _labelled_positions(labels: Numbers, name: str, *, tokens: Numbers) -> NDArray[np.bool_]:
    """Returns the mask of the positions that have a label, which must be the token at the position.

    Raises UntokenizableRecordError for another label, unless it is IGNORED_LABEL.
    """
    labelled = labels != IGNORED_LABEL
    differing = np.flatnonzero(labelled & (labels != tokens))
    if len(differing):
        at = differing[0]
        raise UntokenizableRecordError(
            f"{name!r} has {labels[at]} at position {at}, where {tokens[at]} is the token; a label is the "
            f"token at its own position, or {IGNORED_LABEL}"
        )
    return labelled
