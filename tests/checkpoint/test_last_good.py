"""A checkpoint that training may not be able to continue from never displaces a good one."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fullshard.checkpoint.location import CheckpointLocation, latest_checkpoint, location_of
from fullshard.checkpoint.manifest import SKIPPED_IN_A_ROW, read_manifest
from fullshard.checkpoint.save import CheckpointSaver
from fullshard.errors import CheckpointError
from tests.checkpoint.states import State, loaded, numbers

DOUBTS = ("skipped", "infinite")


class TrainedState(State):
    """A state whose tensors of the model are trained."""

    def select_names_that_must_be_finite(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.startswith("model.")]


def place_of(kind: str, directory: Path) -> CheckpointLocation:
    return location_of(f"memory://avoided/{time.monotonic_ns()}" if kind == "objects" else directory)


def save_step(
    place: CheckpointLocation, step: int, doubt: str | None = None, *, keep: int = 1, of: int | None = None
) -> None:
    """Saves the numbers of the step `of`, as the end of a run does."""
    state = TrainedState(step, numbers(step if of is None else of))
    state.noted[SKIPPED_IN_A_ROW] = 4 if doubt == "skipped" else 0
    if doubt == "infinite":
        state.held["model.uneven"][2, 1] = torch.inf
    CheckpointSaver(place, keep=keep, saves_unusable=True).save(state)


def steps_in(place: CheckpointLocation) -> list[int]:
    return sorted(step for step, _ in place.list_checkpoints())


@pytest.mark.parametrize("doubt", DOUBTS)
@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_checkpoint_to_avoid_prunes_nothing_is_loaded_last_and_goes_with_the_next_good_one(
    kind: str, doubt: str, tmp_path: Path
) -> None:
    place = place_of(kind, tmp_path)
    save_step(place, 30)
    save_step(place, 37, doubt)
    save_step(place, 38, doubt)
    assert steps_in(place) == [30, 37, 38]
    assert loaded(place).step == 30  # type: ignore[arg-type]
    assert str(latest_checkpoint(place)).endswith("step-00000030")
    save_step(place, 36)
    assert steps_in(place) == [36, 37, 38]
    assert loaded(place).step == 36  # type: ignore[arg-type]
    save_step(place, 38, keep=2)
    assert steps_in(place) == [36, 38]
    state = loaded(place)  # type: ignore[arg-type]
    assert state.noted[SKIPPED_IN_A_ROW] == 0
    assert state.held["model.uneven"].isfinite().all()


@pytest.mark.parametrize("doubt", DOUBTS)
@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_a_state_to_avoid_takes_no_good_step_away(kind: str, doubt: str, tmp_path: Path) -> None:
    """Such as that of a run which resumed from an older step, and is dead when it comes here again."""
    place = place_of(kind, tmp_path)
    save_step(place, 30)
    with pytest.raises(CheckpointError, match="step-00000030 is kept"):
        save_step(place, 30, doubt, of=31)
    assert torch.equal(loaded(place).held["model.uneven"], numbers(30)["model.uneven"])  # type: ignore[arg-type]
    assert not place.list_quarantined()


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_checkpoint_to_avoid_is_loaded_without_another_or_by_its_name(doubt: str, tmp_path: Path) -> None:
    place = location_of(tmp_path)
    save_step(place, 3, doubt)
    assert loaded(tmp_path).step == 3
    save_step(place, 4)
    assert loaded(tmp_path).step == 4
    save_step(place, 5, doubt)
    assert loaded(tmp_path / "step-00000005").step == 5
    why = "4 steps skipped right before it" if doubt == "skipped" else "inf in model.uneven"
    assert read_manifest(tmp_path / "step-00000005").why_avoided == why
