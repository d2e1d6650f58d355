"""Converts conversations to tokens, with a mask of the trained tokens.

[Note: what the assistant says]
The tokenizer's chat template writes a conversation as one text. If the template marks the assistant's words
({% generation %}), those marks are used. Otherwise the words are found by comparing two texts: messages 0 to
i, and messages 0 to i - 1 with the opening of an answer (add_generation_prompt). The words of message i are
the text that the first has beyond the second. So the role's header is not trained on, and the token that ends
the turn is; it is also trained on if it follows the words that the template marks. If a message changes the
text before it, as in templates that drop earlier reasoning, the words cannot be found, and an error is
raised.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data.conversation import Conversation, Message
from fullshard.data.row_fields import UntokenizableRecordError
from fullshard.data.tokenizer import (
    EncodedText,
    list_tokenizer_files,
    locate_tokenizer_file,
    read_tokenizer_text,
)
from fullshard.errors import DataError, MissingExtraError
from fullshard.spec.small_files import SETTINGS_BYTES, ForeignErrorTranslator, read_text

_MARK = "{% generation"
_COMPARED = 16  # characters at the end of a content, whose beginning a template may drop
_UNUSED_CHARACTER = "\ue000"  # of private use, so that no text begins with it


@dataclass(frozen=True)
class EncodedConversation:
    """Tokens of a conversation.

    tokens: tokens of the whole conversation
    trained: mask of the trained tokens
    has_end_of_turn: False if the last message is the assistant's and nothing follows its content
    """

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    has_end_of_turn: bool


class ChatTemplate:
    """The chat template of the tokenizer in a directory, or the one in the file `template`.

    Runs code that comes with the tokenizer only with `trust_remote_code`. Raises MissingExtraError without
    transformers; DataError for a tokenizer without a template, or one that needs its code to be loaded.
    """

    def __init__(self, path: str, *, template: str | None = None, trust_remote_code: bool = False) -> None:
        if find_spec("transformers") is None:
            raise MissingExtraError("hf", package="transformers", needed_for='data.records = "messages"')
        from transformers import AutoTokenizer

        directory = locate_tokenizer_file(path).parent
        for file in list_tokenizer_files(path):
            read_tokenizer_text(file)  # rejects a file without end, which transformers would read
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
        if not Path(path).expanduser().is_dir() or not self._tokenizer.chat_template:
            raise DataError(
                "there is no chat template.",
                got=f"data.tokenizer = {path!r}",
                why='records = "messages" are written out as the template says',
                fix="a tokenizer's directory whose tokenizer_config.json or chat_template.jinja has one, or "
                'data.chat_template = "<file>.jinja"',
            )
        parameters = signature(self._tokenizer.apply_chat_template).parameters
        self._reserved_names = parameters.keys() - {"documents"}
        added = self._tokenizer.added_tokens_decoder.items()
        special = {number for number, token in added if token.special}
        self._special_tokens = np.array(sorted(special | {*self._tokenizer.all_special_ids}))
        self._marked = _MARK in str(self._tokenizer.chat_template).replace("{%-", "{%")

    def encode_conversation(
        self, conversation: Conversation, *, train_on: Literal["all", "assistant"]
    ) -> EncodedConversation:
        """Returns the tokens of the conversation.

        Raises UntokenizableRecordError if the template rejects it or the assistant's words cannot be found.
        """
        self._check_template_kwargs(conversation.template_kwargs)
        conversation, text = self._render_conversation(conversation)
        if train_on == "assistant" and self._marked:
            tokens, trained = self._encode_by_generation_marks(conversation)
        else:
            spans = [(0, len(text))] if train_on == "all" else self._assistant_text_spans(conversation, text)
            tokens, trained = self._encode_text_with_spans(text, spans)
        for end in np.flatnonzero(trained[:-1] & ~trained[1:]):
            # See [Note: what the assistant says]: the token that ends the turn may follow the marked words.
            if tokens[end + 1] in self._special_tokens and not self._ends_special(tokens[: end + 1]):
                trained[end + 1] = True
        return EncodedConversation(
            tokens, trained, self._has_end_of_turn(conversation.messages[-1], text=text, tokens=tokens)
        )

    def _encode_text_with_spans(
        self, text: str, spans: Iterable[tuple[int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns (tokens of `text`, mask of those within `spans` of characters)."""
        with _convert_template_errors():
            coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        encoded = EncodedText.from_offsets(coded["input_ids"], coded["offset_mapping"])
        trained = np.zeros(len(encoded.tokens), dtype=np.bool_)
        for begin, end in spans:
            trained |= encoded.mask_tokens_in(begin, end)
        return encoded.tokens, trained

    def _ends_special(self, tokens: NDArray[np.int64]) -> bool:
        """Returns True if the last of `tokens` that is not blank is a special token."""
        for token in tokens[::-1]:
            if token in self._special_tokens:
                return True
            if self._tokenizer.decode([int(token)]).strip():
                return False
        return False

    def _has_end_of_turn(self, last: Message, *, text: str, tokens: NDArray[np.int64]) -> bool:
        """Returns False if `last` is an answer with nothing but blanks behind its content."""
        content = last.get("content")
        if last["role"] != "assistant" or "tool_calls" in last or not isinstance(content, str):
            return True
        return not text.rstrip().endswith(content.rstrip()[-_COMPARED:]) or self._ends_special(tokens)

    def _check_template_kwargs(self, names: Iterable[str]) -> None:
        """Raises UntokenizableRecordError if a name is that of a parameter of `apply_chat_template`."""
        if reserved := sorted(self._reserved_names.intersection(names)):
            raise UntokenizableRecordError(f"chat_template_kwargs cannot have {', '.join(reserved)}")

    def _render_conversation(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Returns (conversation with arguments as the template takes them, text of the conversation).

        See [Note: arguments of tool calls].
        """
        given = [arguments for arguments in conversation.tool_arguments() if arguments]
        if not given:
            return conversation, self._render(conversation)
        as_text = conversation.with_text_arguments()
        try:
            text = self._render(conversation)
        except UntokenizableRecordError as error:
            try:
                return as_text, self._render(as_text)
            except UntokenizableRecordError:
                raise error from None
        if any(repr(arguments) in text for arguments in given):  # a template that writes what it is given
            return as_text, self._render(as_text)
        return conversation, text

    def _render(self, conversation: Conversation, count: int | None = None, *, opening: bool = False) -> str:
        """Returns the text of the first `count` messages; with `opening`, also the header of an answer."""
        part = replace(conversation, messages=conversation.messages[:count])
        return cast(str, self._apply_template(part, {"tokenize": False, "add_generation_prompt": opening}))

    def _encode_by_generation_marks(
        self, conversation: Conversation
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        coded = self._apply_template(conversation, {"tokenize": True, **options})
        return np.array(coded["input_ids"], np.int64), np.array(coded["assistant_masks"], np.bool_)

    def _apply_template(self, conversation: Conversation, options: Mapping[str, bool]) -> Any:
        with _convert_template_errors():
            return self._tokenizer.apply_chat_template(
                [*conversation.messages], tools=conversation.tools, **conversation.template_kwargs, **options
            )

    def _assistant_text_spans(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """Returns (begin, end) of the assistant's words in `text`. See [Note: what the assistant says]."""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            behind = self._render(conversation, i + 1)
            before = self._render(conversation, i, opening=True) if i else self._first_header(conversation)
            if not (text.startswith(behind) and behind.startswith(before)):
                raise UntokenizableRecordError(
                    f"message {i + 1} changes how the chat template writes out those before it, so what the "
                    "assistant says cannot be found; a template with {% generation %} marks it"
                )
            spans.append((len(before), len(behind)))
        return spans

    def _first_header(self, conversation: Conversation) -> str:
        """Returns the text before the words of a conversation that begins with the assistant.

        Many templates reject a conversation without messages. So the text is what two first messages share.
        """
        other = replace(conversation, messages=[{"role": "assistant", "content": _UNUSED_CHARACTER}])
        return os.path.commonprefix([self._render(conversation, 1), self._render(other)])


def read_chat_template(file: str) -> str:
    """Returns the text of a chat template. Raises DataError if the file cannot be read."""
    path = Path(file).expanduser()
    try:
        return read_text(path, most_bytes=SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"the chat template {path} cannot be read.", got=got) from error


def _convert_template_errors() -> ForeignErrorTranslator:
    """Returns a context manager that converts errors of the chat template into UntokenizableRecordError."""
    return ForeignErrorTranslator(
        lambda got: UntokenizableRecordError(f"the chat template does not take it: {got}")
    )
