"""Disks that lose power, fill up, turn read-only or go away: acknowledged saves stay."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fullshard.errors import CheckpointError
from tests.faults.course import Course, Mode, assert_it_resumes, last_acknowledged, lines, train_course
from tests.faults.crowd import litter
from tests.faults.disks import powerless_disk, remount, small_disk
from tests.ranks import RankFailed

CUTS_HERE = 2


def cut_while_training(
    ranks: Callable, directory: Path, *, mode: Mode, right_after_acknowledging: bool, times: int
) -> list[str]:
    """Returns the outcome of each start after a cut. The record is on another disk, which keeps its power."""
    rng = random.Random(f"{mode} {right_after_acknowledging}")
    record = directory / "record"
    record.mkdir()
    outcomes: list[str] = []
    with powerless_disk(directory) as disk:
        checkpoints = disk.mounted_at / "checkpoints"
        for _ in range(times):
            known = len(lines(record, "acknowledged"))

            def cut(known: int = known) -> None:
                target = known + rng.randrange(1, 4)
                while len(lines(record, "acknowledged")) < target:
                    time.sleep(0.0005)
                if not right_after_acknowledging:
                    time.sleep(rng.uniform(0, 0.15))
                disk.cut()

            thread = threading.Thread(target=cut)
            thread.start()
            with pytest.raises((CheckpointError, RankFailed, RuntimeError)):
                ranks(2).run(train_course, Course(checkpoints, record, mode=mode))
            thread.join()
            disk.restart()
            litter(checkpoints)
            again = Course(checkpoints, record)
            outcomes.append(assert_it_resumes(ranks, again, least=last_acknowledged(record)))
    return outcomes


@pytest.mark.parametrize(
    ("mode", "right_after_acknowledging"),
    [
        ("sync", True),
        ("async", False),
        pytest.param("sync", False, marks=pytest.mark.long),
        pytest.param("async", True, marks=pytest.mark.long),
    ],
)
def test_no_power_cut_loses_a_save(ranks, tmp_path, mode, right_after_acknowledging):
    cut_while_training(
        ranks, tmp_path, mode=mode, right_after_acknowledging=right_after_acknowledging, times=CUTS_HERE
    )


def fill(place: Path) -> None:
    """Nearly: a step's files begin to fit."""
    free = shutil.disk_usage(place).free
    (place / "filler").write_bytes(bytes(max(free - 20_000, 0)))


def lock(place: Path) -> None:
    remount(place, "ro")


def take_away(place: Path) -> None:
    (place / "checkpoints").rename(place / "elsewhere")


def free(place: Path) -> None:
    (place / "filler").unlink()


def unlock(place: Path) -> None:
    remount(place, "rw")


def bring_back(place: Path) -> None:
    """Under the new one, which the run may have made meanwhile, nothing may be lost."""
    shutil.rmtree(place / "checkpoints", ignore_errors=True)
    (place / "elsewhere").rename(place / "checkpoints")


DISK_FAULTS = {
    "full": (fill, free, "disk is full"),
    "read-only": (lock, unlock, "read-only"),
    "taken away": (take_away, bring_back, "No such file"),
}


def strike(befall: Callable[[Path], None], place: Path) -> None:
    litter(place / "checkpoints")
    while True:  # a mount that is being written to cannot turn read-only: again
        try:
            befall(place)
        except Exception:  # noqa: BLE001
            time.sleep(0.001)
        else:
            return


def disk_fault(ranks: Callable, directory: Path, *, fault: str, mode: Mode) -> tuple[str, str]:
    """(how the run ended, what the next start did when the disk was well again)."""
    befall, mend, _ = DISK_FAULTS[fault]
    record = directory / "record"
    record.mkdir()
    with small_disk(directory / "disk", size_bytes=4 << 20) as place:
        checkpoints = place / "checkpoints"

        fault_now = partial(strike, befall, place)
        try:
            course = Course(checkpoints, record, mode=mode, until=20, largest_disk=True, fault=fault_now)
            ranks(2).run(train_course, course)
            ended = "continued"
        except CheckpointError as error:
            ended = str(error)
        least = 0 if fault == "taken away" else last_acknowledged(record)
        mend(place)
        return ended, assert_it_resumes(ranks, Course(checkpoints, record), least=least)


@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        ("full", "async"),
        ("read-only", "sync"),
        ("taken away", "async"),
        pytest.param("full", "sync", marks=pytest.mark.long),
        pytest.param("read-only", "async", marks=pytest.mark.long),
        pytest.param("taken away", "sync", marks=pytest.mark.long),
    ],
)
def test_a_disk_that_refuses_is_a_clear_error_and_loses_nothing(ranks, tmp_path, fault, mode):
    ended, _ = disk_fault(ranks, tmp_path, fault=fault, mode=mode)
    expected = {DISK_FAULTS[fault][2]}
    if fault == "taken away":  # between two saves, or after one rank has made the directory of a save
        expected |= {"continued", "not the same on all ranks"}
    assert any(text in ended for text in expected)
