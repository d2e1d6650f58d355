"""A cache entry is whole or absent, made by one process at a time, and named by its content."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.data.files import stat_files
from fullshard.data.first_reading import FirstReading
from fullshard.data.token_store import (
    BuiltElsewhere,
    divide_by_rank,
    get_or_build_entry,
    make_cache_directory,
    remove_entries,
    remove_entry,
)
from fullshard.errors import DataError
from fullshard.spec.settings.data_section import DataSection

WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
from fullshard.data.token_store import get_or_build_entry

def build(draft):
    (draft / "tokens.bin").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

get_or_build_entry(Path(sys.argv[1]), "entry", build=build)
"""


def counting(counts: list[int], *, wait: Callable[[], object] = lambda: None):
    def build(draft: Path) -> dict[str, int]:
        counts.append(1)
        wait()
        (draft / "file").write_text("whole")
        return {"number": len(counts)}

    return build


def test_an_entry_is_made_once_and_others_wait_for_it(tmp_path: Path):
    counts: list[int] = []
    asked = threading.Event()

    def want() -> None:
        build = counting(counts, wait=lambda: asked.wait(60))
        get_or_build_entry(tmp_path, "entry", build=build, alive=asked.set)

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 1
    assert asked.is_set()


def test_without_locks_a_build_leaves_the_draft_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)

    def build(draft: Path) -> dict[str, int]:
        (draft / "tokens.bin").touch()
        get_or_build_entry(tmp_path, "entry", build=counting([]))
        assert (draft / "tokens.bin").exists()
        return {}

    entry = get_or_build_entry(tmp_path, "entry", build=build)
    assert (entry / "file").read_text() == "whole"  # of the first to end


def test_a_killed_process_leaves_no_entry(tmp_path: Path):
    killed = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "entry").exists()
    counts: list[int] = []
    get_or_build_entry(tmp_path, "entry", build=counting(counts))
    assert len(counts) == 1
    assert list(tmp_path.glob(".entry.tmp-*")) == []


def test_a_build_that_raises_leaves_no_files(tmp_path: Path):
    def build(draft: Path) -> dict[str, int]:
        (draft / "half").touch()
        raise DataError("corrupt.")

    with pytest.raises(DataError, match="corrupt"):
        get_or_build_entry(tmp_path, "entry", build=build)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]


def test_an_entry_that_lost_bytes_is_made_again(tmp_path: Path):
    counts: list[int] = []
    get_or_build_entry(tmp_path, "entry", build=counting(counts))
    os.truncate(tmp_path / "entry" / "file", 3)
    get_or_build_entry(tmp_path, "entry", build=counting(counts))
    assert len(counts) == 2
    assert (tmp_path / "entry" / "file").read_text() == "whole"


def test_a_damaged_entry_is_removed_without_the_files_of_others(tmp_path: Path):
    theirs = [
        tmp_path / name for name in (".entry.tmp-notes", ".entry.tmp-0123abcd/mine.txt", "entry/mine.npy")
    ]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    with pytest.raises(DataError, match="Directory not empty"):
        get_or_build_entry(tmp_path, "entry", build=counting([]))
    assert [path.read_text() for path in theirs] == ["theirs"] * 3


def test_an_entry_without_lock_and_a_lock_without_entry_are_removed_too(tmp_path: Path):
    for name in ("a-1-x", "a-2-x", "a-3-x", "a-4-y", "b-1-x"):
        get_or_build_entry(tmp_path, name, build=counting([]))
    (tmp_path / ".a-2-x.lock").unlink()
    remove_entry(tmp_path / "a-3-x")
    remove_entries(tmp_path, "a-*", kept_key="-y")
    kept = {"a-4-y", ".a-4-y.lock", "b-1-x", ".b-1-x.lock"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"(?s)cannot be written.*data\.cache"):
        make_cache_directory(str(tmp_path / "file" / "cache"))


def aged(path: Path, text: str, *, seconds: float) -> Path:
    path.write_text(text)
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def digests(tmp_path: Path, *paths: Path) -> list[str]:
    return FirstReading(tmp_path / "cache").digests(stat_files(map(str, paths)))


def test_digests_follow_content_alone(tmp_path: Path):
    one = aged(tmp_path / "one", "same", seconds=100)
    other = aged(tmp_path / "other", "same", seconds=50)
    third = aged(tmp_path / "third", "else", seconds=100)
    found = digests(tmp_path, one, other, third)
    assert found[0] == found[1] != found[2]
    assert digests(tmp_path, one, other, third) == found


def test_a_file_that_was_changed_is_read_again(tmp_path: Path):
    before = digests(tmp_path, aged(tmp_path / "a", "one", seconds=100))
    assert digests(tmp_path, aged(tmp_path / "a", "two", seconds=50)) != before


def test_ranks_begin_with_different_items_and_come_to_all(monkeypatch: pytest.MonkeyPatch):
    def order_of_items(rank: int, *, ranks: int, items: int) -> list[int]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        order = list[int]()
        divide_by_rank(range(items), lambda item, _: order.append(item), waits=True)
        return order

    orders = [order_of_items(rank, ranks=3, items=6) for rank in range(3)]
    assert [order[0] for order in orders] == [0, 2, 4]
    assert all(sorted(order) == [*range(6)] for order in orders)
    assert {order_of_items(rank, ranks=5, items=2)[0] for rank in range(5)} == {0, 1}


@pytest.mark.parametrize("is_shared", [False, True])
def test_ranks_of_a_node_begin_different_items_and_ask_for_no_more_than_they_are(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
):
    """Eight of 800 ranks, and 100 items, all of which other ranks are making already if `is_shared`."""

    class Begun(Exception):
        pass

    begun, asked = [*range(100)] if is_shared else list[int](), list[int]()

    def begin_unless_begun(item: int, waits: bool) -> None:
        asked.append(item)
        if item in begun:
            raise BuiltElsewhere
        begun.append(item)
        raise Begun

    for name, value in (("WORLD_SIZE", "800"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        asked.clear()
        with pytest.raises(BuiltElsewhere if is_shared else Begun):
            divide_by_rank(range(100), begin_unless_begun, waits=True)
        assert len(asked) == (8 + 1 if is_shared else rank + 1)  # and once to wait
    assert is_shared or begun == [*range(8)]


def test_a_file_that_another_process_reads_is_left_to_it(tmp_path: Path):
    first, *others = (aged(tmp_path / f"file {number}", str(number), seconds=100) for number in range(20))
    reading = FirstReading(tmp_path / "cache")
    lock = reading.lock_of_digest(str(first))
    files = stat_files(
        [str(first), next(str(one) for one in others if reading.lock_of_digest(str(one)) != lock)]
    )
    is_reading, may_end = threading.Event(), threading.Event()

    def read_slowly() -> None:
        is_reading.set()
        may_end.wait(60)

    other = threading.Thread(target=lambda: replace(reading, alive=read_slowly).digests(files[:1]))
    other.start()
    is_reading.wait(60)
    with pytest.raises(BuiltElsewhere):
        reading.digests(files, waits=False)
    may_end.set()
    other.join()
    assert len(set(replace(reading, alive=fail_if_read).digests(files))) == 2  # one by the other thread


def fail_if_read() -> None:
    raise AssertionError("a file was read again")


def test_reading_says_how_long_it_takes_ever_more_rarely(tmp_path: Path, capsys):
    files = stat_files(str(aged(tmp_path / name, name * 10, seconds=100)) for name in "abcd")
    now = [0.0]
    progress = FirstReading(tmp_path / "cache").reporting(files, now=lambda: now[0])
    said: list[str] = []
    for now[0] in (9.0, 12.0, 23.0, 24.0):
        progress.digests(files[:1])
        progress.alive()
        said.append(capsys.readouterr().err)
    assert "10 B of 40 B, 36.0 s left" in said[1]
    assert "1 min 12 s left" in said[3]
    assert said[::2] == ["", ""]


def test_a_file_of_this_moment_is_not_remembered(tmp_path: Path):
    path = aged(tmp_path / "a", "one", seconds=-3600)  # of this moment, however long the rest takes
    seen = path.stat()
    before = digests(tmp_path, path)
    path.write_text("two")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as two writes within a tick of the clock
    assert digests(tmp_path, path) != before


def test_a_user_without_a_home_needs_another_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "~")  # which cannot be expanded
    with pytest.raises(DataError, match="no home"):
        make_cache_directory(DataSection().cache)
