"""`fullshard calibrate` starts its ranks, writes the file, and says what it found."""

from pathlib import Path
from typing import Any

from fullshard.cli.main import main
from fullshard.quantities import format_decimal
from fullshard.spec.machine.hardware import Hardware


def test_the_best_rates_of_the_file_are_printed(tmp_path: Path, capfd: Any):
    path = tmp_path / "hardware.toml"
    arguments = ["--device", "cpu", "--ranks", "1", "--seconds", "0.1", "--out", str(path)]
    assert main(["calibrate", *arguments]) == 0
    out, err = capfd.readouterr()
    found = Hardware.load(path)
    best = max(found.rates.matmul["fp32"], key=lambda point: point.rate)
    assert f"{format_decimal(best.rate)}FLOP/s" in out
    assert found.world_size == 1
    assert str(path) in err
    assert "measuring for about 0.1 s" in err
    assert found.calibration != "none"  # "busy" beside other programs


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, capfd: Any):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "hardware.toml"
    arguments = ["--device", "cpu", "--ranks", "1", "--seconds", "0.1", "--out", str(path)]
    assert main(["calibrate", *arguments]) == 2
    assert "hardware.toml cannot be written" in capfd.readouterr().err


def test_absent_drive_is_refused(tmp_path: Path, capfd: Any):
    arguments = ["--device", "cpu", "--ranks", "1", "--seconds", "0.1", "--out", str(tmp_path / "file.toml")]
    assert main(["calibrate", *arguments, "--drive", str(tmp_path / "nvme")]) == 2
    assert "does not exist" in capfd.readouterr().err


def test_a_file_that_is_no_hardware_is_kept(tmp_path: Path, capfd: Any):
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert main(["calibrate", "--device", "cpu", "--ranks", "1", "--out", str(path)]) == 2
    assert path.read_text() == "[train]\nsteps = 3\n"
    assert "--force" in capfd.readouterr().err
