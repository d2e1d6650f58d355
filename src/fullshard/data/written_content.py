"""Finds content of a conversation that the chat template does not write.

[Note: marked content]
A template may leave out tool calls, reasoning, or a second system message, without an error. So each piece of
content gets characters that no text has, and the conversation is rendered again: what the template writes has
them. Templates trim, move and escape content, so that looking for the content itself would not do.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, cast

from fullshard.data.conversation import Conversation, Message, function_of_call

_FIRST_MARKER = 0xF0000  # of private use, with 65,533 characters behind it
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "thinking", "name")
_OTHER_FIELDS = ("function_call", "tool_responses")
_NO_CONTENT = ("type", "id", "tool_call_id", "index")  # members that templates may leave out


@dataclass(frozen=True)
class Content:
    """A piece of content with its markers.

    message: index of the message; None for the definitions of tools
    """

    message: int | None
    field: str
    markers: tuple[str, ...]

    def is_written(self, text: str) -> bool:
        """Returns whether all markers are in `text`, perhaps as JSON escapes."""
        return all(one in text or json.dumps(one)[1:-1] in text for one in self.markers)


def mark_content(conversation: Conversation) -> tuple[Conversation, list[Content]]:
    """Returns (conversation with markers in its content, the pieces of content that are not blank)."""
    writer = _MarkerWriter()
    messages = [writer.mark_message(one, i) for i, one in enumerate(conversation.messages)]
    tools = conversation.tools and [writer.mark_call(tool, None) for tool in conversation.tools]
    return replace(conversation, messages=messages, tools=tools), writer.found


class _MarkerWriter:
    """Writes markers into content. Each is used once.

    found: pieces of content with their markers
    """

    def __init__(self) -> None:
        self._markers = map(chr, count(_FIRST_MARKER))
        self.found: list[Content] = []

    def mark_message(self, message: Message, i: int) -> Message:
        """Returns message `i` with markers in its content."""
        marked = dict(message)
        for name in _TEXT_FIELDS:
            value = message.get(name)
            if name == "name" and message["role"] == "tool":  # the call has it, too
                continue
            if isinstance(value, str) and value.strip():
                marked[name] = self._mark_both_ends(value, Content(i, name, self._next_markers(2)))
            elif isinstance(value, list):
                parts = [(part, Content(i, name, self._next_markers(1))) for part in cast(list[Any], value)]
                marked[name] = [self._mark_leaves_of(part, content) for part, content in parts]
        for name in _OTHER_FIELDS:
            if message.get(name):
                marked[name] = self._mark_leaves_of(message[name], Content(i, name, self._next_markers(1)))
        if "tool_calls" in message:
            marked["tool_calls"] = [self.mark_call(call, i) for call in message["tool_calls"]]
        return marked

    def mark_call(self, call: Mapping[str, Any], message: int | None) -> Mapping[str, Any]:
        """Returns a tool call, or the definition of a tool, with markers in its name and its arguments."""
        function = dict(function_of_call(call))
        arguments = function.get("arguments")
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
        markers = self._next_markers(2 if decoded else 1)
        self.found.append(Content(message, "tools" if message is None else "tool_calls", markers))
        function["name"] = f"{function.get('name', '')}{markers[0]}"
        if decoded:
            decoded = {**decoded, markers[1]: markers[1]}
            is_text = isinstance(arguments, str)
            function["arguments"] = json.dumps(decoded, ensure_ascii=False) if is_text else decoded
        return {**call, "function": function} if "function" in call else function

    def _next_markers(self, number: int) -> tuple[str, ...]:
        return tuple(islice(self._markers, number))

    def _mark_both_ends(self, text: str, content: Content) -> str:
        """Returns `text` with a marker behind its first letter or digit, and one behind its last word."""
        self.found.append(content)
        first, last = content.markers
        end = len(text.rstrip())
        begin = next((i for i, one in enumerate(text[:end], start=1) if one.isalnum()), end)
        return f"{text[:begin]}{first}{text[begin:end]}{last}{text[end:]}"

    def _mark_leaves_of(self, value: Any, content: Content) -> Any:
        self.found.append(content)
        return _mark_leaves(value, content.markers[0])


def _mark_leaves(value: Any, marker: str) -> Any:
    """Returns `value` with the marker behind each text in it."""
    if isinstance(value, str):
        return f"{value}{marker}"
    if isinstance(value, list):
        return [_mark_leaves(one, marker) for one in cast(list[Any], value)]
    if isinstance(value, Mapping):
        members = cast(Mapping[str, Any], value).items()
        return {name: one if name in _NO_CONTENT else _mark_leaves(one, marker) for name, one in members}
    return value
