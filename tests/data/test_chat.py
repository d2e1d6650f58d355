"""What of a conversation is trained on: all, or what the assistant says with the token that ends it."""

from pathlib import Path

import pytest

from fullshard.data.chat_template import ChatTemplate, UntokenizableRecordError
from fullshard.data.tokenizer import open_tokenizer
from fullshard.errors import DataError
from tests.data.samples import CHAT, save_tokenizer

TALK = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on a mat"},
    {"role": "user", "content": "and the dog"},
    {"role": "assistant", "content": "ran"},
]
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}\n{% endfor %}"
)
FORGETS = "{% for m in messages[-2:] %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def trained_text(path: str, train_on: str = "assistant") -> list[str]:
    """The text of each run of tokens that are trained on."""
    tokens, trained = ChatTemplate(path).encode_conversation(TALK, train_on=train_on)
    runs: list[list[int]] = [[]]
    for token, kept in zip(tokens.tolist(), trained.tolist(), strict=True):
        runs[-1].append(token) if kept else runs.append([])
    return [open_tokenizer(path).decode(run) for run in runs if run]


def test_all_is_the_conversation_as_the_template_writes_it(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    (whole,) = trained_text(path, "all")
    assert whole.startswith("<|user|>\nthe cat<|endoftext|>\n<|assistant|>\nsat on a mat<|endoftext|>\n")


def test_the_assistants_words_and_their_end_are_trained_on(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    assert trained_text(path) == ["sat on a mat<|endoftext|>\n", "ran<|endoftext|>\n"]


def test_a_template_that_marks_what_is_generated_is_taken_at_its_word(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=MARKED)
    assert trained_text(path) == ["sat on a mat<|endoftext|>", "ran<|endoftext|>"]


def test_a_template_that_changes_earlier_messages_has_no_answer(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=FORGETS)
    with pytest.raises(UntokenizableRecordError, match="message 2 changes"):
        trained_text(path)


@pytest.mark.parametrize("talk", [[], "text", [{"content": "no role"}], ["text"], None])
def test_what_is_no_conversation_is_refused(tmp_path: Path, talk: object):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    with pytest.raises(UntokenizableRecordError):
        ChatTemplate(path).encode_conversation(talk, train_on="all")


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no chat template"):
        ChatTemplate(save_tokenizer(tmp_path / "tok"))
