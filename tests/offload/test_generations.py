"""A rank's state on its drive: one generation is whole at any moment, and no other is taken for one."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from fullshard.errors import ForeignOffloadError, OffloadError
from fullshard.offload.directories import data_file_bytes, rank_directory
from fullshard.offload.drive import SYSTEM
from fullshard.offload.generations import discard_rank_directory
from tests.faults.disks import small_disk
from tests.offload.processes import running, wait_for
from tests.offload.systems import without_direct
from tests.offload.writer import (
    IDENTITY,
    PAYLOAD_BYTES,
    RECORDS,
    holds,
    opened,
    page,
    payload,
    put,
    usable,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return rank_directory(tmp_path / "nvme", run_id="run", rank=3)


def steps(generations) -> list[int]:
    return [one.step for one in generations.list_complete_generations()]


# What is kept


@pytest.mark.parametrize("system", [SYSTEM, without_direct()], ids=["direct", "cached"])
def test_the_two_newest_generations_survive_a_restart(directory: Path, system) -> None:
    with opened(directory, system=system) as generations:
        assert steps(generations) == []
        for step in (1, 2, 5):
            put(generations, step)
        assert steps(generations) == [5, 2]
        assert all(holds(generations, one) for one in generations.list_complete_generations())
    assert usable(directory) == [5, 2]


def test_the_newest_generation_is_never_written_to(directory: Path) -> None:
    with opened(directory) as generations:
        for step in range(1, 6):
            newest = generations.list_complete_generations()[:1]
            put(generations, step)
            assert all(holds(generations, one) for one in newest)
            assert steps(generations)[1:] == [one.step for one in newest]


def test_a_begun_generation_replaces_the_older_one_once_committed(directory: Path) -> None:
    with opened(directory) as generations:
        put(generations, 1)
        put(generations, 2)
        generations.start_next_generation()
        assert steps(generations) == [2]
        for record in RECORDS:
            generations.write_record(record.name, page(bytes(record.length_bytes)))
    assert usable(directory) == [2]
    with opened(directory) as generations:
        put(generations, 3)
    assert usable(directory) == [3, 2]


def test_a_generation_lacks_no_record(directory: Path) -> None:
    with opened(directory) as generations:
        generations.start_next_generation()
        generations.write_record("group 1", page(bytes(65_536)))
        with pytest.raises(AssertionError, match=r"not written: \['group 0', 'group 2'\]"):
            generations.commit_generation(1, b"")
    assert usable(directory) == []


def test_a_dropped_generation_stays_dropped_and_the_older_one_is_kept(directory: Path) -> None:
    with opened(directory) as generations:
        put(generations, 1)
        put(generations, 2)
        generations.invalidate_generation(generations.list_complete_generations()[0].slot)
        assert steps(generations) == [1]
    with opened(directory) as generations:
        assert steps(generations) == [1]
        put(generations, 2)
        assert steps(generations) == [2, 1]


def test_a_payload_may_be_larger_than_the_room_that_was_kept_for_it(directory: Path) -> None:
    large = os.urandom(PAYLOAD_BYTES + 12345)
    with opened(directory) as generations:
        for step in (1, 2, 3):
            put(generations, step)
        generations.start_next_generation()
        for record in RECORDS:
            generations.write_record(record.name, page(bytes(record.length_bytes)))
        generations.commit_generation(4, large)
    with opened(directory) as generations:
        assert [
            generations.read_generation_payload(one) for one in generations.list_complete_generations()
        ] == [large, payload(3)]


def test_no_file_grows(directory: Path) -> None:
    with opened(directory) as generations:
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
        for step in range(1, 8):
            put(generations, step)
        after = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert {name: size for name, size in after.items() if sizes.get(name) != size}.keys() == {
        "state-0.json",
        "state-1.json",
    }
    assert after["state-0.data"] == data_file_bytes(RECORDS) == 172_032


# Whose it is


@pytest.mark.parametrize(
    ("field", "value"), [("run_id", "other"), ("rank", 2), ("world_size", 8), ("layout", "cd" * 16)]
)
def test_files_of_another_identity_are_named_and_left_alone(directory: Path, field: str, value) -> None:
    with opened(directory) as generations:
        put(generations, 1)
    with pytest.raises(ForeignOffloadError, match=f"{field} {getattr(IDENTITY, field)} there, {value} here"):
        opened(directory, identity=IDENTITY.model_copy(update={field: value}))
    assert usable(directory) == [1]
    (directory / "notes.json").touch()
    discard_rank_directory(directory)
    assert [one.name for one in directory.iterdir()] == ["notes.json"]
    (directory / "notes.json").unlink()
    for _ in range(2):
        discard_rank_directory(directory)
        assert not directory.exists()
    with opened(directory, identity=IDENTITY.model_copy(update={field: value})) as generations:
        assert steps(generations) == []


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_files_without_an_identity_belong_to_the_rank_of_their_manifests(
    directory: Path, damage: str
) -> None:
    with opened(directory) as generations:
        put(generations, 1)
    path, other = directory / "identity.json", IDENTITY.model_copy(update={"rank": 2})
    text = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(text.replace(b"run_id", b"run_ie"))
    with pytest.raises(ForeignOffloadError, match="no identity.json that can be read"):
        opened(directory, identity=other)
    assert usable(directory) == [1]
    assert path.read_bytes() == text
    path.unlink()
    (directory / "state-0.json").unlink()
    with pytest.raises(ForeignOffloadError, match="no identity.json that can be read"):
        opened(directory)


@pytest.mark.parametrize("kind", ["payload", "json"])
def test_a_generation_that_cannot_be_read_leaves_the_other(directory: Path, kind: str) -> None:
    with opened(directory) as generations:
        put(generations, 1)
        slot = put(generations, 2).slot
    path = directory / f"state-{slot}.{kind}"
    path.unlink()
    path.mkdir()  # to be read as a file, the system refuses it
    assert usable(directory) == [1]


def test_a_second_process_is_refused_and_the_first_is_named(directory: Path, tmp_path: Path) -> None:
    with running("hold", directory, tmp_path / "ready") as process:
        pid = wait_for(tmp_path / "ready", process)
        for refused in (lambda: opened(directory), lambda: discard_rank_directory(directory)):
            with pytest.raises(OffloadError, match=f"(?s)another process.*process {pid} on "):
                refused()
    opened(directory).close()  # it died: the kernel has let go


def test_opening_waits_until_children_of_a_killed_rank_release_its_lock(
    directory: Path, tmp_path: Path
) -> None:
    """A child holds the descriptor of its parent's lock, until it sees that the parent is gone."""
    with running("leave_a_child", directory, tmp_path / "ready") as process:
        process.wait()
        opened(directory).close()


def test_a_child_does_not_hold_the_lock_of_a_closed_directory(directory: Path, tmp_path: Path) -> None:
    with running("let_go_beside_a_child", directory, tmp_path / "ready") as process:
        wait_for(tmp_path / "ready", process)
        opened(directory).close()


# Room


def test_too_little_space_is_refused_before_the_first_write(directory: Path) -> None:
    needed = 2 * (data_file_bytes(RECORDS) + PAYLOAD_BYTES) + (1 << 20)
    old = rank_directory(directory.parents[1], run_id="old", rank=0)
    with opened(old, identity=IDENTITY.model_copy(update={"run_id": "old"})):
        pass
    with pytest.raises(OffloadError, match=r"(?s)1\.45 MiB free, 1\.45 MiB needed.*offload\.path") as caught:
        opened(directory, system=replace(SYSTEM, free_bytes=lambda _: needed - 1))
    assert f"remove what earlier runs have left in {old.parent.parent}" in str(caught.value)
    assert not (directory / "state-0.data").exists()
    opened(directory, system=replace(SYSTEM, free_bytes=lambda _: needed)).close()
    opened(directory, system=replace(SYSTEM, free_bytes=lambda _: 0)).close()  # all is there


def test_a_drive_that_fills_up_while_files_are_made_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size_bytes=300 << 10) as disk:
        with pytest.raises(OffloadError, match=r"(?s)not enough space.*free.*needed"):
            opened(disk / "run" / "rank-00003", system=replace(SYSTEM, free_bytes=lambda _: 1 << 30))
        discard_rank_directory(disk / "run" / "rank-00003")


def test_a_drive_that_fills_up_after_opening_fails_no_step(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", size_bytes=4 << 20) as disk:
        directory = disk / "run" / "rank-00003"
        with opened(directory) as generations:
            put(generations, 1)
            (disk / "rest").write_bytes(
                bytes(SYSTEM.free_bytes(disk) - (16 << 10))
            )  # manifests are made anew
            for step in range(2, 6):
                put(generations, step)
        assert usable(directory) == [5, 4]


@pytest.mark.parametrize(
    ("path", "why"), [("/proc/nope", "ENOENT"), ("/dev/null", "ENOTDIR"), ("/dev/null/x", "ENOTDIR")]
)
def test_a_path_that_cannot_be_made_is_named_as_in_the_settings(path: str, why: str) -> None:
    with pytest.raises(OffloadError) as caught:
        opened(rank_directory(Path(path), run_id="run-1a2b", rank=0))
    assert caught.value.what.startswith(f"offload.path = {path} ")
    assert str(caught.value.got).endswith(f"({why}), {path}")
    assert "run-1a2b" not in str(caught.value)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENXIO, None])
@pytest.mark.parametrize("name", ["open", "fsync", "fdatasync", "posix_fallocate", "free_bytes"])
def test_a_directory_that_cannot_be_opened_is_refused_with_reason_and_fix(
    name: str, number: int | None, directory: Path
) -> None:
    def fails(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number)) if number else OSError("no number")

    with pytest.raises(OffloadError) as caught:
        opened(directory, system=replace(SYSTEM, **{name: fails}))
    assert caught.value.why
    assert caught.value.fix
