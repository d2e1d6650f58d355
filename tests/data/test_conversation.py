"""Conversations of any form become messages of role and content; what is none is reported."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullshard.data.build import build_packed_data
from fullshard.data.conversation import Conversation, read_conversation
from fullshard.data.row_fields import UntokenizableRecordError
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data.samples import CHAT, decoded, run_of, save_tokenizer, write_rows
from tests.data.test_chat import WITH_TOOLS
from tests.data.test_corpus import store_of

KINDS = ("jsonl", "parquet", "datasets")
ASKS = {"role": "user", "content": "the cat"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"at": {"type": "string"}}}}
GO = {"type": "function", "function": {"name": "go", "parameters": {"far": {"type": "number"}}}}


def read(messages: Any, row: dict[str, Any] | None = None, **settings: Any) -> Conversation:
    return read_conversation(row or {}, messages, fields=DataSourceFields(records="messages", **settings))


def calling(function: dict[str, Any], **call: Any) -> list[dict[str, Any]]:
    return [ASKS, {"role": "assistant", "content": None, "tool_calls": [{"function": function, **call}]}]


@pytest.mark.parametrize("arguments", [{"at": None}, '{"at": null}'])
def test_arguments_of_tool_calls_are_mappings(arguments: object):
    _, answer = read(calling({"name": "look", "arguments": arguments}, id="7")).messages
    function = {"name": "look", "arguments": {"at": None}}
    assert answer == {"role": "assistant", "tool_calls": [{"function": function, "id": "7"}]}


@pytest.mark.parametrize("arguments", [{}, "", None, "{}"])
def test_a_tool_without_parameters_is_called_with_none(arguments: object):
    _, answer = read(calling({"name": "look", "arguments": arguments})).messages
    assert answer["tool_calls"] == [{"function": {"name": "look", "arguments": {}}}]


def test_tool_calls_without_a_function_level_are_read():
    _, answer = read(
        [ASKS, {"role": "assistant", "tool_calls": [{"name": "go", "arguments": "{}"}]}]
    ).messages
    assert answer["tool_calls"] == [{"name": "go", "arguments": {}}]


@pytest.mark.parametrize("tools", [[TOOL], '[{"type": "function"}]', ['{"type": "function"}']])
def test_tools_may_be_json_text(tools: Any):
    found = read([ASKS], {"tools": tools}).tools
    assert found is not None
    assert [tool["type"] for tool in found] == ["function"]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools: object):
    assert read([ASKS], {"tools": tools}).tools is None


def test_template_variables_of_a_row_override_those_of_the_settings():
    row = {"chat_template_kwargs": {"brief": True}}
    settings = {"chat_template_kwargs": {"brief": False, "date": "today"}}
    assert read([ASKS], row, **settings).template_kwargs == {"brief": True, "date": "today"}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "nothing"),
        (None, "nothing"),
        ({"role": ["user"], "content": ["a"]}, "no list of messages, but dict"),
        ("text", "not JSON"),
        (["text"], "message 1 is not a table"),
        ([{"content": "a"}], "message 1 has no 'role', but content"),
        ([ASKS, {"role": "user", "content": None}], "message 2 has no 'content'"),
        ([{"role": "user", "text": "a"}], "message 1 has no 'content', but role, text"),
        (calling({"name": "look", "arguments": "{"}), "tool_calls of message 2 are text that is not JSON"),
        (calling({"name": "look", "arguments": "[1]"}), "not an object, but list"),
        (calling({"arguments": "{}"}), "without a name"),
        ([ASKS, {"role": "assistant", "tool_calls": [7]}], "not a list of objects"),
    ],
)
def test_messages_that_are_no_conversation_are_refused(messages: object, why: str):
    with pytest.raises(UntokenizableRecordError, match=why):
        read(messages)


@pytest.mark.parametrize("row", [{"tools": 7}, {"tools": "{"}, {"chat_template_kwargs": [1]}])
def test_tools_and_variables_of_other_types_are_refused(row: dict[str, Any]):
    with pytest.raises(UntokenizableRecordError):
        read([ASKS], row)


def brief(value: bool) -> dict[str, Any]:
    return {"chat_template_kwargs": {"brief": value}}


def text_of(tmp_path: Path, template: str, **data: object) -> str:
    path = save_tokenizer(tmp_path / "tok", template=template)
    store = store_of(tmp_path, tokenizer=path, records="messages", validation_fraction=0, **data)
    return decoded(path, store.tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_renders_tools_and_variables_without_members_that_other_rows_have(
    tmp_path: Path, kind: str
):
    rows = [
        {"messages": calling({"name": "look", "arguments": {"at": "mat"}}), "tools": [TOOL], **brief(False)},
        {"messages": calling({"name": "go", "arguments": {"far": 1}}), **brief(True)},
        {"messages": [ASKS], "tools": [GO]},
    ]
    text = text_of(tmp_path, WITH_TOOLS, **write_rows(kind, tmp_path, rows))
    look, go = (
        f"<|user|>the cat<|endoftext|><|assistant|>{call}<|endoftext|>"
        for call in ('look {"at": "mat"}', 'go {"far": 1}')
    )
    looks, goes = (f"<|system|>{json.dumps([tool])}<|endoftext|>" for tool in (TOOL, GO))
    assert text == f"{looks}{look}<|brief|>{go}{goes}<|user|>the cat<|endoftext|>"


SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "a mat"},
        {"from": "human", "value": "the cat"},
        {"from": "gpt", "value": "sat"},
        {"from": "observation", "value": "on"},
    ]
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_sharegpt_are_reported_with_the_lines_that_read_them(tmp_path: Path, kind: str):
    settings = write_rows(kind, tmp_path, [SHAREGPT])
    lines = [
        'messages_field = "conversations"',
        'role_field = "from"',
        'content_field = "value"',
        'roles = { human = "user", gpt = "assistant", observation = "tool", function_call = "assistant" }',
    ]
    for given in (0, 1, 3):
        with pytest.raises(DataError) as caught:
            text_of(tmp_path, CHAT, **settings, **tomllib.loads("\n".join(lines[:given])))
        assert str(caught.value).endswith("\n    ".join(lines[given:]))
    text = text_of(tmp_path, CHAT, **settings, **tomllib.loads("\n".join(lines)), train_on="assistant")
    assert text.startswith(
        "<|system|>\na mat<|endoftext|>\n<|user|>\nthe cat<|endoftext|>\n<|assistant|>\nsat<|"
    )


PROMPT = [ASKS, {"role": "assistant", "content": "sat"}, {"role": "user", "content": "on"}]
ANSWER = [{"role": "assistant", "content": "a mat"}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train_on", ["all", "assistant", "completion"])
def test_messages_of_a_completion_follow_those_of_the_prompt_and_are_the_answers(
    tmp_path: Path, kind: str, train_on: str
):
    rows = [{"completion": ANSWER, "prompt": PROMPT}, {"completion": ANSWER, "prompt": [*PROMPT, *ANSWER]}]
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    given = {**write_rows(kind, tmp_path, rows), "tokenizer": path}
    with pytest.raises(DataError) as caught:
        store_of(tmp_path, **given, records="completion")
    settings = tomllib.loads("\n".join(str(caught.value).splitlines()[-2:]))
    store = store_of(tmp_path, **given, **settings, train_on=train_on, validation_fraction=0)
    assert store.warnings == []
    mask = np.ones(len(store.tokens), bool) if store.loss_mask is None else store.loss_mask[:].astype(bool)
    whole = "".join(f"<|{one['role']}|>\n{one['content']}<|endoftext|>\n" for one in [*PROMPT, *ANSWER])
    wanted = whole if train_on == "all" else "a mat<|endoftext|>"
    for begin, end in zip(store.begins, store.ends, strict=True):
        tokens = store.tokens[begin:end]
        assert decoded(path, tokens) == whole
        assert decoded(path, tokens[mask[begin:end]]).strip() == wanted.strip()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("row", "settings", "names"),
    [
        ({"messages": PROMPT, "chosen": ANSWER, "response": "far", "id": "7"}, {}, ["chosen", "response"]),
        ({"messages": PROMPT, "completion": "a mat"}, {}, ["completion"]),
        ({"prompt": PROMPT, "completion": ANSWER}, {"messages_field": "completion"}, ["prompt"]),
        ({"a": {"m": PROMPT, "chosen": ANSWER}}, {"messages_field": "a.m"}, ["a.chosen"]),
        ({"messages": PROMPT, "prompt": "the cat", "chosen": PROMPT}, {}, []),
    ],
)
def test_answers_and_messages_that_are_not_read_are_named(
    tmp_path: Path, kind: str, row: dict[str, Any], settings: dict[str, str], names: list[str]
):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    store = store_of(
        tmp_path, **write_rows(kind, tmp_path, [row]), tokenizer=path, records="messages", **settings
    )
    assert dict(store.notes.unwritten) == dict.fromkeys(names, 1)


def test_settings_of_records_name_the_cache_entry(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    given = {
        **write_rows("jsonl", tmp_path, [{"messages": [ASKS]}]),
        "tokenizer": path,
        "records": "messages",
    }
    others: list[dict[str, object]] = [
        {"chat_template_kwargs": {"brief": True}},
        {"roles": {"user": "human"}},
    ]
    assert len({store_of(tmp_path, **given, **other).key for other in [{}, *others]}) == 3


def test_conversations_without_an_end_of_turn_are_reported_until_a_template_ends_them(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template="{% for m in messages %}{{ m.content }}\n{% endfor %}")
    rows = [{"messages": [ASKS, {"role": "assistant", "content": f"sat on {i} mats"}]} for i in range(9)]
    given = {**write_rows("jsonl", tmp_path, rows), "tokenizer": path, "records": "messages"}
    data = build_packed_data(run_of(tmp_path, **given, validation_fraction=0))
    (warning,) = data.summary_values()["warnings"]
    assert "9 of 9 conversations of rows.jsonl end without a token" in warning
    assert f"\nwarning: {warning}" in data.describe()
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    data = build_packed_data(run_of(tmp_path, **given, chat_template=str(template), validation_fraction=0))
    assert data.summary_values()["warnings"] == []
    template.write_text(f"{CHAT}<|more|>")
    again = build_packed_data(run_of(tmp_path, **given, chat_template=str(template), validation_fraction=0))
    assert again.training_token_count > data.training_token_count


@pytest.mark.parametrize(("length", "cut"), [(8, 9), (64, 0)])
def test_conversations_that_are_longer_than_a_sequence_are_counted(
    tmp_path: Path, length: int, cut: int
) -> None:
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    rows = [{"messages": [ASKS, {"role": "assistant", "content": f"sat on {i} mats"}]} for i in range(9)]
    given = {**write_rows("jsonl", tmp_path, rows), "tokenizer": path, "records": "messages"}
    more = {"sequence_length": length, "validation_fraction": 0, "packing": "best_fit"}
    data = build_packed_data(run_of(tmp_path, **given, **more, train_on="assistant"))
    assert data.summary_values()["documents cut"] == cut
    assert ("9 of them cut: longer than data.sequence_length" in data.describe()) == (cut > 0)
