"""A lock excludes other processes, and only while its holder, or a child that has the descriptor, lives."""

import errno
import fcntl
import os
import subprocess
import sys
from itertools import accumulate, islice
from pathlib import Path

import pytest

from fullshard.system.files import find_lock_holder, hold_exclusive_file_lock, lengthening_pauses

HOLDS = """
import sys
from pathlib import Path
from fullshard.system.files import hold_exclusive_file_lock

with hold_exclusive_file_lock(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_lock_names_its_holder_and_is_free_once_that_process_is_killed(tmp_path: Path):
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        assert f"process {holder.pid} on " in str(find_lock_holder(path))
        with (
            pytest.raises(BlockingIOError, match=f"process {holder.pid} on "),
            hold_exclusive_file_lock(path),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert find_lock_holder(path) is None
    with hold_exclusive_file_lock(path):
        pass


def test_a_lock_without_a_holder_is_free_and_a_missing_one_is_not_created(tmp_path: Path):
    assert find_lock_holder(tmp_path / "lock") is None
    assert not (tmp_path / "lock").exists()


def test_a_lock_that_was_removed_while_it_was_awaited_is_made_anew(tmp_path: Path):
    path = tmp_path / "lock"
    with path.open("w") as old:
        fcntl.flock(old, fcntl.LOCK_EX)

        def replace_it() -> None:
            path.unlink()
            fcntl.flock(old, fcntl.LOCK_UN)

        with hold_exclusive_file_lock(path, patience_seconds=60, waiting=replace_it):
            assert find_lock_holder(path) == f"process {os.getpid()} on {os.uname().nodename}"


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path):
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with (
        pytest.raises(OSError, match="links are not followed") as caught,
        hold_exclusive_file_lock(tmp_path / "lock"),
    ):
        pass
    assert caught.value.errno == errno.ELOOP
    assert not (tmp_path / "target").exists()


def test_a_waiting_process_looks_ever_more_rarely_and_is_late_by_what_it_waited_or_ten_seconds():
    pauses = [*islice(lengthening_pauses(), 400)]
    waited = [0.0, *accumulate(pauses)]
    assert sum(pauses) > 3600
    assert all(pause <= min(10, before + 0.05) + 1e-9 for pause, before in zip(pauses, waited, strict=False))
