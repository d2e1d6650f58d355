"""A command overwrites nothing of a checkpoint or a run, and files of another kind only by force."""

import os
from pathlib import Path

import pytest

from fullshard.errors import SpecError
from fullshard.system.targets import check_output_directory, check_output_file, make_load_predicate


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with one checkpoint."""
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    for file in (step / "__0_0.distcp", step / "manifest.json", tmp_path / "run" / "launch.json"):
        file.touch()
    return tmp_path / "run"


def is_text_file(path: Path) -> bool:
    return path.read_text() == "text"


STEP = "checkpoints/step-00000001"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "name",
    [f"{STEP}/__0_0.distcp", f"{STEP}/manifest.json", f"{STEP}/new", f"{STEP}/a/b/new", "launch.json"]
    + ["plan.json", "metrics.jsonl", "events.jsonl"],
)
def test_nothing_in_a_checkpoint_and_no_record_of_a_run_is_written(run: Path, name: str, force: bool) -> None:
    with pytest.raises(SpecError, match="cannot be written"):
        check_output_file(run / name, is_kind=lambda _: True, force=force)


def test_a_symlink_into_a_checkpoint_counts_as_inside_it(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run / STEP)
    with pytest.raises(SpecError, match=rf"{STEP}, which holds __0_0\.distcp"):
        check_output_file(tmp_path / "link" / "new", is_kind=lambda _: True, force=True)


@pytest.mark.parametrize("name", ["", "checkpoints", STEP, f"{STEP}/out"])
def test_a_directory_with_checkpoints_gets_no_other_files(run: Path, name: str) -> None:
    with pytest.raises(SpecError, match="cannot be written"):
        check_output_directory(run / name, is_kind=lambda _: True, force=True)


def test_a_file_is_replaced_by_the_same_kind_and_by_force(tmp_path: Path) -> None:
    file = tmp_path / "file"
    check_output_file(file, is_kind=is_text_file, force=False)
    file.write_text("text")
    check_output_file(file, is_kind=is_text_file, force=False)
    file.write_text("a thesis")
    with pytest.raises(SpecError, match="--force"):
        check_output_file(file, is_kind=is_text_file, force=False)
    check_output_file(file, is_kind=is_text_file, force=True)


def test_a_directory_of_other_files_is_written_by_force_alone(tmp_path: Path) -> None:
    check_output_directory(tmp_path / "absent", is_kind=is_text_file, force=False)
    (tmp_path / "one").write_text("text")
    check_output_directory(tmp_path, is_kind=is_text_file, force=False)
    (tmp_path / "other").write_text("a thesis")
    with pytest.raises(SpecError, match=r"not empty.\n  got: other"):
        check_output_directory(tmp_path, is_kind=is_text_file, force=False)
    check_output_directory(tmp_path, is_kind=is_text_file, force=True)


def test_a_link_to_nothing_is_replaced_by_force_alone(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(SpecError, match=r"exists already.\n  got: a link to nothing"):
        check_output_file(tmp_path / "link", is_kind=is_text_file, force=False)
    check_output_file(tmp_path / "link", is_kind=is_text_file, force=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_refused_as_directory_and_a_directory_as_file(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError):
        check_output_file(tmp_path, is_kind=is_text_file, force=force)
    with pytest.raises(SpecError):
        check_output_directory(tmp_path / "file", is_kind=is_text_file, force=force)


def test_a_device_is_never_replaced_and_a_pipe_may_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        check_output_file(place, is_kind=is_text_file, force=False, streams=True)
        with pytest.raises(SpecError, match="a pipe or a device"):
            check_output_file(place, is_kind=is_text_file, force=True)


def test_an_impossible_path_passes_the_check() -> None:
    check_output_file(Path("a" * 300), is_kind=is_text_file, force=False)
    check_output_directory(Path("a" * 300), is_kind=is_text_file, force=False)


def test_a_file_that_is_larger_than_any_of_its_kind_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    assert not make_load_predicate(Path.read_bytes)(tmp_path / "large")
