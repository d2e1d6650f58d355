"""Shards together hold every record once, wherever files are cut; corrupt ones are told by their place."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.readers import (
    CorruptRecord,
    FilePart,
    Kind,
    TextRecord,
    read_records,
    split_file_into_parts,
)
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSourceFields

laws = settings(max_examples=60)
TEXT = DataSourceFields()


def cut_at(kind: Kind, path: Path, cuts: list[int]) -> list[FilePart]:
    size = path.stat().st_size
    places = [0, *sorted({cut % size for cut in cuts} - {0}), size]
    return [
        FilePart(kind, str(path), a, b, b - a, b == size) for a, b in zip(places, places[1:], strict=False)
    ]


def read(shards: list[FilePart]) -> list[TextRecord | CorruptRecord]:
    return [one for shard in shards for one in read_records(shard, TEXT)]


@laws
@given(
    st.lists(st.text('aé\n"\\ ', max_size=12), min_size=1, max_size=12),
    st.lists(st.integers(0, 400)),
    st.booleans(),
)
def test_every_json_line_is_read_once_wherever_the_file_is_cut(tmp_path_factory, texts, cuts, newline):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + ("\n" if newline else ""))
    found = read(cut_at("jsonl", path, cuts))
    assert [one.value["text"] for one in found if isinstance(one, TextRecord)] == texts


@laws
@given(st.text("aé\n ", min_size=1, max_size=60), st.lists(st.integers(0, 200)))
def test_a_text_is_whole_wherever_it_is_cut(tmp_path_factory, text, cuts):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text)
    found = read(cut_at("text", path, cuts))
    assert "".join(one.value for one in found if isinstance(one, TextRecord)) == text
    assert [one.begins for one in found] == [True] + [False] * (len(found) - 1)
    assert [one.ends for one in found] == [False] * (len(found) - 1) + [True]


@laws
@given(st.integers(0, 8), st.lists(st.integers(0, 200)))
def test_a_corrupt_line_is_told_with_its_number(tmp_path_factory, bad, cuts):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = ["{" if i == bad else json.dumps({"text": "x" * i}) for i in range(9)]
    path.write_text("\n".join(lines))
    told = [one for one in read(cut_at("jsonl", path, cuts)) if isinstance(one, CorruptRecord)]
    assert [one.where() for one in told] == [f"{path} line {bad + 1}"]
    assert "no JSON" in told[0].why


@pytest.mark.parametrize("line", [b'{"text": "\xff"}', b"[1]", b"7", b"{" * 100_000])
def test_a_line_that_is_no_object_is_corrupt(tmp_path: Path, line: bytes):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + line)
    _, told = read(split_file_into_parts("jsonl", tmp_path / "a.jsonl", size=3 + len(line)))
    assert isinstance(told, CorruptRecord)
    assert told.where().endswith("line 2")


def test_text_that_is_no_utf8_is_told_with_the_byte(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"four\xff")
    (told,) = read(split_file_into_parts("text", tmp_path / "a.txt", size=5))
    assert isinstance(told, CorruptRecord)
    assert told.where() == f"{tmp_path}/a.txt at byte 4"


def test_packed_lines_are_read(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n{'))
    one, other, told = read(split_file_into_parts("jsonl", path, size=path.stat().st_size))
    assert (one.value, other.value) == ({"text": "a"}, {"text": "b"})
    assert told.where() == f"{path} line 3"
    path.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be read"):
        read(split_file_into_parts("jsonl", path, size=7))


def test_parquet_rows_are_read_group_by_group(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{i}" for i in range(25)], "other": list(range(25))})
    parquet.write_table(table, path, row_group_size=10)
    shards = split_file_into_parts("parquet", path, size=path.stat().st_size)
    assert len(shards) == 3
    assert [one.value for one in read(shards)] == [{"text": f"{i}"} for i in range(25)]
    assert read(shards)[12].where() == f"{path} row group 1 row 2"
    with pytest.raises(DataError, match=r"(?s)no field 'story'.*fields text, other"):
        list(read_records(shards[0], DataSourceFields(text_field="story")))
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a parquet file"):
        split_file_into_parts("parquet", path, size=4)
