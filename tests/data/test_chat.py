"""A conversation is trained on whole, or only the assistant's words with the token that ends them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullshard.data.chat_template import ChatTemplate
from fullshard.data.conversation import Conversation, read_conversation
from fullshard.data.row_fields import UntokenizableRecordError
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data.samples import CHAT, END, decoded, save_tokenizer

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


def trained_text(
    path: str, train_on: str = "assistant", conversation: Conversation | None = None
) -> list[str]:
    """The text of each run of tokens that are trained on."""
    talk = conversation or Conversation(TALK)
    encoded = ChatTemplate(path).encode_conversation(talk, train_on=train_on)
    runs: list[list[int]] = [[]]
    for token, kept in zip(encoded.tokens.tolist(), encoded.trained.tolist(), strict=True):
        runs[-1].append(token) if kept else runs.append([])
    return [decoded(path, run) for run in runs if run]


END_OUTSIDE = MARKED.replace("<|endoftext|>{% endgeneration %}", "{% endgeneration %}<|endoftext|>")


@pytest.mark.parametrize(("template", "after"), [(CHAT, "\n"), (MARKED, ""), (END_OUTSIDE, "")])
def test_the_assistants_words_and_their_end_are_trained_on(tmp_path: Path, template: str, after: str):
    """With and without generation marks, which may leave out the end of the turn."""
    path = save_tokenizer(tmp_path / "tok", template=template)
    assert trained_text(path) == [f"sat on a mat{END}{after}", f"ran{END}{after}"]


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_a_template_that_ends_a_turn_with_a_blank_has_no_end_of_turn(tmp_path: Path, template: str):
    for end, has_one in ((END, True), ("", False), (" ", False), ("[end]", True)):
        path = save_tokenizer(tmp_path / "tok", template=template.replace(END, end))
        found = ChatTemplate(path).encode_conversation(Conversation(TALK), train_on="assistant")
        assert found.has_end_of_turn == has_one
        assert ChatTemplate(path).encode_conversation(Conversation(TALK[:3]), train_on="all").has_end_of_turn


def test_a_template_file_replaces_the_template_of_the_tokenizer(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    talk = Conversation(TALK[:2])
    encoded = ChatTemplate(path, template=f"{tmp_path}/chat.jinja").encode_conversation(talk, train_on="all")
    assert decoded(path, encoded.tokens) == f"the cat{END}sat on a mat{END}"
    with pytest.raises(DataError, match=r"chat template \S+none\.jinja cannot be read"):
        ChatTemplate(path, template=f"{tmp_path}/none.jinja")


def test_a_template_that_changes_earlier_messages_is_refused(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=FORGETS)
    with pytest.raises(UntokenizableRecordError, match="message 2 changes"):
        trained_text(path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_reaches_nothing_outside_of_its_sandbox(tmp_path: Path, template: str):
    path = save_tokenizer(tmp_path, template=template)
    with pytest.raises(UntokenizableRecordError, match="unsafe|loader"):
        ChatTemplate(path).encode_conversation(Conversation(TALK), train_on="all")


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no chat template"):
        ChatTemplate(save_tokenizer(tmp_path / "tok"))


def whole_text(path: str, conversation: Conversation) -> str:
    return trained_text(path, "all", conversation)[0]


TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = {"function": {"name": "look", "arguments": {"at": "the cat"}}}
SAYS = "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} ARGUMENTS{% endfor %}<|endoftext|>"
WITH_TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|endoftext|>{% endif %}{% if brief %}<|brief|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    + SAYS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
    + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = Conversation(
    [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "sat"}, TALK[1]], tools=TOOLS
)


def test_tools_and_further_variables_reach_the_template_and_are_not_trained_on(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=WITH_TOOLS)
    brief = replace(CALLS, template_kwargs={"brief": True})
    system = (
        '<|system|>[{"type": "function", "function": {"name": "look"}}]<|endoftext|><|brief|><|assistant|>'
    )
    assert whole_text(path, brief).startswith(system + "look")
    said = ['look {"at": "the cat"}<|endoftext|>', "sat on a mat<|endoftext|>"]
    assert trained_text(path, conversation=brief) == said


def test_a_variable_cannot_take_the_place_of_a_parameter(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    with pytest.raises(UntokenizableRecordError, match="tokenize"):
        whole_text(path, Conversation(TALK, template_kwargs={"tokenize": True}))


@pytest.mark.parametrize("written", ["{{ c.function.arguments }}", "{{ '' + c.function.arguments }}"])
def test_a_template_that_takes_arguments_as_text_gets_text(tmp_path: Path, written: str):
    path = save_tokenizer(
        tmp_path / "tok",
        template="{% for m in messages %}" + SAYS.replace("ARGUMENTS", written) + "{% endfor %}",
    )
    assert whole_text(path, CALLS).startswith('look {"at": "the cat"}<|endoftext|>')


@pytest.mark.parametrize("template", [CHAT, MARKED])
@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_a_message_that_a_flag_excludes_is_not_trained_on(tmp_path: Path, template: str, train_on: str):
    path = save_tokenizer(tmp_path / "tok", template=template)
    messages = [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:]]
    talk = read_conversation({}, messages, fields=DataSourceFields(records="messages"))
    said = trained_text(path, train_on, talk)
    assert "ran" in said[-1]
    assert "sat on a mat" not in "".join(said)
    assert ("the cat" in said[0]) == (train_on == "all")


def test_a_message_of_others_that_a_flag_includes_is_refused_or_trained_on(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    talk = Conversation([{**TALK[0], "train": True}, *TALK[1:]])
    with pytest.raises(UntokenizableRecordError, match=r"message 1 \(user\) has train = true"):
        trained_text(path, "assistant", talk)
    assert "the cat" in trained_text(path, "all", talk)[0]


def test_marks_of_another_template_than_the_one_that_is_used_do_not_count(tmp_path: Path):
    path = save_tokenizer(tmp_path / "tok", template=CHAT)
    (tmp_path / "tok" / "chat_template.jinja").write_text(CHAT)
    more = tmp_path / "tok" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(MARKED + "{{ tools[0].function.name }}")
    assert trained_text(path) == [f"sat on a mat{END}\n", f"ran{END}\n"]
    talk = Conversation(TALK, tools=[{"type": "function", "function": {"name": "look"}}])
    assert trained_text(path, conversation=talk) == [f"sat on a mat{END}", f"ran{END}"]


def test_answers_that_a_template_does_not_mark_are_reported(tmp_path: Path):
    last = MARKED.replace("m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}")
    for template, talk, names in (
        (MARKED, TALK, set()),
        (last, TALK, {"answers without {% generation %} marks"}),
    ):
        path = save_tokenizer(tmp_path / "tok", template=template)
        found = ChatTemplate(path).encode_conversation(Conversation(talk), train_on="assistant")
        assert found.unwritten == names


THOUGHT = {"role": "assistant", "content": "ran", "reasoning_content": "away"}
SYSTEM = {"role": "system", "content": "a mat"}
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}"
    "({{ m.reasoning_content | trim }}){% endif %}{{ m.content | tojson }}<|endoftext|>{% endfor %}"
)
ONE_SYSTEM = CHAT.replace(
    "m in messages", "m in messages[:1] + messages[1:] | rejectattr('role', 'eq', 'system') | list"
)


@pytest.mark.parametrize(
    ("template", "messages", "what"),
    [
        (
            CHAT,
            [TALK[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
            "'tool_calls' of message 2",
        ),
        (CHAT, [TALK[0], THOUGHT], "'reasoning_content' of message 2"),
        ("{{ messages[0].content }}", TALK, "'content' of message 2"),
        (
            CHAT.replace("m.content", "m.content.split('</think>')[-1]"),
            [{**THOUGHT, "content": "<think>a</think>b"}],
            "'content' of message 1",
        ),
        (CHAT, [TALK[0], {"role": "assistant", "content": " \n"}], "message 2, of the assistant, is empty"),
    ],
)
def test_an_answer_that_the_template_does_not_write_is_refused(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], what: str
):
    path = save_tokenizer(tmp_path / "tok", template=template)
    with pytest.raises(UntokenizableRecordError, match=what):
        trained_text(path, "all", Conversation(messages))


@pytest.mark.parametrize(
    ("template", "conversation", "names"),
    [
        (THINKS, Conversation([TALK[0], THOUGHT, TALK[2], THOUGHT]), {"reasoning_content of assistant"}),
        (THINKS, Conversation([{**TALK[0], "content": ' "é" \n'}, THOUGHT]), set()),
        (ONE_SYSTEM, Conversation([SYSTEM, SYSTEM, *TALK]), {"content of system"}),
        (CHAT, Conversation([{**TALK[0], "name": "dog"}, TALK[1]], tools=TOOLS), {"name of user", "tools"}),
        (CHAT, Conversation(TALK, template_kwargs={"brief": True}), {"chat_template_kwargs.brief"}),
        (WITH_TOOLS, CALLS, set()),
    ],
)
def test_content_that_is_only_context_is_reported_if_the_template_does_not_write_it(
    tmp_path: Path, template: str, conversation: Conversation, names: set[str]
):
    chat = ChatTemplate(save_tokenizer(tmp_path / "tok", template=template))
    if "assistant" not in str(names):
        conversation = replace(conversation, untrained=frozenset(range(len(conversation.messages))))
    assert chat.encode_conversation(conversation, train_on="all").unwritten == names


def test_text_parts_are_joined_for_a_template_that_takes_a_string(tmp_path: Path):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    talk = Conversation([{"role": "user", "content": parts}])
    for template in (CHAT, CHAT.replace("m.content", "'' + m.content")):
        path = save_tokenizer(tmp_path / "tok", template=template)
        assert whole_text(path, talk).startswith("<|user|>\nthe cat<|endoftext|>")
