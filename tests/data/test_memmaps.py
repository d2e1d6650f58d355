"""Token files of other programs are mapped document by document; other files are refused."""

import struct
from pathlib import Path

import numpy as np
import pytest

from fullshard.data.memmaps import open_memmap_stores
from fullshard.data.token_store import TokenStore, make_cache_directory, no_heartbeat
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data.test_corpus import documents

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [9, 10, 11, 12, 1]]
JOINED = [token for document in DOCUMENTS for token in document]


def stores(tmp_path: Path, pattern: str, **fields: object) -> list[TokenStore]:
    given = DataSourceFields(paths=(f"{tmp_path}/{pattern}",), **fields)
    root = make_cache_directory(str(tmp_path / "cache"))
    return open_memmap_stores(given, root=root, alive=no_heartbeat)


def write_index(path: Path, sizes: list[int], first: list[int], *, code: int = 8, itemsize: int = 2) -> None:
    places = np.cumsum([0, *sizes[:-1]]) * itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(first))
    arrays = (np.array(sizes, "<i4"), np.array(places, "<i8"), np.array(first, "<i8"))
    path.write_bytes(head + b"".join(array.tobytes() for array in arrays))


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint32", "int64"])
def test_arrays_and_raw_files_are_cut_at_the_token_that_ends_a_document(tmp_path: Path, dtype: str):
    array = np.array(JOINED, dtype=dtype)
    np.save(tmp_path / "a.npy", array)
    array.tofile(tmp_path / "b.bin")
    for pattern, fields in (("a.npy", {}), ("b.bin", {"dtype": dtype})):
        (store,) = stores(tmp_path, pattern, eod_token=1, **fields)
        assert documents(store) == DOCUMENTS
        assert store.vocabulary_size == 13
        assert isinstance(store.tokens, np.memmap)
        assert documents(stores(tmp_path, pattern, **fields)[0]) == [JOINED]


def test_rows_of_an_array_are_documents(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    assert documents(stores(tmp_path, "a.npy")[0]) == [[0, 1, 2], [3, 4, 5]]


def test_an_index_file_gives_dtype_and_documents(tmp_path: Path):
    np.array(JOINED, dtype="uint16").tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", [4, 2, 3, 2], [0, 1, 2, 4])
    for pattern in ("a.bin", "a.idx", "a.*"):
        (store,) = stores(tmp_path, pattern)
        assert documents(store) == DOCUMENTS
        assert store.warnings == []


@pytest.mark.parametrize("fields", [{"dtype": "int32"}, {"eod_token": 1}])
def test_settings_that_contradict_what_a_file_says_are_refused(tmp_path: Path, fields: dict[str, object]):
    np.array(JOINED, dtype="uint16").tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", [4, 2, 3, 2], [0, 1, 2, 4])
    np.save(tmp_path / "a.npy", np.arange(6, dtype="uint16").reshape(2, 3))
    for pattern in ("a.bin", "a.npy"):
        assert stores(tmp_path, pattern, dtype="uint16")
        with pytest.raises(DataError, match=r"another dtype|says itself where documents end"):
            stores(tmp_path, pattern, **fields)


def test_empty_documents_of_an_index_are_counted(tmp_path: Path):
    np.array(JOINED, dtype="uint16").tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", [4, 0, 2, 3, 2], [0, 1, 2, 3, 5])
    for _ in range(2):  # the second time from the cache
        (store,) = stores(tmp_path, "a.bin")
        assert documents(store) == DOCUMENTS
        assert store.warnings == ["1 documents of a.bin are empty, and left out"]


def test_several_files_are_several_stores(tmp_path: Path):
    for name in "ba":
        np.save(tmp_path / f"{name}.npy", np.arange(5))
    assert [store.name for store in stores(tmp_path, "*.npy")] == ["a.npy", "b.npy"]


def test_the_key_follows_the_content_of_the_file(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(5))
    before = stores(tmp_path, "a.npy")[0].key
    assert stores(tmp_path, "a.npy", eod_token=3)[0].key != before
    np.save(tmp_path / "a.npy", np.arange(6))
    assert stores(tmp_path, "a.npy")[0].key != before


@pytest.mark.parametrize(
    ("name", "data", "fields", "message"),
    [
        ("a.bin", b"1234", {}, r"does not state its dtype(?s:.)*data\.dtype"),
        ("a.bin", b"123", {"dtype": "uint16"}, r"whole tokens(?s:.)*3 bytes, for a dtype of 2"),
        ("a.bin", b"\xff\xff", {"dtype": "int16"}, "not a token(?s:.)*-1, below 0"),
        ("a.npy", b"text", {}, "not an array of tokens"),
    ],
)
def test_files_that_hold_no_tokens_are_refused(
    tmp_path: Path, name: str, data: bytes, fields: dict[str, object], message: str
):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        stores(tmp_path, name, **fields)


@pytest.mark.parametrize("array", [np.ones(3), np.ones((1, 1, 1), int), np.array([], int)])
def test_arrays_that_hold_no_tokens_are_refused(tmp_path: Path, array: np.ndarray):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match="not an array of tokens"):
        stores(tmp_path, "a.npy")


def test_an_array_that_is_not_aligned_is_refused_with_the_byte_at_which_it_begins(tmp_path: Path):
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (3,)}\n"
    data = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(12)
    begin = len(data) - 12
    assert begin % 4
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(DataError, match=f"begins at byte {begin}, which is not a multiple of 4"):
        stores(tmp_path, "a.npy")


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path):
    np.array(JOINED, dtype="uint16").tofile(tmp_path / "a.bin")
    index = tmp_path / "a.idx"
    for change, message in (
        (lambda: index.write_bytes(b"no index"), "not an index of tokens"),
        (lambda: write_index(index, [4, 2, 5], [0, 1, 2, 3], code=6), "cannot be used"),
        (lambda: write_index(index, [4, 2, 50], [0, 1, 2, 3]), "does not fit"),
        (lambda: write_index(index, [4, 2, 5], [0, 1, 2]), "does not fit"),
        (lambda: index.write_bytes(index.read_bytes()[:-4]), "cut off"),
    ):
        change()
        with pytest.raises(DataError, match=message):
            stores(tmp_path, "a.bin")
