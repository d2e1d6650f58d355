"""A run's directory is a run's alone: what is more is neither written into nor renamed."""

from pathlib import Path
from typing import Any

import pytest

from fullshard.cli.main import main
from fullshard.errors import SpecError
from fullshard.jobs.run_directory import (
    LastAttemptRecord,
    check_usable_by_new_run,
    open_run_directory,
    parse_run_directory,
    set_aside_earlier_run,
)
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory below the home directory."""
    project = tmp_path / "home" / "project"
    project.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(project)
    return project


def ran_in(root: Path) -> Path:
    """Leaves what a run leaves."""
    (root / "checkpoints" / "step-00000001").mkdir(parents=True)
    LastAttemptRecord(jobs=("one",)).save(root / "launch.json")
    (root / "slurm-1.out").touch()
    return root


def contents(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "/", "../../home", "~", "~/runs", "s3://bucket/run", "./"]
)
def test_a_name_of_more_than_a_run_is_refused_before_anything_starts(
    project: Path, name: str, capsys: Any
) -> None:
    before = contents(project.parent)
    for resume in ([], ["--resume"]):
        assert main(["train", "--set", f"run.dir='{name}'", *resume]) == SpecError.exit_code
        assert "run.dir" in capsys.readouterr().err
    assert contents(project.parent) == before


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("name", ["runs/default", "../run", "a b", ".hidden", "/tmp/x/run", "runs/~"])
def test_other_names_are_those_of_runs(name: str) -> None:
    assert parse_run_directory(name) == Path(name)


def test_link_to_the_home_directory_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    (project / "link").symlink_to(project.parent)
    for name in (project / "link", project.parent, project / ".."):
        with pytest.raises(SpecError, match="is or holds the home directory"):
            parse_run_directory(str(name))


@pytest.mark.parametrize("name", ["checkpoints/mine", "metrics.jsonl", "launch.json", "plan.json"])
def test_a_directory_that_no_run_has_written_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    root = tmp_path / "mlproject"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text("{}")
    before = contents(tmp_path)
    assert main(["train", "--set", f"run.dir={root}"]) == SpecError.exit_code
    with (
        pytest.raises(SpecError, match="is not the directory of a run"),
        open_run_directory(root, resume=False),
    ):
        pass
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [".git/HEAD", ".git", "src/model.py", "pyproject.toml", "other/x"])
def test_a_new_run_is_not_begun_among_other_things(tmp_path: Path, name: str) -> None:
    root = tmp_path / "mlproject"
    (root / name).parent.mkdir(parents=True)
    (root / name).touch()
    before = contents(tmp_path)
    assert main(["train", "--set", f"run.dir={root}"]) == SpecError.exit_code
    with pytest.raises(SpecError, match=f"(?s)other things.*{name.partition('/')[0]}"):
        check_usable_by_new_run(root)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [".git/HEAD", ".git", "src/model.py", "train.py", "run.toml", "other/x"])
def test_a_directory_with_other_files_is_not_renamed(tmp_path: Path, name: str) -> None:
    root = ran_in(tmp_path / "mlproject")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).touch()
    before = contents(tmp_path)
    with pytest.raises(SpecError, match=f"(?s)and more.*{name.partition('/')[0]}"):
        set_aside_earlier_run(root)
    assert contents(tmp_path) == before


def test_runs_within_a_run_are_not_renamed_with_it(tmp_path: Path) -> None:
    root = ran_in(tmp_path / "runs")
    ran_in(root / "one")
    with pytest.raises(SpecError, match="got: one"):
        set_aside_earlier_run(root)


@pytest.mark.parametrize("record", ["launch.json", "plan.json"])
def test_earlier_run_is_set_aside_whole(tmp_path: Path, record: str) -> None:
    root = ran_in(tmp_path / "run")
    (root / "tensorboard").mkdir()
    (root / "state").mkdir()
    if record == "plan.json":
        (root / "launch.json").unlink()
        Plan.from_run(Run(), world_size=2).save(root / "plan.json")
    before = [path.relative_to(root) for path in contents(root)]
    assert set_aside_earlier_run(root, offload_path="state/fast") == tmp_path / "run.1"
    assert [path.relative_to(tmp_path / "run.1") for path in contents(tmp_path / "run.1")] == before
    assert not root.exists()
    assert set_aside_earlier_run(root) is None


def test_a_new_run_may_begin_beside_other_files(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()  # such as a volume that is mounted there
    for directory in ("logs", ".ipynb_checkpoints", "offload", "empty"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "x").touch() if directory != "empty" else None
    for file in ("run.toml", "slurm-1.out", ".gitkeep", "train.sh"):
        (tmp_path / file).touch()
    check_usable_by_new_run(tmp_path)
    assert set_aside_earlier_run(tmp_path) is None


def test_target_of_a_linked_run_directory_is_set_aside(tmp_path: Path) -> None:
    real = ran_in(tmp_path / "scratch" / "run")
    (link := tmp_path / "run").symlink_to(real)
    with open_run_directory(link, resume=False) as found:
        assert found.previous_run == tmp_path / "scratch" / "run.1"
    assert (real / "launch.json").exists()
    assert link.is_symlink()
