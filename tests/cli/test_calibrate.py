"""`fullshard calibrate` starts its ranks, writes the file, and says what it found."""

import json
from pathlib import Path
from typing import Any

from fullshard.cli.main import main
from fullshard.spec.machine.hardware import Hardware


def test_calibration_file_equals_the_printed_values(tmp_path: Path, capfd: Any):
    path = tmp_path / "hardware.toml"
    arguments = ["--device", "cpu", "--ranks", "1", "--seconds", "0.1", "--out", str(path), "--json"]
    assert main(["calibrate", *arguments]) == 0
    out, err = capfd.readouterr()
    found = Hardware.model_validate(json.loads(out))
    assert Hardware.load(path) == found
    assert found.world_size == 1
    assert str(path) in err
    assert "measuring for about 0.1 s" in err
    assert found.calibration == "idle"


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, capfd: Any):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "hardware.toml"
    arguments = ["--device", "cpu", "--ranks", "1", "--seconds", "0.1", "--out", str(path)]
    assert main(["calibrate", *arguments]) == 2
    assert "hardware.toml cannot be written" in capfd.readouterr().err


def test_absent_drive_is_refused(tmp_path: Path, capfd: Any):
    arguments = ["--device", "cpu", "--ranks", "1", "--seconds", "0.1", "--out", str(tmp_path / "file.toml")]
    assert main(["calibrate", *arguments, "--drive", str(tmp_path / "nvme")]) == 2
    assert "nvme is not a directory" in capfd.readouterr().err


def test_a_file_that_is_no_hardware_is_kept(tmp_path: Path, capfd: Any):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert main(["calibrate", "--device", "cpu", "--ranks", "1", "--out", str(path)]) == 2
    assert path.read_text() == "[train]\nsteps = 3\n"
    assert "--force" in capfd.readouterr().err
