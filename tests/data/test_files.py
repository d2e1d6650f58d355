"""Files are found alike on every machine, and bad ones are refused by name."""

import sysconfig
from pathlib import Path

import pytest

from fullshard.data.files import FileKind, SourceFile, list_matching_files, list_stdlib_files
from fullshard.data.readers import read_records, split_file
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields


def test_files_are_listed_once_by_name_without_empty_ones(tmp_path: Path):
    for name, text in (("b", b"bb"), ("a", b"abc"), ("empty", b""), ("sub/c", b"c"), ("sub-c", b"c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    files = list_matching_files([f"{tmp_path}/**", f"{tmp_path}/a"], kind="text")
    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in files] == [
        "a",
        "b",
        "sub-c",
        "sub/c",
    ]
    assert [file.size for file in files] == [3, 2, 1, 1]


@pytest.mark.parametrize("name", ["data [v2].txt", "what?*.txt", "[x] {a}/50 % #1 ü.txt"])
def test_a_path_that_exists_is_no_pattern(tmp_path: Path, name: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for other in (name, "data v.txt", "whatx.txt"):
        (tmp_path / other).write_text("text")
    assert [file.path for file in list_matching_files([f"{tmp_path}/{name}"], kind="text")] == [
        str(tmp_path / name)
    ]


def test_a_directory_that_exists_is_no_pattern_in_front_of_one(tmp_path: Path):
    (tmp_path / "run [1]").mkdir()
    (tmp_path / "run [1]" / "a.txt").write_text("text")
    for pattern in ("run [1]/*.txt", "run [1]", "run */*.txt"):
        assert len(list_matching_files([f"{tmp_path}/{pattern}"], kind="text")) == 1


def test_stdlib_is_source_without_tests():
    root = Path(sysconfig.get_path("stdlib"))
    names = {Path(file.path).relative_to(root).as_posix() for file in list_stdlib_files()}
    assert {"json/decoder.py", "dataclasses.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_stdlib_without_source_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no source"):
        list_stdlib_files(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        list_stdlib_files(tmp_path / "absent")


def test_a_directory_stands_for_its_files_of_the_kind(tmp_path: Path):
    names = (
        "a.jsonl",
        "part-0.json.gz",
        "year=1/b.ndjson.zst",
        "_SUCCESS",
        ".a.jsonl.crc",
        ".git/c.jsonl",
        "c.csv",
    )
    for name in (*names, "year=1/part-0.snappy.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")

    def found(kind: FileKind, pattern: str) -> list[str]:
        files = list_matching_files([f"{tmp_path}/{pattern}"], kind=kind)
        return [Path(file.path).relative_to(tmp_path).as_posix() for file in files]

    assert found("jsonl", "") == ["a.jsonl", "part-0.json.gz", "year=1/b.ndjson.zst"]
    assert found("parquet", "year=*/") == ["year=1/part-0.snappy.parquet"]
    assert found("text", "year=1") == ["year=1/b.ndjson.zst", "year=1/part-0.snappy.parquet"]
    with pytest.raises(DataError, match=r"directory without a file of memmap(?s:.)*\*\.npy or"):
        found("memmap", "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Path.touch, "no text"),
        (Path.mkdir, "matches no file"),
        (lambda path: path.symlink_to("absent"), r"a\.txt cannot be read"),
    ],
)
def test_patterns_without_a_readable_text_are_refused(tmp_path: Path, make, message: str):
    make(tmp_path / "a.txt")
    with pytest.raises(DataError, match=message):
        list_matching_files([f"{tmp_path}/*.txt"], kind="text")
    with pytest.raises(DataError, match="not a regular file"):
        list_matching_files(["/dev/null"], kind="text")


def test_file_that_shrank_or_went_away_is_refused(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("four")
    (part,) = split_file("text", SourceFile(str(path), 4))
    path.write_text("two")
    with pytest.raises(DataError, match="changed while it was read"):
        list(read_records(part, DataSourceFields()))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_records(part, DataSourceFields()))
