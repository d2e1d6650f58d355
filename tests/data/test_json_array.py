"""A file with an array of objects gives its objects; another file is refused."""

import gzip
import json
from pathlib import Path

import pytest

from fullshard.data.files import SourceFile
from fullshard.data.readers import CorruptRecord, TextRecord, read_records, split_file_into_parts
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSourceFields


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
    assert len(read(b"\xef\xbb\xbf " + json.dumps(rows).encode())) == 3
    with pytest.raises(DataError, match="not a JSON array"):
        read(json.dumps(rows).encode()[:-1])
