"""Ranks of several hosts tokenize a source together; the store has the bytes that one host writes."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.data.sources import open_token_stores
from fullshard.data.token_store import make_cache_directory
from fullshard.errors import DataError
from tests.data.samples import run_of

RANKS_PER_HOST = 4096  # of which a test starts the first; a chunk of 4 GiB / 4096 = TASK_BYTES is one task
TASK_BYTES = 1 << 20


def write_texts(directory: Path) -> dict[str, Any]:
    """Writes a text of three tasks, the last of which cannot be tokenized and has no token, and another."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"x": 0, "</s>": 1}, unk_token="none"))  # any other word is an error
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(f"{directory}.json")
    (directory / "a.txt").write_text("x x x x\n" * (2 * TASK_BYTES // 8 + 99) + "y")
    (directory / "b.txt").write_text("x")
    settings = {"tokenizer": f"{directory}.json", "on_error": "skip"}
    return {"source": "text", "paths": (str(directory),), **settings}


def write_rows_of_tokens(directory: Path) -> dict[str, Any]:
    """Writes rows of tokens, some of which are empty or corrupt, and a mask that excludes the last ones."""
    counts = [0 if i % 5 == 1 else 12_000 for i in range(40)]
    rows = [json.dumps({"input_ids": [i] * n, "loss_mask": [int(i < 30)] * n}) for i, n in enumerate(counts)]
    (directory / "a.jsonl").write_text("\n".join(row[i % 7 == 0 :] for i, row in enumerate(rows)))
    return {"source": "jsonl", "paths": (str(directory),), "records": "tokens", "on_error": "skip"}


def open_store(cache: str, settings: dict[str, Any], alive: Callable[[], object] = lambda: None) -> None:
    section = run_of(Path(cache), **settings).data
    root = make_cache_directory(section.cache)
    open_token_stores(section, section, root=root, alive=alive)


@dataclass(frozen=True)
class Job:
    """A source that hosts tokenize, whose digests are known.

    caches: of the hosts in turn
    one: the cache of one host that has tokenized it
    """

    settings: dict[str, Any]
    caches: list[str]
    one: str


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    data, caches, one = tmp_path / "data", [str(tmp_path / name) for name in "ab"], str(tmp_path / "one")
    data.mkdir()
    settings = getattr(request, "param", write_rows_of_tokens)(data)
    for path in data.iterdir():
        os.utime(path, (time.time() - 100,) * 2)
    open_store(one, settings)
    for cache in caches:
        shutil.copytree(f"{one}/digests", f"{cache}/digests")
    return Job(settings, caches, one)


def open_store_on_hosts(job: Job, failing: int = -1) -> str | None:
    """Opens the store on each rank's host. Each waits in its first chunk for the others, then one fails."""
    host, hosts, calls = dist.get_rank(), dist.get_world_size(), list[int]()

    def wait() -> None:
        calls.append(1)
        if len(calls) == 1:
            dist.barrier()
            if host == failing:
                raise DataError("this rank failed.")

    numbers = {"RANK": host * RANKS_PER_HOST, "WORLD_SIZE": hosts * RANKS_PER_HOST}
    os.environ |= {name: str(one) for name, one in numbers.items()}
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_HOST)
    try:
        open_store(job.caches[host % len(job.caches)], job.settings, wait)
    except DataError as error:
        return error.what
    return None


def cache_file_contents(cache: str | Path) -> dict[str, bytes]:
    """Returns the content of each file of the cache, except remembered digests."""
    paths = [path for path in Path(cache).rglob("*") if path.is_file() and path.parent.name != "digests"]
    return {str(path.relative_to(cache)): b"" if "lock" in path.name else path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("job", "caches"),
    [(write_texts, 1), (write_rows_of_tokens, 1), (write_rows_of_tokens, 2)],
    indirect=["job"],
)
def test_several_hosts_write_the_same_files_as_one(ranks, job: Job, caches: int):
    job = replace(job, caches=job.caches[:caches])
    assert ranks(2).run(open_store_on_hosts, job) == [None] * 2
    assert all(cache_file_contents(cache) == cache_file_contents(job.one) for cache in job.caches)
    assert len(cache_file_contents(job.one)) == 4 + ("records" in job.settings)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_chunk_of_a_rank_that_fails_is_tokenized_by_another(ranks, job: Job, failing: int):
    job = replace(job, caches=job.caches[:1])
    found = ranks(2).run(open_store_on_hosts, job, failing)
    assert found == ["this rank failed." if host == failing else None for host in range(2)]
    assert cache_file_contents(job.caches[0]) == cache_file_contents(job.one)


@pytest.fixture
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process the first rank of two hosts."""
    for name, value in (
        ("RANK", 0),
        ("WORLD_SIZE", 2 * RANKS_PER_HOST),
        ("LOCAL_WORLD_SIZE", RANKS_PER_HOST),
    ):
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("first_rank")
def test_a_job_that_was_interrupted_continues_with_its_chunks(job: Job):
    cache, chunks = Path(job.caches[0]), set[int]()

    def fail_in_second_chunk() -> None:
        if [*cache.glob("chunk-*")]:
            raise DataError("this rank failed.")

    with pytest.raises(DataError, match="this rank failed"):
        open_store(str(cache), job.settings, fail_in_second_chunk)
    (kept,) = [chunk.stat().st_ino for chunk in cache.glob("chunk-*")]
    open_store(
        str(cache), job.settings, lambda: chunks.update(one.stat().st_ino for one in cache.glob("chunk-*"))
    )
    assert kept in chunks
    assert len(chunks) == 3
    assert cache_file_contents(cache) == cache_file_contents(job.one)


@pytest.mark.usefixtures("first_rank")
def test_the_ranks_of_one_host_make_no_chunks(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    cache = Path(job.caches[0])

    def check() -> None:
        assert not [*cache.glob("*chunk-*")]

    open_store(str(cache), job.settings, check)
