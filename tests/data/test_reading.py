"""Shards together hold every record once, wherever files are cut; corrupt ones are located."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.files import SourceFile
from fullshard.data.readers import (
    TEXT_CHARACTERS,
    FilePart,
    Kind,
    RecordKind,
    SourceRecord,
    cut_text,
    read_records,
    split_file,
)
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields

laws = settings(max_examples=60)
TEXT = DataSourceFields()


def cut_at(kind: Kind, path: Path, cuts: list[int]) -> list[FilePart]:
    size = path.stat().st_size
    places = [0, *sorted({cut % size for cut in cuts} - {0}), size]
    return [
        FilePart(kind, str(path), a, b, b - a, b == size) for a, b in zip(places, places[1:], strict=False)
    ]


def parts_of(kind: RecordKind, path: Path) -> list[FilePart]:
    return [*split_file(kind, SourceFile(str(path), path.stat().st_size))]


def read(shards: list[FilePart]) -> list[SourceRecord]:
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
    assert [one.value["text"] for one in found] == texts


@laws
@given(st.text("aé\n ", min_size=1, max_size=60), st.lists(st.integers(0, 200)))
def test_a_text_is_whole_wherever_it_is_cut(tmp_path_factory, text, cuts):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(text)
    found = read(cut_at("text", path, cuts))
    own = [one.value[one.context[0] : len(one.value) - one.context[1]] for one in found]
    assert "".join(own) == text
    assert all(one.value in text for one in found)
    assert [one.begins for one in found] == [True] + [False] * (len(found) - 1)
    assert [one.ends for one in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize(("before", "after"), [(0, 0), (250, 0), (99, 250)])
@pytest.mark.parametrize("unit", ["the cat\n\n sat é\n", "the cat sat é ", "x" * 70_000 + "\n", "x"])
@pytest.mark.parametrize("in_context", [True, False])
def test_a_long_text_is_cut_into_parts_that_join_to_it(before: int, after: int, unit: str, in_context: bool):
    text = unit * (1_200_000 // len(unit))
    whole = SourceRecord(text, lambda: "a", context=(before, after), first_trained=700_000)
    parts = [*cut_text(whole, in_context=in_context)]
    own = [one.value[one.context[0] : len(one.value) - one.context[1]] for one in parts]
    assert "".join(own) == text[before : len(text) - after]
    assert [one.begins for one in parts] == [True] + [False] * (len(parts) - 1)
    assert [one.ends for one in parts] == [False] * (len(parts) - 1) + [True]
    if unit == "x":  # no place to cut it
        assert len(parts) == 1
        return
    assert len(parts) > 2
    assert all(one.endswith(("\n", " ")) for one in own[:-1])
    assert max(map(len, own)) < TEXT_CHARACTERS + 80_000
    at = 0
    for one, piece in zip(parts, own, strict=True):
        begin = at + before - one.context[0]
        assert text[begin : begin + len(one.value)] == one.value
        assert one.first_trained == max(700_000 - begin, 0)
        assert in_context == any(one.context)
        at += len(piece)


def test_a_short_text_is_one_part():
    for text in ("", "a", "the cat\n" * 100_000):
        (part,) = cut_text(SourceRecord(text, lambda: "a"), in_context=True)
        assert (part.value, part.context) == (text, (0, 0))
        assert part.begins
        assert part.ends


@laws
@given(st.integers(0, 8), st.lists(st.integers(0, 200)))
def test_a_corrupt_line_is_located_by_its_number(tmp_path_factory, bad, cuts):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    lines = ["{" if i == bad else json.dumps({"text": "x" * i}) for i in range(9)]
    path.write_text("\n".join(lines))
    corrupt = [one for one in read(cut_at("jsonl", path, cuts)) if isinstance(one.value, DataError)]
    assert [one.where() for one in corrupt] == [f"{path} line {bad + 1}"]
    assert "no JSON" in corrupt[0].value.what


@pytest.mark.parametrize("line", [b'{"text": "\xff"}', b"[1]", b"7", b"{" * 100_000])
def test_a_line_that_is_no_object_is_corrupt(tmp_path: Path, line: bytes):
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + line)
    _, corrupt = read(parts_of("jsonl", tmp_path / "a.jsonl"))
    assert isinstance(corrupt.value, DataError)
    assert corrupt.where().endswith("line 2")


def test_a_byte_order_mark_is_left_out(tmp_path: Path):
    for kind, content in (("text", b"four"), ("jsonl", b'{"text": "four"}')):
        (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + content)
        (record,) = read(parts_of(kind, tmp_path / "a"))
        assert record.value in ("four", {"text": "four"})


def packed_by_arrow(codec: str, data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    packed = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(packed, codec) as stream:
        stream.write(data)
    return packed.getvalue().to_pybytes()


PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: packed_by_arrow("zstd", data),
    ".lz4": lambda data: packed_by_arrow("lz4", data),
}


@pytest.mark.parametrize("ending", PACKED)
def test_compressed_files_are_read_whole_or_refused(tmp_path: Path, ending: str):
    path = tmp_path / f"a.jsonl{ending}"
    first, rest = PACKED[ending](b'{"text": "a"}\n'), PACKED[ending](b'{"text": "b"}\n{')
    path.write_bytes(first + rest)  # as made by appending
    first_row, second_row, corrupt = read(parts_of("jsonl", path))
    assert (first_row.value, second_row.value) == ({"text": "a"}, {"text": "b"})
    assert corrupt.where() == f"{path} line 3"
    assert [one.value for one in read(parts_of("text", path))] == ['{"text": "a"}\n{"text": "b"}\n{']
    for broken in (first + rest[:-4], b"not compressed", first[:9] + b"\xff" * 20 + first[29:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="cannot be read"):
            read(parts_of("jsonl", path))


def test_an_object_over_several_lines_is_refused_with_the_way_to_write_it(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}, indent=2))
    corrupt = read(parts_of("jsonl", tmp_path / "a.jsonl"))[0]
    assert isinstance(corrupt.value, DataError)
    assert corrupt.value.what.endswith("an object has to be in one line")


def test_parquet_rows_are_read_group_by_group(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{i}" for i in range(25)], "other": list(range(25))})
    parquet.write_table(table, path, row_group_size=10)
    shards = parts_of("parquet", path)
    assert len(shards) == 3
    assert [one.value for one in read(shards)] == [{"text": f"{i}"} for i in range(25)]
    assert read(shards)[12].where() == f"{path} row group 1 row 2"
    with pytest.raises(DataError, match=r"(?s)no field 'story'.*fields text, other"):
        list(read_records(shards[0], DataSourceFields(text_field="story")))
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="not a parquet file"):
        parts_of("parquet", path)


def test_a_parquet_file_whose_first_row_is_broken_is_one_corrupt_record(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"other": ["a" * 999] * 9}), path, compression="none", use_dictionary=False
    )
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * 20 + data[24:])  # the header of the first page
    (corrupt,) = read(parts_of("parquet", path))
    assert isinstance(corrupt.value, DataError)
    offsets, letters = pyarrow.py_buffer(bytes(4) + (2).to_bytes(4, "little")), pyarrow.py_buffer(b"\xff\xfe")
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, letters])
    parquet.write_table(pyarrow.table({"other": text}), path)
    with pytest.raises(DataError, match="the fields other"):
        read(parts_of("parquet", path))


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_file_with_an_array_of_objects_gives_its_objects(tmp_path: Path, ending: str):
    rows = [{"text": "a"}, 7, {"text": "é", "other": [1]}]

    def read(data: bytes) -> list[SourceRecord]:
        path = tmp_path / f"a{ending}"
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        parts = split_file("jsonl", SourceFile(str(path), path.stat().st_size))
        return [one for part in parts for one in read_records(part, DataSourceFields())]

    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        one, corrupt, other = read(text.encode())
        assert (one.value, other.value) == (rows[0], rows[2])
        assert isinstance(corrupt.value, DataError)
        assert corrupt.where().startswith(str(tmp_path / f"a{ending}"))
    assert len(read(b"\xef\xbb\xbf " + json.dumps(rows).encode())) == 3
    with pytest.raises(DataError, match="not a JSON array"):
        read(json.dumps(rows).encode()[:-1])
