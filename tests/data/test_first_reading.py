"""A file is read once, in ranges that ranks divide; the result is the same for any number of ranks."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import xxhash

from fullshard.data.files import stat_files
from fullshard.data.first_reading import FirstReading
from fullshard.data.memmaps import open_memmap_stores
from fullshard.data.token_store import make_cache_directory
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSourceFields
from tests.data.test_corpus import documents

RANGE, RANGES = 64, 18
TOKENS = np.random.default_rng(0).integers(0, 50, 500).astype("int16")


def tokens_file(tmp_path: Path, tokens: np.ndarray = TOKENS) -> str:
    path = tmp_path / "tokens.npy"
    np.save(path, tokens)
    os.utime(path, (time.time() - 100,) * 2)
    return str(path)


def open_store(
    path: str,
    cache: str | Path,
    alive: Callable[[], object] = lambda: None,
    range_bytes: int = RANGE,
    eod_token: int = 7,
) -> dict[str, Any]:
    fields = DataSourceFields(paths=(path,), eod_token=eod_token)
    root = make_cache_directory(cache)
    (store,) = open_memmap_stores(fields, root=root, alive=alive, range_bytes=range_bytes)
    return {"key": store.key, "documents": documents(store), "vocabulary": store.vocabulary_size}


class Calls:
    """A heartbeat, which is called once per range here, that calls `at(number of the call)`."""

    def __init__(self, at: Callable[[int], object] = lambda number: None) -> None:
        self.count, self.at = 0, at

    def __call__(self) -> None:
        self.count += 1
        self.at(self.count)


def fail_at(last: int) -> Calls:
    def fail(number: int) -> None:
        if number == last:
            raise DataError("this process failed.")

    return Calls(fail)


def open_store_while_all_ranks_read(path: str, cache: str, failing: int = -1) -> dict[str, Any] | str:
    """Opens a store. Each rank waits in its first range until all ranks read one; one of them then fails."""

    def wait(number: int) -> None:
        if number == 1:
            dist.barrier()
            if dist.get_rank() == failing:
                raise DataError("this rank failed.")

    try:
        return open_store(path, cache, Calls(wait))
    except DataError as error:
        return error.what


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_that_read_ranges_at_once_find_what_one_reading_of_the_file_finds(
    ranks, tmp_path: Path, count: int
):
    path = tokens_file(tmp_path)
    found = ranks(count).run(open_store_while_all_ranks_read, path, str(tmp_path / "cache"))
    whole = open_store(path, tmp_path / "whole", range_bytes=1 << 20)
    in_ranges = open_store(path, tmp_path / "alone")
    assert found == [in_ranges] * count
    assert whole | {"key": ""} == in_ranges | {"key": ""}
    assert not [*(tmp_path / "cache").glob("range-*")]


def test_the_ranges_of_a_rank_that_fails_are_read_by_the_others(ranks, tmp_path: Path):
    path = tokens_file(tmp_path)
    failed, *found = ranks(2).run(open_store_while_all_ranks_read, path, str(tmp_path / "cache"), 0)
    assert failed == "this rank failed."
    assert found == [open_store(path, tmp_path / "alone")]


def test_an_invalid_token_is_an_error_of_each_rank(ranks, tmp_path: Path):
    tokens = TOKENS.copy()
    tokens[-1] = -1
    path = tokens_file(tmp_path, tokens)
    errors = ranks(2).run(open_store_while_all_ranks_read, path, str(tmp_path / "cache"))
    assert errors == [f"{path} holds a value that is not a token."] * 2


def digest_in_ranges(path: str, cache: str) -> str:
    return FirstReading(Path(cache), range_bytes=800).digests(stat_files([path]))[0]


def test_the_digest_is_that_of_the_ranges_also_for_more_ranks_than_ranges(ranks, tmp_path: Path):
    path = tokens_file(tmp_path)
    data = Path(path).read_bytes()
    parts = "".join(xxhash.xxh3_128_hexdigest(part) for part in (data[:800], data[800:]))
    expected = f"ranges-{xxhash.xxh3_128_hexdigest(parts.encode())}"
    assert ranks(3).run(digest_in_ranges, path, str(tmp_path / "cache")) == [expected] * 3


def test_a_file_of_up_to_a_range_has_the_digest_of_its_bytes(tmp_path: Path):
    files = [tmp_path / name for name in ("empty", "full")]
    for path, size in zip(files, (0, 800), strict=True):
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - 100,) * 2)
        assert digest_in_ranges(str(path), str(tmp_path)) == xxhash.xxh3_128_hexdigest(bytes(size))


def test_a_reading_that_was_interrupted_continues_and_prints_what_is_left(tmp_path: Path, capsys):
    path, cache = tokens_file(tmp_path), tmp_path / "cache"
    with pytest.raises(DataError, match="this process failed"):
        open_store(path, cache, fail_at(6))
    now = [0.0]
    reading = FirstReading(cache, range_bytes=RANGE).reporting(stat_files([path]), now=lambda: now[0])
    reading.alive()
    with pytest.raises(DataError, match="this process failed"):
        open_store(path, cache, fail_at(5))
    now[0] = 10.0
    reading.alive()
    assert "576 B of 1.10 KiB, 21.6 s left" in capsys.readouterr().err  # 4 ranges of 64 bytes in 10 s
    assert open_store(path, cache, rest := Calls()) == open_store(path, tmp_path / "alone")
    assert rest.count == RANGES - 5 - 4


def test_the_digest_that_an_earlier_version_remembered_stays(tmp_path: Path):
    path, cache = tokens_file(tmp_path), tmp_path / "cache"
    before = open_store(path, cache, range_bytes=1 << 20)
    assert open_store(path, cache, fail_at(1)) == before
    shutil.rmtree(cache / before["key"])
    assert open_store(path, cache) == before


@pytest.mark.parametrize("range_bytes", [RANGE, 1 << 20])
def test_a_file_that_changes_while_it_is_read_is_refused_and_then_read_anew(tmp_path: Path, range_bytes: int):
    path, cache = tokens_file(tmp_path), tmp_path / "cache"
    with pytest.raises(DataError, match="changed while it was read"):
        open_store(path, cache, lambda: tokens_file(tmp_path, TOKENS[::-1]), range_bytes)
    assert open_store(path, cache, range_bytes=range_bytes) == open_store(
        path, tmp_path / "alone", range_bytes=range_bytes
    )


@pytest.mark.parametrize("eod_token", [7, 8])
def test_ranges_of_another_content_or_scan_neither_count_as_read_nor_stay(
    tmp_path: Path, capsys, eod_token: int
):
    path, cache = tokens_file(tmp_path), tmp_path / "cache"
    with pytest.raises(DataError, match="this process failed"):
        open_store(path, cache, fail_at(6), eod_token=eod_token)
    tokens_file(tmp_path, TOKENS[::-1])
    now = [0.0]
    progress = FirstReading(cache, range_bytes=RANGE).reporting(stat_files([path]), now=lambda: now[0])

    def report(number: int) -> None:
        now[0] = 10.0 * (number == 3)
        progress.alive()

    assert open_store(path, cache, Calls(report)) == open_store(path, tmp_path / "alone")
    assert "128 B of 1.10 KiB" in capsys.readouterr().err  # two ranges before the third
    assert not [*cache.glob("range-*")]


def test_ranges_stay_until_the_digest_is_remembered(tmp_path: Path):
    path, cache = tokens_file(tmp_path), tmp_path / "cache"
    digest_file = cache / "digests" / Path(digest_path(path)).name
    digest_file.mkdir(parents=True)  # so that no file can be written there
    found = open_store(path, cache)
    assert len([*cache.glob("range-*")]) == RANGES
    assert open_store(path, cache, fail_at(1)) == found
    digest_file.rmdir()
    assert open_store(path, cache, fail_at(1)) == found
    assert not [*cache.glob("range-*")]


def test_a_process_that_locks_a_range_after_all_were_read_leaves_no_lock(tmp_path: Path):
    reading, answers = FirstReading(tmp_path / "cache", range_bytes=RANGE), iter([None, None])
    found = reading.read(
        tokens_file(tmp_path), find=lambda: next(answers, "found"), finish=lambda *_: "read again", waits=True
    )
    assert found == "found"
    assert next(answers, None) is None, "it has asked twice before it had the lock"
    assert not [*(tmp_path / "cache").glob("*range-*")]


def digest_path(path: str) -> str:
    """Returns the name of the file that remembers the digest of `path`."""
    return hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()


def test_a_file_that_was_just_modified_is_read_by_each_process_alone(tmp_path: Path):
    path = tokens_file(tmp_path)
    expected = open_store(path, tmp_path / "alone")
    os.utime(path, (time.time() + 3600,) * 2)
    assert open_store(path, tmp_path / "cache") == expected
    assert not [*(tmp_path / "cache").glob("range-*")]
