"""Documents are found, split and read alike on every machine, and bad ones are refused by name."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data.documents import Document, stdlib_documents, text_documents
from fullshard.data.split import hold_out, pack, shuffle
from fullshard.errors import DataError

laws = settings(max_examples=50)
sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=40)
fractions = st.floats(0, 0.9)


def documents_of(sizes: list[int]) -> list[Document]:
    return [Document(f"{i}.txt", Path(f"{i}.txt"), size) for i, size in enumerate(sizes)]


def byte_positions(documents: list[Document]) -> list[tuple[str, int]]:
    return [(d.name, d.offset + i) for d in documents for i in range(d.size)]


@laws
@given(sizes, fractions)
def test_every_byte_is_either_trained_on_or_held_out(sizes: list[int], fraction: float):
    training, held_out = hold_out(documents_of(sizes), fraction=fraction)
    assert sorted(byte_positions(training) + byte_positions(held_out)) == sorted(
        byte_positions(documents_of(sizes))
    )


@laws
@given(sizes, fractions)
def test_about_the_fraction_is_held_out(sizes: list[int], fraction: float):
    _, held_out = hold_out(documents_of(sizes), fraction=fraction)
    asked = round(fraction * sum(sizes))
    assert asked / 2 <= sum(document.size for document in held_out) <= asked


@laws
@given(sizes, fractions, st.randoms())
def test_split_and_order_do_not_depend_on_how_the_files_are_listed(sizes: list[int], fraction: float, random):
    listed = documents_of(sizes)
    mixed = random.sample(listed, len(listed))
    assert hold_out(listed, fraction=fraction) == hold_out(mixed, fraction=fraction)
    assert shuffle(listed, seed=3) == shuffle(mixed, seed=3)


def test_split_is_the_same_on_every_machine():
    training, held_out = hold_out(documents_of([10] * 10), fraction=0.3)
    assert [document.name for document in held_out] == ["4.txt", "3.txt", "8.txt"]
    assert [document.name for document in shuffle(training, seed=0)][:3] == ["0.txt", "6.txt", "2.txt"]


def test_one_document_has_its_tail_held_out():
    training, held_out = hold_out(documents_of([100]), fraction=0.25)
    assert [(d.offset, d.size) for d in training + held_out] == [(0, 75), (75, 25)]


def test_seeds_order_documents_differently():
    listed = documents_of([1] * 20)
    assert shuffle(listed, seed=0) != shuffle(listed, seed=1)


def test_packed_documents_have_one_separator_between_them(tmp_path: Path):
    for name, text in (("a", b"abc"), ("b", b"\xff\xfe"), ("empty", b""), ("sub/c", b"c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    documents = text_documents([f"{tmp_path}/**", f"{tmp_path}/a"])
    assert [document.name for document in documents] == ["a", "b", "sub/c"]
    assert pack(documents).tobytes() == b"abc\0\xff\xfe\0c"
    assert pack(list(documents[0].cut(1))).tobytes() == b"a\0bc"


def test_stdlib_is_source_without_tests():
    names = {document.name for document in stdlib_documents()}
    assert {"json/decoder.py", "dataclasses.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_stdlib_without_source_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no source"):
        stdlib_documents(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        stdlib_documents(tmp_path / "absent")


def test_pattern_without_a_file_is_refused(tmp_path: Path):
    (tmp_path / "directory.txt").mkdir()
    with pytest.raises(DataError, match="matches no file"):
        text_documents([f"{tmp_path}/*.txt"])


def test_empty_files_alone_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no text"):
        text_documents([f"{tmp_path}/*.txt"])


def test_dangling_link_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "absent")
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        text_documents([f"{tmp_path}/*.txt"])


def test_device_is_refused():
    with pytest.raises(DataError, match="no regular file"):
        text_documents(["/dev/null"])


def test_file_with_the_separator_is_refused(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(b"ab\0cd")
    with pytest.raises(DataError, match=r"(?s)a\.bin is no plain text.*offset 2"):
        pack(text_documents([f"{tmp_path}/a.bin"]))


def test_file_that_shrank_or_went_away_is_refused(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("four")
    documents = text_documents([str(path)])
    path.write_text("two")
    with pytest.raises(DataError, match="changed while it was read"):
        pack(documents)
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        pack(documents)
