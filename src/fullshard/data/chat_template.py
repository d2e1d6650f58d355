"""Converts conversations to tokens, with a mask of the trained tokens.

[Note: what the assistant says]
The tokenizer's chat template writes a conversation as one text. If the template marks the assistant's words
({% generation %}), those marks are used. Otherwise the words are found by comparing two texts: messages 0 to
i, and messages 0 to i - 1 with the opening of an answer (add_generation_prompt). The words of message i are
the text that the first has beyond the second. So the role's header is not trained on, and the token that ends
the turn is. If a message changes the text before it, as in templates that drop earlier reasoning, the words
cannot be found, and an error is raised.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fullshard.data.tokenizer import list_tokenizer_files, locate_tokenizer_file, read_tokenizer_text
from fullshard.errors import DataError, MissingExtraError
from fullshard.spec.small_files import ForeignErrorTranslator

Messages = Sequence[Mapping[str, Any]]
_MARK = "{% generation"


class UntokenizableRecordError(ValueError):
    """Raised, with the reason, for a record that cannot be converted to tokens."""


class ChatTemplate:
    """The chat template of the tokenizer in a directory.

    Runs code that comes with the tokenizer only with `trust_remote_code`. Raises MissingExtraError without
    transformers; DataError for a tokenizer without a template, or one that needs its code to be loaded.
    """

    def __init__(self, path: str, *, trust_remote_code: bool = False) -> None:
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
        if not Path(path).expanduser().is_dir() or not self._tokenizer.chat_template:
            raise DataError(
                "there is no chat template.",
                got=f"data.tokenizer = {path!r}",
                why='records = "messages" are written out as the template says',
                fix="a tokenizer's directory whose tokenizer_config.json or chat_template.jinja has one",
            )
        self._marked = _MARK in str(self._tokenizer.chat_template).replace("{%-", "{%")

    def encode_conversation(
        self, messages: Messages, *, train_on: Literal["all", "assistant"]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns (tokens of the conversation, mask of the trained tokens).

        Raises UntokenizableRecordError if the template rejects it or the assistant's words cannot be found.
        """
        _check_messages(messages)
        if train_on == "assistant" and self._marked:
            return self._encode_by_generation_marks(messages)
        text = self._render_messages(messages)
        spans = [(0, len(text))] if train_on == "all" else self._assistant_text_spans(messages, text)
        with _convert_template_errors():
            coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.array(coded["input_ids"], dtype=np.int64)
        begins = np.array([begin for begin, _ in coded["offset_mapping"]], dtype=np.int64)
        trained = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in spans:
            trained |= (begins >= begin) & (begins < end)
        return tokens, trained

    def _render_messages(self, messages: Messages, *, opening: bool = False) -> str:
        rows = [dict(message) for message in messages]
        with _convert_template_errors():
            text = self._tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=opening)
        return cast(str, text)

    def _encode_by_generation_marks(self, messages: Messages) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        rows = [dict(message) for message in messages]
        with _convert_template_errors():
            coded = self._tokenizer.apply_chat_template(
                rows, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        return np.array(coded["input_ids"], np.int64), np.array(coded["assistant_masks"], np.bool_)

    def _assistant_text_spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Returns (begin, end) of the assistant's words in `text`. See [Note: what the assistant says]."""
        spans: list[tuple[int, int]] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render_messages(messages[:i], opening=True) if i else ""
            behind = self._render_messages(messages[: i + 1])
            if not (text.startswith(behind) and behind.startswith(before)):
                raise UntokenizableRecordError(
                    f"message {i + 1} changes how the chat template writes out those before it, so what the "
                    "assistant says cannot be found; a template with {% generation %} marks it"
                )
            spans.append((len(before), len(behind)))
        return spans


def _convert_template_errors() -> ForeignErrorTranslator:
    """Returns a context manager that converts errors of the chat template into UntokenizableRecordError."""
    return ForeignErrorTranslator(
        lambda got: UntokenizableRecordError(f"the chat template does not take it: {got}")
    )


def _check_messages(messages: Messages) -> None:
    """Raises UntokenizableRecordError if `messages` is not a list of messages."""
    rows = cast(Any, messages)
    if not isinstance(rows, list) or not rows:
        raise UntokenizableRecordError(f"no list of messages, but {type(rows).__name__ if rows else 'none'}")
    for i, message in enumerate(cast(list[Any], rows)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UntokenizableRecordError(f"message {i + 1} is not a table of role and content")
