"""`fullshard ckpt`: what is there, whole or not, and the model of one as a single file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.location import LocalLocation
from fullshard.cli.main import main
from fullshard.errors import CheckpointError, SpecError
from tests.checkpoint.states import numbers, saved
from tests.checkpoint.test_strangers import rewrite_manifest_text
from tests.checkpoint.test_verify import flip


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run with two checkpoints, of which the newer has lost its manifest."""
    saved(tmp_path / "checkpoints", 3)
    (saved(tmp_path / "checkpoints", 7) / "manifest.json").unlink()
    return tmp_path


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_list_marks_incomplete_checkpoints(run_directory: Path, inner: str, capsys: Any) -> None:
    assert main(["ckpt", "list", str(run_directory / inner), "--json"]) == 0
    whole, broken = json.loads(capsys.readouterr().out)
    assert (whole["step"], whole["problem"], whole["ranks"]) == (3, None, 1)
    assert (whole["trained_tokens"], "tokens" in whole) == (300, False)
    assert whole["bytes"] >= sum(tensor.nbytes for tensor in numbers(3).values())
    assert (Path(broken["path"]).name, "manifest" in broken["problem"]) == ("step-00000007", True)


def test_list_prints_a_line_per_checkpoint(run_directory: Path, capsys: Any) -> None:
    assert main(["ckpt", "list", str(run_directory)]) == 0
    whole, broken = capsys.readouterr().out.splitlines()
    assert whole.startswith("step-00000003 ")
    assert "300 trained tokens     1 rank " in whole
    assert broken.startswith("step-00000007  not whole: manifest.json")


def test_list_has_no_tokens_of_more_than_64_bits(run_directory: Path, capsys: Any) -> None:
    path = run_directory / "checkpoints" / "step-00000003"
    text = (path / "manifest.json").read_text()
    rewrite_manifest_text(path, text.replace('"tokens": 300', f'"tokens": {"9" * 400}'))
    assert main(["ckpt", "list", str(run_directory)]) == 0
    assert capsys.readouterr().out.startswith("step-00000003       ? trained tokens")


def test_list_of_empty_and_absent_directories(tmp_path: Path, capsys: Any) -> None:
    assert main(["ckpt", "list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["ckpt", "list", str(tmp_path / "absent")]) == CheckpointError.exit_code


def test_export_takes_the_newest_whole_checkpoint_of_a_run(run_directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["ckpt", "export", str(run_directory), str(target)]) == 0
    model = {name.removeprefix("model."): t for name, t in numbers(3).items() if name.startswith("model.")}
    assert {name: t.tolist() for name, t in load_file(target).items()} == {
        n: t.tolist() for n, t in model.items()
    }


@pytest.mark.parametrize("size", ["0", "0.4B", ""])
@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_invalid_shard_size_is_refused(
    run_directory: Path, tmp_path: Path, size: str, form: str, capsys: Any
) -> None:
    out = tmp_path / "out"
    arguments = ["ckpt", "export", str(run_directory), str(out), "--shard-size", size, "--format", form]
    assert main(arguments) == SpecError.exit_code
    assert ("bytes" in capsys.readouterr().err, out.exists()) == (True, False)


@pytest.mark.parametrize(
    ("form", "option"),
    [
        *(("peft", option) for option in ("--shard-size=5GB", "--dtype=bf16", "--optimizer")),
        *(("dcp", option) for option in ("--shard-size=5GB", "--dtype=bf16")),
        *((form, "--optimizer") for form in ("safetensors", "hf")),
    ],
)
def test_options_without_effect_on_a_format_are_refused(
    run_directory: Path, form: str, option: str, capsys: Any
) -> None:
    assert main(["ckpt", "export", str(run_directory), "out", "--format", form, option]) == 2
    assert form in capsys.readouterr().err


def test_a_state_is_exported_where_nothing_else_is(run_directory: Path, tmp_path: Path) -> None:
    target = tmp_path / "state.pt"
    command = ["ckpt", "export", str(run_directory), str(target), "--format", "torch"]
    assert main(command) == 0
    assert torch.load(target, weights_only=True).keys() == {"model"}
    assert main(command) == SpecError.exit_code
    assert main([*command, "--force"]) == 0
    assert main([*command, "--force", "--optimizer"]) == CheckpointError.exit_code  # without its groups


@pytest.mark.parametrize("name", ["checkpoints/step-00000003/__0_0.distcp", "thesis.txt", "checkpoints"])
def test_export_does_not_overwrite_other_files(run_directory: Path, name: str, capsys: Any) -> None:
    target = run_directory / name
    if not target.exists():
        target.write_text("years of work")
    before = target.read_bytes() if target.is_file() else sorted(target.iterdir())
    for more in ([], ["--shard-size", "1GB"], ["--format", "hf"]):
        assert main(["ckpt", "export", str(run_directory), str(target), *more]) == SpecError.exit_code
    assert before == (target.read_bytes() if target.is_file() else sorted(target.iterdir()))


def test_an_export_replaces_an_earlier_one_and_by_force_any_file(run_directory: Path) -> None:
    target = run_directory / "out"
    target.write_text("not needed any more")
    assert main(["ckpt", "export", str(run_directory), str(target), "--force"]) == 0
    assert main(["ckpt", "export", str(run_directory), str(target)]) == 0


def test_export_without_checkpoints_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["ckpt", "export", str(tmp_path), str(tmp_path / "out")]) == CheckpointError.exit_code
    assert capsys.readouterr().err.startswith("error: ")


def test_verify_names_damaged_files(tmp_path, capsys):
    saved(tmp_path / "checkpoints", 1)
    path = saved(tmp_path / "checkpoints", 2)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    flip(path / "__0_0.distcp", 8 * 3000)
    assert main(["ckpt", "verify", str(tmp_path)]) == 6
    out = capsys.readouterr().out
    assert f"{path}  DAMAGED\n  __0_0.distcp: a part of model." in out
    assert "; touches model." in out
    assert main(["ckpt", "verify", str(path), "--json"]) == 6
    ((damage,),) = json.loads(capsys.readouterr().out).values()
    assert damage["file"] == "__0_0.distcp"


def test_a_removed_checkpoint_is_neither_damaged_nor_in_the_json(tmp_path, capsys):
    whole, removed = saved(tmp_path, 1), saved(tmp_path, 2)
    (removed / "notes.txt").touch()
    LocalLocation(tmp_path).remove_checkpoint(LocalFiles(removed))
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert f"{removed}  removed\n" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {str(whole): []}


def test_ranks_verify_a_part_each(tmp_path, capsys, monkeypatch):
    path = saved(tmp_path, 1)
    flip(path / "__0_0.distcp", 8 * 3000)
    assert main(["ckpt", "verify", str(path), "--part", "2/2"]) == 0
    assert capsys.readouterr().out == f"{path}  part 2 of 2  no damage\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, code in (("0", 6), ("1", 0), ("two", SpecError.exit_code)):
        monkeypatch.setenv("RANK", rank)
        assert main(["ckpt", "verify", str(path)]) == code
    for part in ("0/2", "3/2", "2", "-1/2", "1/0"):
        assert main(["ckpt", "verify", str(path), f"--part={part}"]) == SpecError.exit_code
    assert capsys.readouterr().err.count("no such part") == 6


@pytest.mark.parametrize("older", [[], [1]])
@pytest.mark.parametrize("command", ["list", "verify", "export"])
def test_a_running_save_is_not_reported_as_one_that_was_not_finished(
    tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture, command: str, older: list[int]
) -> None:
    def run() -> str:
        caplog.clear()
        code = main(
            ["ckpt", command, str(tmp_path), *([str(tmp_path / "out")] if command == "export" else [])]
        )
        assert code == (0 if older or command == "list" else CheckpointError.exit_code)
        return " ".join(f"{capsys.readouterr().err} {caplog.text}".split())

    place = LocalLocation(tmp_path / "checkpoints")
    for step in older:
        saved(place, step)
    is_named = command != "verify" or not older  # else it reads the checkpoint that is there
    with place.lock_for_writing():
        draft = place.clean_up_and_create_draft(2, needed_bytes=0)
        running = f"{draft}: process {os.getpid()} on {os.uname().nodename} is saving it now"
        assert (running in run()) is is_named
    assert (f"{draft}: a save that was not finished" in run()) is is_named
