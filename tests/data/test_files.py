"""Files are found alike on every machine, and bad ones are refused by name."""

import sysconfig
from pathlib import Path

import pytest

from fullshard.data.files import matching_file_sizes, stdlib_file_sizes
from fullshard.data.readers import read_records, split_file_into_parts
from fullshard.errors import DataError
from fullshard.spec.data_section import DataSourceFields


def test_files_are_listed_once_by_name_without_empty_ones(tmp_path: Path):
    for name, text in (("b", b"bb"), ("a", b"abc"), ("empty", b""), ("sub/c", b"c"), ("sub-c", b"c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    sizes = matching_file_sizes([f"{tmp_path}/**", f"{tmp_path}/a"])
    assert [path.relative_to(tmp_path).as_posix() for path in sizes] == ["a", "b", "sub-c", "sub/c"]
    assert [*sizes.values()] == [3, 2, 1, 1]


def test_stdlib_is_source_without_tests():
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix() for path in stdlib_file_sizes()}
    assert {"json/decoder.py", "dataclasses.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_stdlib_without_source_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no source"):
        stdlib_file_sizes(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        stdlib_file_sizes(tmp_path / "absent")


def test_pattern_without_a_file_is_refused(tmp_path: Path):
    (tmp_path / "directory.txt").mkdir()
    with pytest.raises(DataError, match="matches no file"):
        matching_file_sizes([f"{tmp_path}/*.txt"])


def test_empty_files_alone_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no text"):
        matching_file_sizes([f"{tmp_path}/*.txt"])


def test_dangling_link_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        matching_file_sizes([f"{tmp_path}/*.txt"])


def test_device_is_refused():
    with pytest.raises(DataError, match="not a regular file"):
        matching_file_sizes(["/dev/null"])


def test_file_that_shrank_or_went_away_is_refused(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("four")
    (part,) = split_file_into_parts("text", path, size=4)
    path.write_text("two")
    with pytest.raises(DataError, match="changed while it was read"):
        list(read_records(part, DataSourceFields()))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_records(part, DataSourceFields()))
