"""`fullshard ckpt import`: what it prints, writes and returns."""

import tomllib
from pathlib import Path

import pytest

from fullshard.checkpoint.manifest import read_manifest
from fullshard.cli.main import main
from fullshard.errors import CheckpointError, SpecError
from fullshard.system.files import xxh3_digest_of_file
from fullshard.takeover.formats import open_foreign_checkpoint
from tests.takeover.tiny import RUN
from tests.takeover.unpacked import FIXTURES


def test_command_reports_every_tensor_and_writes_into_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, source = tmp_path / "run.toml", str(FIXTURES / "fsdp2_dcp/source")
    run.write_text(RUN)
    arguments = ["ckpt", "import", source, str(tmp_path / "out"), "--run", str(run)]
    assert main([*arguments, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert f"--set run.dir={tmp_path / 'out'}" in printed.err
    assert main(arguments) == SpecError.exit_code
    written = Path(printed.out.strip())
    assert written == tmp_path / "out/checkpoints/step-00000003"
    origin = read_manifest(written).values["origin"]
    assert isinstance(origin, dict)
    files = sorted(Path(source).iterdir())
    assert (origin["format"], origin["files"]) == ("DCP", {str(p): xxh3_digest_of_file(p) for p in files})
    for name in (*read_manifest(written).model_tensors, "model.not taken over", "model.lr of"):
        assert name.removeprefix("model.") in printed.err


def test_command_ends_with_2_if_a_rate_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("0.01", "0.01001"))
    source = str(FIXTURES / "torch_names/source.pt")
    assert main(["ckpt", "import", source, str(tmp_path), "--run", str(run), "--dry-run"]) == 2
    assert "0.004 in the source, 0.004004 in the run" in capsys.readouterr().err


def test_command_without_a_run_prints_the_settings_that_the_source_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(FIXTURES / "torch_names/source.pt")
    assert main(["ckpt", "import", source, str(tmp_path)]) == 0
    printed = capsys.readouterr()
    offered = tomllib.loads(printed.out)
    assert offered["optimizer"]["learning_rate"] == 0.01
    assert offered["run"]["dir"] == str(tmp_path)
    assert "nothing is imported" in printed.err
    assert not any(tmp_path.iterdir())


def test_the_directory_around_a_checkpoint_is_refused_with_its_name(tmp_path: Path) -> None:
    around = Path(FIXTURES / "fsdp2_dcp/source").parent
    with pytest.raises(CheckpointError, match=f"try: {around}/source"):
        open_foreign_checkpoint(around)
