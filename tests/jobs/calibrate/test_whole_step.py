"""Rates that are fitted to whole steps predict these; a first run keeps the rates of an idle machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.jobs.calibrate.whole_step import fit_rates_to_step, measure_step_seconds, reference_plan
from fullshard.launch.calibration import measure_unless_known
from fullshard.launch.detect import detect_hardware, kept_measurement_path
from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.prediction import TimeTerms
from fullshard.spec.run import Run


def predict_reference_step(hardware: Hardware) -> TimeTerms:
    run = Run.load(overrides=["precision.mode=fp32", "recompute.mode=none", "run.device=cpu"])
    return StepTimePredictor(describe_run(run, "cpu"), hardware).predict_time(reference_plan(2))


@pytest.mark.parametrize("seconds", [0.1, 0.5, 3.0])
def test_fitted_rates_predict_the_measured_step(seconds: float):
    fitted = fit_rates_to_step(detect_hardware("cpu", ranks=2), seconds)
    assert predict_reference_step(fitted).total == pytest.approx(seconds, rel=0.05)


def test_collectives_that_were_timed_beside_other_programs_do_not_fill_the_step():
    known = detect_hardware("cpu", ranks=2)
    rate = known.within.all_gather.model_copy(update={"hop_seconds": 10.0})
    link = known.within.model_copy(update=dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), rate))
    terms = predict_reference_step(fit_rates_to_step(known.model_copy(update={"within": link}), 0.5))
    assert terms.total == pytest.approx(0.5, rel=0.05)
    assert terms.compute > 0.5 * terms.total


def step_seconds() -> float:
    return measure_step_seconds(seconds=0.1)


def test_every_rank_measures_the_same_step(ranks):
    one, other = ranks(2).run(step_seconds)
    assert one == other > 0


def measured_by_first_run(tmp_path: Path, *options: str) -> tuple[str, list[Path]]:
    """Returns what a run's first measurement prints, and the files that it keeps."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    environment.pop("FULLSHARD_CALIBRATION")
    settings = ("train.steps=1", "log.trace_every=0", f"run.dir={tmp_path / 'run'}", *options)
    sets = [part for one in settings for part in ("--set", one)]
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "train", *sets],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr, list((tmp_path / "fullshard" / "hardware").glob("*.toml"))


def test_the_first_run_measures_the_machine_and_keeps_idle_rates(tmp_path: Path):
    said, kept = measured_by_first_run(tmp_path, "run.ranks=1", "model.layers=1")
    assert "measuring this machine" in said
    if "other programs" in said:  # whatever else this machine does
        assert not kept
        return
    assert Hardware.load(kept[0]).calibration == "idle"
    again, _ = measured_by_first_run(tmp_path, "run.ranks=1", "model.layers=1")
    assert "measuring" not in again


def test_a_first_run_that_cannot_measure_reports_it_and_keeps_the_rates_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("FULLSHARD_CALIBRATION")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_LOGS", "nonsense")  # no rank can import torch
    known = detect_hardware("cpu", ranks=1)
    assert measure_unless_known(known) == known
    assert "the measurement failed (exit code 1)" in capfd.readouterr().err


def test_kept_rates_are_those_of_this_machine_and_number_of_ranks(tmp_path: Path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    path = kept_measurement_path(2, environment)
    assert path is not None
    known = detect_hardware("cpu", ranks=2, environment=environment)
    known.model_copy(update={"is_calibrated": True}).save(path)
    assert detect_hardware("cpu", ranks=2, environment=environment).calibration == "idle"
    assert detect_hardware("cpu", ranks=3, environment=environment).calibration == "none"
    off = {**environment, "FULLSHARD_CALIBRATION": "off"}
    assert detect_hardware("cpu", ranks=2, environment=off).calibration == "none"
    path.write_text("not TOML [")
    assert detect_hardware("cpu", ranks=2, environment=environment).calibration == "none"
