"""A file of a directory that somebody else has filled is written in that directory, or not at all."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from fullshard.checkpoint.location import LocalLocation
from fullshard.errors import FullshardError
from fullshard.jobs.run_directory import LastAttemptRecord, check_unlocked, open_run_directory
from fullshard.observe.run_log import MetricsLog
from fullshard.offload.directories import lock_directory, replace_file_atomically
from fullshard.offload.drive import SYSTEM, DriveFile
from fullshard.spec.records.event import RunEvent
from fullshard.system.files import (
    append_to_file,
    open_new_file,
    open_regular_file,
    write_file_atomically,
    write_file_or_stream,
)
from tests.jobs.test_metrics import metrics


def open_run(root: Path) -> None:
    check_unlocked(root)
    with open_run_directory(root, resume=True):
        pass


def append_metrics(root: Path) -> None:
    log = MetricsLog(root, after_step=1)
    log.write_step(metrics(2))
    log.drop_steps_after(1)
    log.close()


def save_checkpoint(root: Path) -> None:
    with LocalLocation(root).lock_for_writing():
        pass


def hold_offload(root: Path) -> None:
    with lock_directory(root):
        pass


WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    (".lock", open_run),
    ("launch.json", open_run),
    ("launch.part", open_run),
    ("metrics.jsonl", append_metrics),
    ("metrics.jsonl.part", append_metrics),
    ("events.jsonl", lambda root: RunEvent.now("end", attempt=1).append_to(root / "events.jsonl")),
    ("plan.json", lambda root: write_file_atomically(root / "plan.json", "new")),
    ("report.txt", lambda root: append_to_file(root / "report.txt", "new")),
    ("tokens.bin", lambda root: open_new_file(root / "tokens.bin").close()),
    (".lock", save_checkpoint),
    ("lock", hold_offload),
    (
        ".identity.json.tmp",
        lambda root: replace_file_atomically(root / "identity.json", b"new", system=SYSTEM),
    ),
    (".data.tmp", lambda root: DriveFile.open_or_create(root / "data", 4096).close()),
    ("data", lambda root: DriveFile.open(root / "data", 4096).close()),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_no_file_of_a_run_is_written_through_a_link_and_no_fifo_is_waited_for(
    tmp_path: Path, name: str, write: Callable[[Path], object], kind: str
) -> None:
    (root := tmp_path / "run").mkdir()
    (root / "checkpoints").mkdir()
    (target := tmp_path / "precious").write_text("x" * 4096)
    (root / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    LastAttemptRecord().save(root / "launch.json")
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(target) if kind == "link" else os.mkfifo(root / name)
    with suppress(FullshardError, OSError):
        write(root)
    assert target.read_text() == "x" * 4096


def test_an_output_is_written_into_a_pipe_and_in_place_of_a_link(tmp_path: Path) -> None:
    (target := tmp_path / "precious").write_text("x")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        write_file_or_stream(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert (target.read_text(), (tmp_path / "nowhere").exists()) == ("x", False)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file_or_stream(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)


def test_files_that_are_not_regular_are_refused_by_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for name, said in (
        ("fifo", "not a regular file"),
        (".", "not a regular file"),
        ("link", "a link; links"),
    ):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
            with pytest.raises(OSError, match=said):
                open_regular_file(tmp_path / name, flags)
