"""Files in object stores and on web servers give the tokens of files on a disk, and no secret is printed."""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.data.files import list_matching_files, open_source_file
from fullshard.errors import DataError, SpecError
from tests.checkpoint.store import served
from tests.data.samples import text, texts_file
from tests.data.test_corpus import documents, store_of, write_source
from tests.data.web import Web, serving

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as running:
        yield running


def found(pattern: str) -> list[str]:
    return [file.path for file in list_matching_files([pattern], kind="jsonl")]


def test_directories_and_globs_of_a_store_are_as_on_a_disk():
    memory = fsspec.filesystem("memory")
    for name in ("a.jsonl", "y/b.json.gz", "y/c.csv", ".hidden/d.jsonl", "y/.e.jsonl", "_SUCCESS"):
        memory.pipe(f"/listed/{name}", b"" if name == "_SUCCESS" else b"{}")
    every = ["memory://listed/a.jsonl", "memory://listed/y/b.json.gz"]
    assert found("memory://listed") == found("memory://listed/") == every
    assert found("memory://listed/*/*.gz") == every[1:]
    assert found("memory://listed/a.jsonl") == every[:1]
    memory.pipe("/brackets/a [1].jsonl", b"{}")
    assert found("memory://brackets/a [1].jsonl") == ["memory://brackets/a [1].jsonl"]
    for absent in ("memory://listed/absent", "memory://listed/*.txt"):
        with pytest.raises(DataError, match="matches no file"):
            found(absent)
    with pytest.raises(DataError, match="directory without a file of parquet"):
        list_matching_files(["memory://listed"], kind="parquet")
    with pytest.raises(SpecError, match="names no bucket"):
        found("memory://")


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_files_in_a_store_give_the_tokens_of_files_on_a_disk(tmp_path: Path, kind: str):
    _, settings = write_source(kind, tmp_path / "data")
    local = store_of(tmp_path, **settings)
    url = f"memory://{kind}-{tmp_path.name}"
    fsspec.filesystem("memory").put(f"{tmp_path}/data", f"/{kind}-{tmp_path.name}", recursive=True)
    for paths in (url, f"{url}/*"):
        assert documents(store_of(tmp_path, **{**settings, "paths": (paths,)})) == documents(local)


def test_a_store_of_s3_serves_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = texts_file(tmp_path / "a.jsonl", 40)
    with served(tmp_path) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        s3, url = fsspec.filesystem("s3"), server.url("data")
        s3.put(path, f"{url}/a.jsonl")
        s3.pipe(f"{url}/b/c.jsonl.gz", gzip.compress(Path(path).read_bytes()))
        stores = [
            store_of(tmp_path, source="jsonl", paths=(each,))
            for each in (f"{url}/**/*.jsonl*", f"{url}/", url)
        ]
        assert len({store.key for store in stores}) == 1
        assert stores[0].document_count == 80
        with pytest.raises(DataError, match="no such bucket"):
            found("s3://nowhere/a.jsonl")


def test_a_file_of_a_web_server_is_read_once_until_it_changes(tmp_path: Path, web: Web):
    web.files["/a.jsonl"] = Path(texts_file(tmp_path / "a.jsonl", 40)).read_bytes()
    settings = {"source": "jsonl", "paths": (f"{web.url}/a.jsonl?signature=SECRET",)}
    first = store_of(tmp_path, **settings)
    assert first.document_count == 40
    assert "SECRET" not in first.name
    web.gets.clear()
    assert store_of(tmp_path, **settings).key == first.key
    assert web.gets == []
    web.files["/a.jsonl"] = web.files["/a.jsonl"].replace(text(1).encode(), b"another")
    assert store_of(tmp_path, **settings).key != first.key


def test_a_read_that_fails_once_is_tried_again(web: Web):
    web.files["/a.txt"] = os.urandom(5 << 20)
    answers = iter([200, 500])
    web.status = lambda path: next(answers, 200)  # the size, then a range
    with open_source_file(f"{web.url}/a.txt") as file:
        assert file.read() == web.files["/a.txt"]
    assert len(web.gets) > 1


def test_a_web_server_that_refuses_is_named_without_secrets(web: Web):
    web.files["/a.jsonl"] = b"{}"
    web.status = lambda path: 403
    with pytest.raises(DataError, match=r"/a\.jsonl cannot be read(?s:.)*403") as raised:
        found(f"{web.url.replace('//', '//user:SECRET@')}/a.jsonl?signature=SECRET")
    assert "SECRET" not in str(raised.value)


def test_a_web_server_without_versions_or_ranges_is_refused(web: Web):
    web.files["/a.jsonl"] = os.urandom(9 << 20)
    web.has_versions = False
    with pytest.raises(DataError, match="neither a digest"):
        found(f"{web.url}/a.jsonl")
    web.serves_ranges = False
    with (
        pytest.raises(DataError, match="does not serve ranges"),
        open_source_file(f"{web.url}/a.jsonl") as file,
    ):
        file.read(1)
