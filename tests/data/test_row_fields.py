"""Fields are found by name, nested ones by dotted names, in every source; a row without one is reported."""

from pathlib import Path
from typing import Any

import pytest

from fullshard.data.files import SourceFile
from fullshard.data.readers import read_records, split_file
from fullshard.data.row_fields import ABSENT, look_up_field, suggest_settings
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data.samples import write_rows
from tests.data.test_corpus import documents, store_of

TALK = [{"role": "user", "content": "x"}]
KINDS = ("jsonl", "parquet", "datasets")


def test_dots_lead_to_nested_fields_and_a_field_of_the_whole_name_wins():
    row: dict[str, Any] = {"a": {"b": {"c": 1}, "b.d": 2}, "x.y": {"z": 3}, "x": {"y": {"z": 4}}, "n": None}
    wanted = {"a.b.c": 1, "a.b.d": 2, "x.y.z": 3, "a.b": {"c": 1}, "a.c": ABSENT, "n.a": ABSENT, "n": None}
    assert {name: look_up_field(row, name) for name in wanted} == wanted


def test_parquet_reads_only_the_named_part_of_a_nested_column(tmp_path: Path):
    rows = [{"data": {"text": "a", "unused": "b"}, "more": "c"}]
    (path,) = write_rows("parquet", tmp_path, rows)["paths"]
    (part,) = split_file("parquet", SourceFile(path, 99))
    (record,) = read_records(part, DataSourceFields(text_field="data.text"))
    assert record.value == {"data": {"text": "a"}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_the_field_is_reported_with_the_lines_to_write(tmp_path: Path, kind: str):
    rows = [{"id": "7", "data": {"body": "the cat sat"}}]
    settings = write_rows(kind, tmp_path, rows)
    with pytest.raises(DataError, match=r'(?s)no field \'text\' in \S+rows.*text_field = "data\.body"'):
        store_of(tmp_path, **settings)
    assert store_of(tmp_path, **settings, text_field="data.body").document_count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_text_is_null_is_reported_or_left_out(tmp_path: Path, kind: str):
    settings = write_rows(kind, tmp_path, [{"text": "a"}, {"text": None}, {"text": "b"}])
    with pytest.raises(DataError, match=r"(?s)rows\S+ (line 2|row group 0 row 1|row 1).*null"):
        store_of(tmp_path, **settings)
    store = store_of(tmp_path, **settings, on_error="skip")
    assert (documents(store), store.notes.skipped) == ([[97, 0], [98, 0]], 1)


@pytest.mark.parametrize(
    ("row", "lines"),
    [
        (
            {"a": {"m": [{"role": "user", "content": "x"}]}},
            ['records = "messages"', 'messages_field = "a.m"'],
        ),
        ({"id": "1", "body": "the text"}, ['records = "text"', 'text_field = "body"']),
        (
            {"instruction": "a", "output": "b"},
            ['records = "completion"', 'prompt_field = "instruction"', 'completion_field = "output"'],
        ),
        ({"completion": TALK, "prompt": TALK}, ['records = "messages"', 'messages_field = "prompt"']),
        (
            {"rejected": TALK, "chosen": TALK, "prompt": TALK},
            ['records = "messages"', 'messages_field = "prompt"', 'completion_field = "chosen"'],
        ),
        ({"messages": TALK, "prompt": "x"}, ['records = "messages"', 'messages_field = "messages"']),
        ({"ids": [1, 2]}, ['records = "tokens"', 'tokens_field = "ids"']),
        ({"n": 7}, []),
    ],
)
def test_settings_that_fit_a_row_are_suggested(row: dict[str, Any], lines: list[str]):
    assert suggest_settings(row) == lines
