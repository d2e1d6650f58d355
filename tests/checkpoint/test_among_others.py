"""Checkpoints are saved and found whatever else lies in their directory, also beside a writer."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.load import find_damage, iterate_damage, load
from fullshard.checkpoint.location import LocalLocation, latest_checkpoint
from fullshard.checkpoint.manifest import SavedTensor
from fullshard.errors import CheckpointError
from fullshard.spec.weight_map import Shape, WeightMap, map_unchanged_tensor
from fullshard.weights.export import export
from tests.checkpoint.states import State, assert_same, loaded, numbers, saved, sharded

STEP, DRAFT = "step-00000009", ".tmp-00000009-ab"
STRAYS: dict[str, Callable[[Path], object]] = {
    "dangling latest": lambda place: (place / "latest").symlink_to("step-00000077"),
    "loop": lambda place: (place / "loop").symlink_to("loop"),
    "file named as a step": lambda place: (place / STEP).write_text("notes"),
    "link named as a step": lambda place: (place / STEP).symlink_to("nowhere"),
    "loop named as a step": lambda place: (place / STEP).symlink_to(STEP),
    "link to a checkpoint": lambda place: (place / STEP).symlink_to(saved(place / "elsewhere", 9)),
    "fifo named as a step": lambda place: os.mkfifo(place / STEP),
    "metadata": lambda place: (place / ".metadata").write_bytes(b""),
    "empty manifest": lambda place: (place / "manifest.json").write_bytes(b""),
    "directory as manifest": lambda place: (place / "manifest.json").mkdir(),
    "draft that is a file": lambda place: (place / DRAFT).write_text(""),
    "draft with a fifo": lambda place: ((place / DRAFT).mkdir(), os.mkfifo(place / DRAFT / "writer.json")),
    "removal that is a link": lambda place: (place / ".del-step-00000009-ab").symlink_to("."),
}
BESIDE_STEPS: dict[str, Callable[[Path], object]] = {
    "manifest of a step": lambda place: shutil.copy(place / "step-00000001" / "manifest.json", place)
}


@pytest.mark.parametrize("stray", [*STRAYS, *BESIDE_STEPS])
def test_strays_hide_no_checkpoint_and_no_later_save(tmp_path, stray):
    for step in (1, 2):
        saved(tmp_path, step)
    (STRAYS | BESIDE_STEPS)[stray](tmp_path)
    assert loaded(tmp_path).step == 2
    path = saved(tmp_path, 9, keep=1)
    assert latest_checkpoint(tmp_path) == path
    assert_same(loaded(tmp_path).held, numbers(9))
    assert sorted(one.name for one in tmp_path.glob("step-*")) == [path.name]


@pytest.mark.parametrize("stray", STRAYS)
def test_strays_alone_are_no_checkpoint(tmp_path, stray):
    STRAYS[stray](tmp_path)
    assert not load(State(0, numbers(0)), tmp_path, missing_ok=True)


def test_a_linked_checkpoint_loads_by_its_path_alone_and_is_never_removed(tmp_path):
    elsewhere = saved(tmp_path / "elsewhere", 9)
    directory = tmp_path / "checkpoints"
    saved(directory, 1)
    (directory / "step-00000009").symlink_to(elsewhere)
    assert loaded(directory).step == 1
    assert loaded(directory / "step-00000009").step == 9
    for step in (10, 11):
        saved(directory, step, keep=1)
    assert sorted(one.name for one in directory.iterdir()) == [".lock", "step-00000009", "step-00000011"]
    assert not list(iterate_damage(elsewhere))


INSIDE: dict[str, Callable[[Path], object]] = {
    "dangling link": lambda notes: notes.symlink_to("nowhere"),
    "loop": lambda notes: notes.symlink_to("notes"),
    "directory": Path.mkdir,
}


def test_no_file_of_the_users_is_removed(tmp_path):
    notes = saved(tmp_path, 1) / "notes.txt"
    kept = [notes, tmp_path / ".del-photos" / "one.png", tmp_path / ".tmp-work" / "two.png"]
    for file in kept:
        file.parent.mkdir(exist_ok=True)
        file.write_text("text")
    (tmp_path / ".tmp-empty").mkdir()
    saved(tmp_path, 2, keep=1)
    assert all(file.read_text() == "text" for file in kept)
    assert (tmp_path / ".tmp-empty").is_dir()
    assert [one.name for one in notes.parent.iterdir()] == ["notes.txt"]  # the checkpoint itself is pruned


@pytest.mark.parametrize("stray", INSIDE.values(), ids=INSIDE)
def test_a_stray_inside_of_a_checkpoint_harms_nothing(tmp_path, stray: Callable[[Path], object]):
    stray(saved(tmp_path, 2) / "notes")
    assert loaded(tmp_path).step == 2


def test_a_copy_under_the_name_of_another_step_is_not_whole(tmp_path):
    path = saved(tmp_path, 1)
    shutil.copytree(path, tmp_path / "step-00000002")
    (damage,) = iterate_damage(tmp_path / "step-00000002")
    assert (damage.file, damage.what) == ("manifest.json", "the manifest of step 1")
    shutil.copytree(path, tmp_path / "backup")
    assert not list(iterate_damage(tmp_path / "backup"))


class Overtaken(State):
    """Between the choice of a checkpoint and its reading, the next one of `spare` takes its place, as when a
    run that keeps one saves meanwhile."""

    def load_targets(self, saved: Mapping[str, SavedTensor]) -> dict[str, torch.Tensor]:
        if not dist.is_initialized() or dist.get_rank() == 0:
            overtake(self.noted["directory"], self.noted["spare"])
        if dist.is_initialized():
            dist.barrier()
        return super().load_targets(saved)


def overtake(directory: Path, spare: Path) -> None:
    following = min(spare.glob("step-*"), default=None)
    if following is not None:
        shutil.rmtree(directory / f"step-{int(following.name[-8:]) - 1:08d}")
        following.rename(directory / following.name)


def beside_a_writer(tmp_path: Path, *, steps: int) -> dict[str, Path]:
    for step in range(1, steps + 1):
        saved(tmp_path / "spare", step)
    directory, spare = tmp_path / "checkpoints", tmp_path / "spare"
    directory.mkdir()
    (spare / "step-00000001").rename(directory / "step-00000001")
    return {"directory": directory, "spare": spare}


def load_overtaken(noted: dict[str, Path]) -> int:
    tensors = {name: one for name, one in sharded(0, (2,)).items() if ".rank" not in name}
    state = Overtaken(0, tensors, dict(noted))
    assert load(state, noted["directory"])
    return state.step


def test_a_load_takes_the_newest_again_when_its_checkpoint_is_removed(ranks, tmp_path):
    noted = beside_a_writer(tmp_path, steps=4)
    state = Overtaken(0, numbers(0), dict(noted))
    assert load(state, noted["directory"])
    assert_same(state.held, numbers(4))
    assert not list(noted["directory"].glob(".bad-*"))
    assert ranks(2).run(load_overtaken, beside_a_writer(tmp_path / "ranks", steps=3)) == [3, 3]


def test_a_load_whose_checkpoints_are_always_removed_names_checkpoint_keep(tmp_path):
    noted = beside_a_writer(tmp_path, steps=12)
    with pytest.raises(CheckpointError, match="changes faster than it can be read") as raised:
        load(Overtaken(0, numbers(0), dict(noted)), noted["directory"])
    assert "checkpoint.keep" in str(raised.value)


def test_a_checkpoint_that_vanishes_without_a_newer_one_is_not_taken_for_a_fresh_start(tmp_path):
    noted = beside_a_writer(tmp_path, steps=2)
    shutil.rmtree(noted["spare"] / "step-00000002")
    (noted["spare"] / "step-00000002").mkdir()  # what comes in its place is empty
    state = Overtaken(0, numbers(0), dict(noted))
    with pytest.raises(CheckpointError, match="none of the checkpoints .* is whole"):
        load(state, noted["directory"], missing_ok=True)


@pytest.mark.parametrize("listings", [1, 2, 3])
def test_a_checkpoint_committed_during_a_search_is_loaded_or_absent(tmp_path, listings):
    """The first `listings` times that a search lists the checkpoints, the only one is not yet committed."""

    class NotYet(LocalLocation):
        def list_checkpoints(self):
            return [] if next(seen, None) is not None else super().list_checkpoints()

    saved(tmp_path, 3)
    seen, state = iter(range(listings)), State(0, numbers(0))
    assert load(state, NotYet(tmp_path), missing_ok=True) == (state.step == 3)


def test_an_export_takes_the_newest_again_when_its_checkpoint_is_removed(tmp_path):
    noted = beside_a_writer(tmp_path, steps=3)

    def naming(shapes: Mapping[str, Shape]) -> WeightMap:
        overtake(noted["directory"], noted["spare"])
        return WeightMap(
            parts={name: map_unchanged_tensor(name, shape) for name, shape in shapes.items()}, shapes=shapes
        )

    export(noted["directory"], tmp_path / "model.safetensors", naming=naming)
    expected = {n.removeprefix("model."): t for n, t in numbers(3).items() if n.startswith("model.")}
    assert_same(load_file(tmp_path / "model.safetensors"), expected)


def test_files_that_vanish_while_they_are_listed_are_left_out(tmp_path: Path):
    class WithAVanished(type(tmp_path)):
        def iterdir(self):
            yield from super().iterdir()
            yield Path(self / "vanished")

    (tmp_path / "stays").write_bytes(b"four")
    assert LocalFiles(WithAVanished(tmp_path)).file_sizes_bytes() == {"stays": 4}


def test_a_verified_checkpoint_that_is_removed_meanwhile_is_not_damaged(tmp_path):
    class Vanishing(LocalFiles):
        def open_file(self, name: str) -> BinaryIO:
            if name.endswith(".distcp"):
                shutil.rmtree(self.path)
            return super().open_file(name)

    path = saved(tmp_path, 1)
    assert find_damage(Vanishing(path)) is None
    assert find_damage(LocalFiles(path)) is None  # before it is read
    (saved(tmp_path, 1) / "notes.txt").touch()
    LocalLocation(tmp_path).remove_checkpoint(LocalFiles(path))
    assert [one.name for one in path.iterdir()] == ["notes.txt"]
    assert find_damage(LocalFiles(path)) is None
    (path / "notes.txt").unlink()
    path.rmdir()
    for name in ("__0_0.distcp", "manifest.json"):
        (saved(tmp_path, 1) / name).unlink()
        (damage,) = find_damage(LocalFiles(path)) or ()
        assert damage.file == name
        shutil.rmtree(path)
