"""Converts conversations to tokens, with a mask of the trained tokens.

[Note: what the assistant says]
The tokenizer's chat template writes a conversation as one text. If the template marks the assistant's words
({% generation %}), those marks are used. Otherwise the words are found by comparing two texts: messages 0 to
i, and messages 0 to i - 1 with the opening of an answer (add_generation_prompt). The words of message i are
the text that the first has beyond the second. So the role's header is not trained on, and the token that ends
the turn is; it is also trained on if it follows the words that the template marks. If a message changes the
text before it, as in templates that drop earlier reasoning, the words cannot be found, and an error is
raised.

[Note: marked content]
A template may leave out tool calls, reasoning, or a second system message, without an error. So each piece of
content gets characters that no text has, and the conversation is rendered again: what the template writes has
them. Templates trim, move and escape content, so that looking for the content itself would not do.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data import tokenizer
from fullshard.data.conversation import Conversation, Message, function_of_call
from fullshard.data.row_fields import UntokenizableRecordError, true_train_flag_names
from fullshard.errors import DataError, MissingExtraError
from fullshard.system.small_files import SETTINGS_BYTES, ForeignErrorTranslator

_MARK = "{% generation"
_FIRST_MARKER = 0xF0000  # of private use, with 65,533 characters behind it
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "thinking", "name")
_OTHER_FIELDS = ("function_call", "tool_responses")
_NO_CONTENT = ("type", "id", "tool_call_id", "index")  # members that templates may leave out
_COMPARED = 16  # characters at the end of a content, whose beginning a template may drop
_UNUSED_CHARACTER = "\ue000"  # of private use, so that no text begins with it


@dataclass(frozen=True)
class EncodedConversation:
    """Tokens of a conversation.

    tokens: tokens of the whole conversation
    trained: mask of the trained tokens
    has_end_of_turn: False if the last message is the assistant's and nothing follows its content
    unwritten: names of the content that the template does not write, or not mark
    """

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    has_end_of_turn: bool
    unwritten: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _MarkedContent:
    """A piece of content with its markers.

    message: index of the message; None for the definitions of tools
    """

    message: int | None
    field: str
    markers: tuple[str, ...]

    def occurs_in(self, text: str) -> bool:
        """Returns whether all markers are in `text`, perhaps as JSON escapes."""
        return all(one in text or json.dumps(one)[1:-1] in text for one in self.markers)


class ChatTemplate:
    """The chat template of the tokenizer in a directory, or the one in the file `template`.

    Runs code that comes with the tokenizer only with `trust_remote_code`. Raises MissingExtraError without
    transformers; DataError unless `path` is a directory, with a template and a tokenizer that can be loaded.
    """

    def __init__(self, path: str, *, template: str | None = None, trust_remote_code: bool = False) -> None:
        if find_spec("transformers") is None:
            raise MissingExtraError("hf", package="transformers", needed_for='data.records = "messages"')
        from transformers import AutoTokenizer

        directory = tokenizer.locate_tokenizer_file(path).parent
        for file in tokenizer.list_tokenizer_files(path):
            tokenizer.read_tokenizer_text(file)  # rejects a file without end, which transformers would read
        what = f"the tokenizer in {directory} cannot be loaded."
        with ForeignErrorTranslator(lambda got: DataError(what, got=got)):
            try:
                self._tokenizer: Any = AutoTokenizer.from_pretrained(
                    str(directory), local_files_only=True, trust_remote_code=trust_remote_code
                )
            except ValueError as error:
                if "trust_remote_code" in str(error) and not trust_remote_code:
                    raise DataError(
                        f"the tokenizer in {directory} comes with Python code of its own, which is not run.",
                        got="auto_map in its tokenizer_config.json, and data.trust_remote_code = false",
                        why="the code may do whatever you may do on this machine",
                        fix="read the code, then data.trust_remote_code = true",
                    ) from error
                raise
        if template is not None:
            self._tokenizer.chat_template = read_chat_template(template)
        if not tokenizer.find_tokenizer(path).is_dir() or not self._tokenizer.chat_template:
            raise DataError(
                "there is no chat template.",
                got=f"data.tokenizer = {path!r}",
                why='records = "messages" are written out as the template says',
                fix="a tokenizer's directory whose tokenizer_config.json or chat_template.jinja has one, or "
                'data.chat_template = "<file>.jinja"',
            )
        self._reserved = signature(self._tokenizer.apply_chat_template).parameters.keys() - {"documents"}
        special = {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self._special_tokens = np.array(sorted(special | {*self._tokenizer.all_special_ids}))
        self._templates = dict[bool, str]()  # by whether a conversation has tools

    def encode_conversation(
        self, conversation: Conversation, *, train_on: Literal["all", "assistant"]
    ) -> EncodedConversation:
        """Returns the tokens of the conversation.

        Raises UntokenizableRecordError if the template rejects it or does not write content that is trained
        on, if the words of a message cannot be found, and for `template_kwargs` with a reserved name.
        """
        if reserved := sorted(self._reserved.intersection(conversation.template_kwargs)):
            raise UntokenizableRecordError(f"chat_template_kwargs cannot have {', '.join(reserved)}")
        conversation, text = self._render_conversation(conversation)
        unwritten = self._check_and_list_unwritten_content(conversation, train_on=train_on)
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        own = [i for i in answers if i not in conversation.untrained]
        if train_on == "assistant" and _MARK in self._template_of(conversation):
            tokens, trained = self._encode_by_generation_marks(conversation, answers)
            if np.count_nonzero(np.diff(trained, prepend=False) & trained) < len(own):
                unwritten |= {"answers without {% generation %} marks"}
        elif train_on == "assistant":
            spans = [self._message_span(conversation, i, text=text) for i in own]
            tokens, trained = self._encode_text_with_spans(text, spans)
        else:
            spans = [self._message_span(conversation, i, text=text) for i in conversation.untrained]
            tokens, excluded = self._encode_text_with_spans(text, spans)
            trained = ~excluded
        ends = np.flatnonzero(trained[:-1] & ~trained[1:]) if train_on == "assistant" else []
        for end in ends:
            # See [Note: what the assistant says]: the token that ends the turn may follow the marked words.
            if tokens[end + 1] in self._special_tokens and not self._ends_in_special(tokens[: end + 1]):
                trained[end + 1] = True
        has_end = self._has_end_of_turn(conversation.messages[-1], text=text, tokens=tokens)
        return EncodedConversation(tokens, trained, has_end, unwritten)

    @classmethod
    def find_trained_end_of_turn_token(cls, path: str, template: str | None = None) -> list[int]:
        """Returns the special token at the end of an answer if it is trained on, in a list."""
        chat = cls(path, template=template)
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        found = chat.encode_conversation(Conversation(messages), train_on="assistant")
        return [int(one) for one in found.tokens[found.trained] if one in chat._special_tokens][-1:]

    def _check_and_list_unwritten_content(
        self, conversation: Conversation, *, train_on: Literal["all", "assistant"]
    ) -> frozenset[str]:
        """Returns names of the content that the template does not write. See [Note: marked content].

        Raises UntokenizableRecordError for such content of a message that is trained on, unless the template
        writes it in a last message; for an empty answer; and for a flag that asks to train on what `train_on`
        leaves out. If the template rejects the marked words, messages are not checked.
        """
        template = self._template_of(conversation)
        unwritten = {
            f"chat_template_kwargs.{name}" for name in conversation.template_kwargs if name not in template
        }
        marked, pieces = _mark_content(conversation)
        try:
            text = self._render(marked)
        except UntokenizableRecordError:  # the template takes only certain words
            return frozenset(unwritten)
        for i, message in enumerate(conversation.messages):
            role = message["role"]
            trained = i not in conversation.untrained and (train_on == "all" or role == "assistant")
            own = [piece for piece in pieces if piece.message == i]
            if not trained and i not in conversation.untrained and true_train_flag_names(message):
                raise UntokenizableRecordError(
                    f"message {i + 1} ({role}) has {true_train_flag_names(message)[0]} = true, but "
                    'train_on = "assistant" leaves it out; "all" trains on each message without a false flag'
                )
            if trained and role == "assistant" and all(piece.field == "name" for piece in own):
                raise UntokenizableRecordError(f"message {i + 1}, of the assistant, is empty")
            for piece in own:
                if piece.occurs_in(text):
                    continue
                if trained and piece.field != "name" and not self._is_written_if_last_message(marked, piece):
                    raise UntokenizableRecordError(
                        f"the chat template does not write all of {piece.field!r} of message {i + 1} ({role})"
                    )
                unwritten.add(f"{piece.field} of {role}")
        unwritten |= {"tools" for piece in pieces if piece.message is None and not piece.occurs_in(text)}
        return frozenset(unwritten)

    def _is_written_if_last_message(self, marked: Conversation, piece: _MarkedContent) -> bool:
        """Returns whether the template writes the piece of content if its message is the last one."""
        assert piece.message is not None, "it is a message's"
        try:
            return piece.occurs_in(self._render(marked, piece.message + 1))
        except UntokenizableRecordError:
            return False

    def _encode_text_with_spans(
        self, text: str, spans: Iterable[tuple[int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns (tokens of `text`, mask of those within `spans` of characters)."""
        with _convert_template_errors():
            coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        encoded = tokenizer.EncodedText.from_offsets(coded["input_ids"], coded["offset_mapping"])
        trained = np.zeros(len(encoded.tokens), dtype=np.bool_)
        for begin, end in spans:
            trained |= encoded.mask_of_tokens_for_characters(begin, end)
        return encoded.tokens, trained

    def _ends_in_special(self, tokens: NDArray[np.int64]) -> bool:
        """Returns True if the last of `tokens` that is not blank is a special token."""
        for token in tokens[::-1]:
            if token in self._special_tokens:
                return True
            if self._tokenizer.decode([int(token)]).strip():
                return False
        return False

    def _has_end_of_turn(self, last: Message, *, text: str, tokens: NDArray[np.int64]) -> bool:
        """Returns False if `last` is an answer without tool calls, and only blanks follow its content."""
        content = last.get("content")
        if last["role"] != "assistant" or "tool_calls" in last or not isinstance(content, str):
            return True
        return not text.rstrip().endswith(content.rstrip()[-_COMPARED:]) or self._ends_in_special(tokens)

    def _render_conversation(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Returns (conversation in the form that the template takes, text of the conversation).

        See [Note: arguments of tool calls]. A list of parts becomes text if the template takes only that.
        """
        given = [one for one in (*conversation.tool_arguments(), *conversation.text_part_lists()) if one]
        forms = [conversation]
        if any(conversation.tool_arguments()):
            forms.append(conversation.with_text_arguments())
        if any(conversation.text_part_lists()):
            forms += [form.with_text_contents() for form in forms]
        error: UntokenizableRecordError | None = None
        for form in forms:
            try:
                text = self._render(form)
            except UntokenizableRecordError as raised:
                error = error or raised
                continue
            # A template that writes what it is given needs text.
            if form is forms[-1] or not any(repr(one) in text for one in given):
                return form, text
        assert error is not None, "the last form is returned unless it raises"
        raise error

    def _render(self, conversation: Conversation, count: int | None = None, *, header: bool = False) -> str:
        """Returns the first `count` messages as text; with `header`, also the header of an answer."""
        part = replace(conversation, messages=conversation.messages[:count])
        return cast(str, self._apply_template(part, {"tokenize": False, "add_generation_prompt": header}))

    def _encode_by_generation_marks(
        self, conversation: Conversation, answer_indexes: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns (tokens, mask of those that the template marks, except in answers that are not trained on).

        answer_indexes: indexes of the assistant's messages
        """
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        coded = self._apply_template(conversation, {"tokenize": True, **options})
        trained = np.array(coded["assistant_masks"], np.bool_)
        runs = np.flatnonzero(np.diff(trained, prepend=False, append=False)).reshape(-1, 2)
        excluded = [place for place, i in enumerate(answer_indexes) if i in conversation.untrained]
        if excluded and len(runs) != len(answer_indexes):
            raise UntokenizableRecordError(
                f"message {answer_indexes[excluded[0]] + 1} is not to be trained on, but cannot be found: "
                f"the chat template marks {len(runs)} parts of {len(answer_indexes)} answers"
            )
        for begin, end in runs[excluded]:
            trained[begin:end] = False
        return np.array(coded["input_ids"], np.int64), trained

    def _template_of(self, conversation: Conversation) -> str:
        """Returns the template, with `{%` for `{%-`. Tokenizers may have another one for tools."""
        if (has_tools := bool(conversation.tools)) not in self._templates:
            with _convert_template_errors():
                text = str(self._tokenizer.get_chat_template(tools=conversation.tools))
            self._templates[has_tools] = text.replace("{%-", "{%")
        return self._templates[has_tools]

    def _apply_template(self, conversation: Conversation, options: Mapping[str, bool]) -> Any:
        with _convert_template_errors():
            return self._tokenizer.apply_chat_template(
                [*conversation.messages], tools=conversation.tools, **conversation.template_kwargs, **options
            )

    def _message_span(self, conversation: Conversation, i: int, *, text: str) -> tuple[int, int]:
        """Returns (begin, end) of message `i` in `text`: of an answer, without the header.

        See [Note: what the assistant says].
        """
        behind, answers = self._render(conversation, i + 1), conversation.messages[i]["role"] == "assistant"
        if i:
            before = self._render(conversation, i, header=answers)
        else:
            before = self._text_before_opening_answer(conversation) if answers else ""
        if not (text.startswith(behind) and behind.startswith(before)):
            raise UntokenizableRecordError(
                f"message {i + 1} changes how the chat template writes out those before it, so what the "
                "assistant says cannot be found; a template with {% generation %} marks it"
            )
        return len(before), len(behind)

    def _text_before_opening_answer(self, conversation: Conversation) -> str:
        """Returns the text before the words of a conversation that begins with the assistant.

        Many templates reject a conversation without messages. So this is what two first messages share.
        """
        other = replace(conversation, messages=[{"role": "assistant", "content": _UNUSED_CHARACTER}])
        return os.path.commonprefix([self._render(conversation, 1), self._render(other)])


def read_chat_template(file: str) -> str:
    """Returns the text of a chat template. Raises DataError if the file cannot be read."""
    path = Path(file).expanduser()
    return tokenizer.read_tokenizer_text(path, what="chat template", most_bytes=SETTINGS_BYTES)


def _convert_template_errors() -> ForeignErrorTranslator:
    """Returns a context manager that converts errors of the chat template into UntokenizableRecordError."""
    return ForeignErrorTranslator(
        lambda got: UntokenizableRecordError(f"the chat template does not take it: {got}")
    )


def _mark_content(conversation: Conversation) -> tuple[Conversation, list[_MarkedContent]]:
    """Returns (conversation with markers in its content, the pieces of content that are not blank)."""
    writer = _MarkerWriter()
    messages = [writer.mark_message(one, i) for i, one in enumerate(conversation.messages)]
    tools = conversation.tools and [writer.mark_call_or_tool(tool, None) for tool in conversation.tools]
    return replace(conversation, messages=messages, tools=tools), writer.found


class _MarkerWriter:
    """Writes markers into content, each of them once.

    found: pieces of content with their markers
    """

    def __init__(self) -> None:
        self._markers = map(chr, count(_FIRST_MARKER))
        self.found: list[_MarkedContent] = []

    def mark_message(self, message: Message, i: int) -> Message:
        """Returns message `i` with markers in its content."""
        marked = dict(message)
        for name in _TEXT_FIELDS:
            value = message.get(name)
            if name == "name" and message["role"] == "tool":  # the call has it, too
                continue
            if isinstance(value, str) and value.strip():
                marked[name] = self._mark_both_ends(value, _MarkedContent(i, name, self._take_markers(2)))
            elif isinstance(value, list):
                parts = [
                    (part, _MarkedContent(i, name, self._take_markers(1))) for part in cast(list[Any], value)
                ]
                marked[name] = [self._mark_and_record_content(part, content) for part, content in parts]
        for name in _OTHER_FIELDS:
            if message.get(name):
                marked[name] = self._mark_and_record_content(
                    message[name], _MarkedContent(i, name, self._take_markers(1))
                )
        if "tool_calls" in message:
            marked["tool_calls"] = [self.mark_call_or_tool(call, i) for call in message["tool_calls"]]
        return marked

    def mark_call_or_tool(self, call: Mapping[str, Any], message: int | None) -> Mapping[str, Any]:
        """Returns a tool call, or the definition of a tool, with markers in its name and its arguments."""
        function = dict(function_of_call(call))
        arguments = function.get("arguments")
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
        markers = self._take_markers(2 if decoded else 1)
        self.found.append(_MarkedContent(message, "tools" if message is None else "tool_calls", markers))
        function["name"] = f"{function.get('name', '')}{markers[0]}"
        if decoded:
            decoded = {**decoded, markers[1]: markers[1]}
            is_text = isinstance(arguments, str)
            function["arguments"] = json.dumps(decoded, ensure_ascii=False) if is_text else decoded
        return {**call, "function": function} if "function" in call else function

    def _take_markers(self, count: int) -> tuple[str, ...]:
        return tuple(islice(self._markers, count))

    def _mark_both_ends(self, text: str, content: _MarkedContent) -> str:
        """Returns `text` with a marker behind its first letter or digit, and one behind its last word."""
        self.found.append(content)
        first, last = content.markers
        end = len(text.rstrip())
        begin = next((i for i, one in enumerate(text[:end], start=1) if one.isalnum()), end)
        return f"{text[:begin]}{first}{text[begin:end]}{last}{text[end:]}"

    def _mark_and_record_content(self, value: Any, content: _MarkedContent) -> Any:
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
