"""Reads conversations from rows in the form that chat templates take.

[Note: arguments of tool calls]
OpenAI's API gives the arguments of a tool call as JSON text. Most chat templates take a mapping instead: they
write `arguments | tojson`, or iterate over it. So the arguments become mappings here, and text again for a
template that needs text, see `Conversation.with_text_arguments`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from fullshard.data.row_fields import (
    ABSENT,
    SHAREGPT_LINES,
    UntokenizableRecordError,
    is_message_trained,
    is_sharegpt_message,
    look_up_field,
)
from fullshard.spec.settings.data_section import DataSourceFields
from fullshard.system.small_files import parse_json

Message = Mapping[str, Any]

# Fields of a message that may stand in place of its content.
_INSTEAD_OF_CONTENT = frozenset(
    {"tool_calls", "function_call", "tool_responses", "reasoning_content", "reasoning", "thinking"}
)


@dataclass(frozen=True)
class Conversation:
    """A conversation for a chat template.

    messages: messages with `role`, and `content` or tool calls
    tools: definitions of the tools that the assistant may call; None without tools
    template_kwargs: further variables of the template
    untrained: indexes of the messages that their own fields exclude from training
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    untrained: frozenset[int] = frozenset()

    def tool_arguments(self) -> Iterator[Any]:
        for message in self.messages:
            for call in message.get("tool_calls", ()):
                yield function_of_call(call).get("arguments")

    def with_text_arguments(self) -> "Conversation":
        """Returns the conversation with the arguments of tool calls as JSON text."""
        encode = partial(json.dumps, ensure_ascii=False)
        messages = [
            {**message, "tool_calls": [_convert_arguments(call, encode) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in self.messages
        ]
        return replace(self, messages=messages)

    def text_part_lists(self) -> Iterator[list[Any]]:
        """Yields each content that is a list of parts, all of which are text."""
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list) and None not in map(_text_of_part, cast(list[Any], content)):
                yield content

    def with_text_contents(self) -> "Conversation":
        """Returns the conversation with each content of text parts as one text."""
        lists = list(self.text_part_lists())
        messages = [
            {**message, "content": "".join(_text_of_part(part) or "" for part in message["content"])}
            if any(message.get("content") is one for one in lists)
            else message
            for message in self.messages
        ]
        return replace(self, messages=messages)


def read_conversation(
    row: Mapping[str, Any], messages: Any, *, fields: DataSourceFields, train_on: str = "all"
) -> Conversation:
    """Returns the conversation of `row`, whose field of messages is `messages`.

    Messages in the row's `completion_field` follow, unless `messages` already end with them. Those before
    them are untrained, unless `train_on` is "all".

    Raises UntokenizableRecordError for a field that cannot be part of a conversation.
    """
    rows = _decode_if_json_text(messages, "the messages")
    if not isinstance(rows, list) or not rows:
        raise UntokenizableRecordError(f"no list of messages, but {_type_name(rows)}")
    found = _look_up_optional(row, fields.completion_field)
    answers = cast(list[Any], found) if isinstance(found, list) else []
    rows = cast(list[Any], rows) + (answers if rows[-len(answers) :] != answers else [])
    prompt_length = len(rows) - len(answers) if answers and train_on != "all" else 0
    _check_sharegpt_names_are_mapped(rows, fields)
    kwargs = _decode_if_json_text(_look_up_optional(row, "chat_template_kwargs"), "chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise UntokenizableRecordError(f"chat_template_kwargs is not an object, but {_type_name(kwargs)}")
    tools = _look_up_optional(row, "tools")
    read = [_read_message(one, i, fields=fields) for i, one in enumerate(rows, start=1)]
    return Conversation(
        read,
        tools=_read_list_of_objects(tools, "tools") or None if tools else None,  # may be null, [] or ""
        template_kwargs={**fields.chat_template_kwargs, **cast(Mapping[str, Any], kwargs or {})},
        untrained=frozenset(
            i
            for i, one in enumerate(read)
            if not is_message_trained(one, f"message {i + 1}") or i < prompt_length
        ),
    )


def drop_null_members(value: Any) -> Any:
    """Returns `value` without the members of structs that are null; pairs of an Arrow map become a dict.

    Arrow has one schema for all structs of a column, so that a member which is absent in the source is null.
    """
    if isinstance(value, dict):
        members = cast(dict[str, Any], value).items()
        return {name: drop_null_members(inner) for name, inner in members if inner is not None}
    if isinstance(value, list):
        items = cast(list[Any], value)
        if items and all(isinstance(item, tuple) for item in items):
            return drop_null_members(dict(items))
        return [drop_null_members(item) for item in items]
    return value


def _check_sharegpt_names_are_mapped(messages: Sequence[Any], fields: DataSourceFields) -> None:
    """Raises UntokenizableRecordError for names of ShareGPT that the settings do not map."""
    if fields.role_field == "role" and is_sharegpt_message(messages[0]):
        fields_there = ", ".join(messages[0])
        raise UntokenizableRecordError(
            f"messages with the fields {fields_there}, as in ShareGPT", lines=SHAREGPT_LINES
        )
    for message in messages:
        role = message.get(fields.role_field) if isinstance(message, dict) else None
        if role in ("human", "gpt") and role not in fields.roles:
            raise UntokenizableRecordError(
                f"a message with the role {role!r}, as in ShareGPT", lines=SHAREGPT_LINES[-1:]
            )


def _read_message(value: Any, number: int, *, fields: DataSourceFields) -> Message:
    """Returns the message `value`, the `number`-th of its conversation, with `role` and `content`."""
    if not isinstance(value, Mapping):
        raise UntokenizableRecordError(f"message {number} is not a table of role and content")
    message = {name: one for name, one in cast(Message, value).items() if one is not None}
    there = ", ".join(message) or "nothing"
    role, content = (message.pop(name, None) for name in (fields.role_field, fields.content_field))
    if not isinstance(role, str):
        raise UntokenizableRecordError(f"message {number} has no {fields.role_field!r}, but {there}")
    if content is None and not _INSTEAD_OF_CONTENT & message.keys():
        raise UntokenizableRecordError(f"message {number} has no {fields.content_field!r}, but {there}")
    if not isinstance(content, str | list | None):
        raise UntokenizableRecordError(f"message {number} has a content of {type(content).__name__}")
    for part in cast(list[Any], content) if isinstance(content, list) else []:
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if any(medium in kind for medium in ("image", "audio", "video", "file")):
            raise UntokenizableRecordError(f"message {number} has a part of type {kind!r}, which is not text")
    message["role"] = fields.roles.get(role, role)
    if content is not None:
        message["content"] = content
    if "tool_calls" in message:
        message["tool_calls"] = _read_tool_calls(message["tool_calls"], f"tool_calls of message {number}")
    return message


def _read_tool_calls(value: Any, what: str) -> list[Mapping[str, Any]]:
    calls = _read_list_of_objects(value, what)
    for call in calls:
        if not isinstance(function_of_call(call).get("name"), str):
            raise UntokenizableRecordError(f"{what} have a call without a name")
    return [_convert_arguments(call, lambda value: _decode_arguments(value, what)) for call in calls]


def _read_list_of_objects(value: Any, what: str) -> list[Mapping[str, Any]]:
    """Returns a list of objects. The list, or each object, may be JSON text."""
    items = _decode_if_json_text(value, what)
    if isinstance(items, list):
        items = [_decode_if_json_text(item, what) for item in cast(list[Any], items)]
        if all(isinstance(item, Mapping) for item in items):
            return items
    raise UntokenizableRecordError(f"{what} are not a list of objects, but {_type_name(items)}")


def _text_of_part(part: Any) -> str | None:
    """Returns the text of a part of a content; None for a part that is not text."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
    return text if isinstance(text, str) else None


def function_of_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a tool call that has its name and arguments: `function`, or the call itself."""
    function = call.get("function")
    return cast(Mapping[str, Any], function) if isinstance(function, Mapping) else call


def _convert_arguments(call: Mapping[str, Any], convert: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Returns the tool call with `convert` applied to its arguments."""
    function = function_of_call(call)
    converted = {**function, "arguments": convert(function.get("arguments"))}
    return converted if function is call else {**call, "function": converted}


def _decode_arguments(value: Any, what: str) -> Mapping[str, Any]:
    """Returns the arguments of a tool call as a mapping; they may be JSON text, empty or null."""
    arguments = _decode_if_json_text(value or {}, what)
    if isinstance(arguments, Mapping):
        return cast(Mapping[str, Any], arguments)
    raise UntokenizableRecordError(
        f"{what} have arguments that are not an object, but {_type_name(arguments)}"
    )


def _decode_if_json_text(value: Any, what: str) -> Any:
    """Returns `value`, decoded if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise UntokenizableRecordError(f"{what} are text that is not JSON: {error}") from error


def _look_up_optional(row: Mapping[str, Any], name: str) -> Any:
    found = look_up_field(row, name)
    return None if found is ABSENT else found


def _type_name(value: Any) -> str:
    return "nothing" if value is None or value == [] else type(value).__name__
