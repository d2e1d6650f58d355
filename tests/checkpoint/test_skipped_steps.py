"""Checkpoints that were saved while steps were skipped never take the place of those of before."""

import time
from pathlib import Path

import pytest

from fullshard.checkpoint.location import CheckpointLocation, latest_checkpoint, location_of
from fullshard.checkpoint.manifest import SKIPPED_IN_A_ROW
from fullshard.checkpoint.save import save
from tests.checkpoint.states import State, loaded, numbers


def place_of(kind: str, directory: Path) -> CheckpointLocation:
    return location_of(f"memory://skipped/{time.monotonic_ns()}" if kind == "objects" else directory)


def save_step(place: CheckpointLocation, step: int, skipped: int = 0, *, keep: int = 1) -> None:
    save(State(step, numbers(step), {SKIPPED_IN_A_ROW: skipped}), place, keep=keep)


def steps_in(place: CheckpointLocation) -> list[int]:
    return sorted(step for step, _ in place.list_checkpoints())


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_save_while_steps_are_skipped_neither_prunes_nor_is_loaded(kind: str, tmp_path: Path) -> None:
    place = place_of(kind, tmp_path)
    save_step(place, 30)
    save_step(place, 37, skipped=4)
    save_step(place, 38, skipped=5)
    assert steps_in(place) == [30, 37, 38]
    assert loaded(place).step == 30  # type: ignore[arg-type]
    assert str(latest_checkpoint(place)).endswith("step-00000030")


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_the_next_good_checkpoint_replaces_those_of_skipped_steps(kind: str, tmp_path: Path) -> None:
    place = place_of(kind, tmp_path)
    save_step(place, 30)
    save_step(place, 37, skipped=4)
    save_step(place, 40, skipped=7)
    save_step(place, 40, keep=2)
    assert steps_in(place) == [30, 40]
    assert loaded(place).noted[SKIPPED_IN_A_ROW] == 0  # type: ignore[arg-type]


def test_a_checkpoint_of_skipped_steps_is_loaded_without_another_or_by_its_name(tmp_path: Path) -> None:
    save_step(location_of(tmp_path), 3, skipped=3)
    assert loaded(tmp_path).step == 3
    save_step(location_of(tmp_path), 4)
    assert loaded(tmp_path).step == 4
    save_step(location_of(tmp_path), 5, skipped=1)
    assert loaded(tmp_path / "step-00000005").step == 5
