"""An array of objects is read element by element, wherever its bytes are cut; what is none is refused."""

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.files import SourceFile
from fullshard.data.json_array import read_json_array
from fullshard.data.readers import CorruptRecord, TextRecord, read_records, split_file_into_parts
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSourceFields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('aé😀\n"\\', max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


class Trickle(io.BytesIO):
    """Gives a few bytes at a time, however many are asked for."""

    most = 3

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self.most if size is None or size < 0 else min(size, self.most))


@settings(max_examples=100)
@given(st.lists(VALUES, max_size=6), st.booleans(), st.integers(1, 40), st.sampled_from([None, 2]))
def test_an_array_is_read_wherever_it_is_cut(values, ascii_only, most, indent):
    text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    file = Trickle(f" {text}\n".encode())
    file.most = most
    assert list(read_json_array(file)) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "cut off"),
        ("[1 2]", "where ',' or ']' belongs"),
        ("[1] [2]", "behind the end"),
        ("[1,]", "Expecting value"),
        ('["a', "Unterminated"),
        ("[\udc80]", "decode"),
    ],
)
def test_what_is_not_one_array_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        list(read_json_array(io.BytesIO(text.encode("utf-8", "surrogateescape"))))


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_file_with_an_array_of_objects_gives_its_objects(tmp_path: Path, ending: str):
    rows = [{"text": "a"}, 7, {"text": "é", "other": [1]}]

    def read(data: bytes) -> list[TextRecord | CorruptRecord]:
        path = tmp_path / f"a{ending}"
        path.write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
        parts = split_file_into_parts("jsonl", SourceFile(str(path), path.stat().st_size))
        return [one for part in parts for one in read_records(part, DataSourceFields())]

    for text in (json.dumps(rows), json.dumps(rows, indent=2), "\n".join(map(json.dumps, rows))):
        one, corrupt, other = read(text.encode())
        assert (one.value, other.value) == (rows[0], rows[2])
        assert isinstance(corrupt, CorruptRecord)
        assert corrupt.where().startswith(str(tmp_path / f"a{ending}"))
    with pytest.raises(DataError, match=r"not a JSON array(?s:.)*cut off, in or after element 4"):
        read(json.dumps(rows).encode()[:-1])
