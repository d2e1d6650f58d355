"""Fields with which other programs exclude tokens, messages or rows from training, or separate documents.

[Note: marks]
A row may have more than its text: flags of messages that are context only, positions that begin again in a
packed row. Such a mark is used where the kind of record allows it. Otherwise, a row whose mark excludes or
separates something is an error, and its field has to be removed if it means something else. A mark that
excludes nothing is ignored. The names are those of OpenAI, Mistral, axolotl, torchtune, TRL, LLaMA-Factory,
ms-swift, xtuner, NeMo, MaxText, open-instruct, and the tokenizers and collators of transformers.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data.row_fields import UntokenizableRecordError, look_up_field

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

_Numbers = NDArray[Any]


def _all_equal(numbers: _Numbers) -> bool:
    return bool((numbers == numbers[:1]).all())


# Field of a row -> whether its numbers exclude and separate nothing.
_EXCLUDES_NOTHING: dict[str, Callable[[_Numbers], bool]] = {
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


def _numbers_of(value: Any, *, single: bool) -> _Numbers | None:
    """Returns a number or a list of numbers as an array; None for other values. `single`: allows a number."""
    if not isinstance(value, bool | int | float | list | np.ndarray):
        return None
    try:
        array: _Numbers = np.asarray(value)  # pyright: ignore[reportUnknownArgumentType]
    except ValueError:  # lists of different lengths
        return None
    array = array[None] if single and array.ndim == 0 else array
    return array if array.ndim == 1 and (array.dtype.kind in "iufb" or not array.size) else None


def _unused_mark_error(name: str, value: Any) -> UntokenizableRecordError:
    return UntokenizableRecordError(
        f"{name} is {value!r:.40}, which in other programs excludes or separates parts, and is not "
        "used here; remove the field if it means something else"
    )
