"""Finds the fields of a row by the names in the settings. Dots in a name lead to nested fields."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields

ABSENT = object()
"""Value of a field that a row does not have."""

_DEEPEST = 4
# Names of roles in ShareGPT's conversations -> names that chat templates know.
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


# Kind of records -> fields with further content, as in LLaMA-Factory, Alpaca, NeMo, ms-swift and Dolly.
_CONTENT_OF_OTHERS = {
    "messages": ("system", "system_prompt", "images", "videos", "audios"),
    "completion": ("system", "input", "history", "context", "images", "videos", "audios"),
}
MEDIA = ("images", "videos", "audios")
"""Fields of large values, whose columns are not read."""


class UntokenizableRecordError(DataError):
    """Raised, with the reason, for a record that cannot be converted to tokens.

    lines: settings of [data] that fit the record
    """

    def __init__(self, reason: str, *, lines: Sequence[str] = ()) -> None:
        super().__init__(reason, fix=lines_to_write(lines) if lines else None)


@dataclass(frozen=True)
class FieldNames:
    """Names of the fields that are read from a row.

    required: fields that every row must have
    optional: fields that are used in the rows that have them
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


def used_field_names(fields: DataSourceFields) -> FieldNames:
    """Returns the names of the fields that are read from a row."""
    return {
        "messages": FieldNames(
            (fields.messages_field,), (fields.tools_field, fields.chat_template_kwargs_field)
        ),
        "completion": FieldNames((fields.prompt_field, fields.completion_field)),
        "text": FieldNames((fields.text_field,)),
        "tokens": FieldNames(
            (fields.tokens_field,),
            (fields.labels_field, fields.loss_mask_field, fields.attention_mask_field),
        ),
    }[fields.records]


def unused_content_names(fields: DataSourceFields) -> list[str]:
    """Returns names of fields that have content in the formats of other programs, and that are not read."""
    names, read = _CONTENT_OF_OTHERS.get(fields.records, ()), used_field_names(fields)
    return [name for name in names if name not in (*read.required, *read.optional)]


def look_up_field(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of the field `name` of `row`; ABSENT if the row does not have it.

    `data.text` is the field `text` within the field `data`, unless a field is named `data.text`.
    """
    if name in row:
        return row[name]
    for head, rest in _cuts_at_dots(name):
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
    for head, rest in _cuts_at_dots(name):
        if head in types and pyarrow.types.is_struct(types[head]):
            path = find_arrow_path(types[head], rest)
            if path is not None:
                return [head, *path]
    return None


def find_arrow_columns(
    schema: Any, names: FieldNames, *, where: str, first_row: Callable[[], Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Returns the path of each column to read, see `find_arrow_path`, by the name of its field.

    first_row: returns the first row with all its columns. Raises DataError if a required column is missing.
    """
    found = {name: find_arrow_path(schema, name) for name in (*names.required, *names.optional)}
    for name in names.required:
        if found[name] is None:
            raise absent_field_error(name, first_row(), where=where)
    return {name: path for name, path in found.items() if path is not None}


def absent_field_error(name: str, row: Mapping[str, Any], *, where: str) -> DataError:
    """Returns the error for `row` at `where`, which lacks the field `name`."""
    lines = suggest_settings(row)
    return DataError(
        f"there is no field {name!r} in {where}.",
        got=f"the fields {', '.join(row) or '(none)'}",
        why=None if lines else "the settings of [data] name the fields: text_field, messages_field, …",
        fix=lines_to_write(lines) if lines else "another data.records or field",
    )


def lines_to_write(lines: Sequence[str]) -> str:
    """Returns the part of an error message that shows settings of [data] to write."""
    return "\n    ".join(["these settings in [data]:", *lines])


def suggest_settings(row: Mapping[str, Any]) -> list[str]:
    """Returns lines for [data] that fit the content of `row`; none if nothing is recognized."""
    found = [(name, value) for name, value in _iterate_fields(row) if value]
    for name, value in found:
        items = cast(list[Any], value) if isinstance(value, list) else [None]
        if is_sharegpt_message(items[0]):
            return ['records = "messages"', f'messages_field = "{name}"', *sharegpt_role_lines(items)]
        if isinstance(items[0], Mapping) and {"role", "content"} <= items[0].keys():
            return ['records = "messages"', f'messages_field = "{name}"']
        if isinstance(items[0], int) and not isinstance(items[0], bool):
            return ['records = "tokens"', f'tokens_field = "{name}"']
    names = dict(found)
    pairs = [
        ("prompt", "completion"),
        ("instruction", "output"),
        ("question", "answer"),
        ("prompt", "response"),
    ]
    for prompt, completion in pairs:
        if isinstance(names.get(prompt), str) and isinstance(names.get(completion), str):
            fields = [f'prompt_field = "{prompt}"', f'completion_field = "{completion}"']
            return ['records = "completion"', *fields]
    texts = [name for name, value in found if isinstance(value, str)]
    longest = max(texts, key=lambda name: len(names[name]), default=None)
    return [] if longest is None else ['records = "text"', f'text_field = "{longest}"']


def is_sharegpt_message(message: Any) -> bool:
    """Returns True for a message with the fields of ShareGPT."""
    return isinstance(message, Mapping) and {"from", "value"} <= message.keys()


def role_names(messages: Sequence[Any], role_field: str) -> list[str]:
    """Returns the roles of `messages`, those that are text."""
    found = [cast(Any, one).get(role_field) for one in messages if isinstance(one, Mapping)]
    return [role for role in found if isinstance(role, str)]


def sharegpt_role_lines(messages: Sequence[Any], *, role_field: str = "from") -> list[str]:
    """Returns lines for [data] that rename the fields and roles of ShareGPT's `messages`."""
    there = {"human", "gpt", *role_names(messages, role_field)}
    roles = ", ".join(f'{name} = "{role}"' for name, role in _SHAREGPT_ROLES.items() if name in there)
    return [f'role_field = "{role_field}"', 'content_field = "value"', f"roles = {{ {roles} }}"]


def _cuts_at_dots(name: str) -> Iterator[tuple[str, str]]:
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
