"""The next launch removes the directories of killed ones, and nothing else."""

import os
import tempfile
from pathlib import Path

import pytest

from fullshard.launch.scratch import remove_abandoned_directories, temporary_private_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def abandoned(temporary: Path) -> Path:
    """A directory as a killed launch leaves it: its lock is there, and free."""
    with temporary_private_directory() as directory:
        content = (directory / "lock").read_text()
    left = temporary / "fullshard-left"
    left.mkdir(mode=0o700)
    (left / "lock").write_text(content)
    (left / "request.json").touch()
    return left


def test_a_directory_is_private_and_gone_at_the_end(temporary: Path) -> None:
    with temporary_private_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert directory.parent == temporary
    assert not list(temporary.iterdir())


def test_the_next_launch_removes_what_a_killed_one_has_left(abandoned: Path) -> None:
    with temporary_private_directory():
        assert not abandoned.exists()


def test_a_directory_that_is_in_use_stays(temporary: Path) -> None:
    with temporary_private_directory() as one, temporary_private_directory() as other:
        assert one.exists()
        assert other.exists()


def test_what_is_not_certainly_dead_stays(abandoned: Path, temporary: Path) -> None:
    """Of another kernel, of a launch that has no more than begun, not a lock, not a directory."""
    other_kernel, begun, fifo, link = (temporary / f"fullshard-{number}" for number in range(4))
    for directory in (other_kernel, begun, fifo):
        directory.mkdir()
    (other_kernel / "lock").write_text("another boot")
    os.mkfifo(fifo / "lock")
    elsewhere = abandoned.rename(temporary / "elsewhere")
    link.symlink_to(elsewhere)
    remove_abandoned_directories(temporary)
    assert all(one.exists() for one in (other_kernel, begun, fifo, link, elsewhere / "request.json"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
def test_what_another_user_owns_stays(abandoned: Path) -> None:
    os.chown(abandoned, 12345, 12345)
    remove_abandoned_directories(abandoned.parent)
    assert abandoned.exists()
