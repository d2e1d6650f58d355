"""A run keeps its checkpoints in its directory, or where `checkpoint.dir` says."""

import json
import time
from pathlib import Path

import pytest

from fullshard.checkpoint import latest_checkpoint
from fullshard.cli.main import main
from fullshard.errors import CheckpointError, TrainError
from fullshard.jobs.run_directory import check_writable, open_run_directory
from fullshard.jobs.train import run_job
from fullshard.spec.run import Run
from tests.jobs.test_train import TINY


def train_and_resume(directory: str, saved_to: str) -> list[int]:
    """Steps at the end of a run, and of the same run resumed; a new one is refused between."""
    ends: list[int] = []
    for steps, resume in ((2, False), (3, False), (3, True)):
        places = [f"run.dir={directory}", f"checkpoint.dir={saved_to}"]
        run = Run.load(overrides=[*TINY, *places, f"train.steps={steps}"])
        if steps == 3 and not resume:
            with pytest.raises(CheckpointError, match="holds the checkpoints of another run"):
                run_job(run, resume=resume, plan=None, command_started=time.time())
            continue
        run_job(run, resume=resume, plan=None, command_started=time.time())
        saved = json.loads(Path(directory, "measurement.json").read_text())["checkpoint"]
        assert saved == str(latest_checkpoint(saved_to)) == f"{saved_to}/step-{steps:08d}"
        ends.append(steps)
    return ends


@pytest.mark.parametrize("place", ["directory", "store"])
def test_checkpoint_dir_is_used(ranks, tmp_path, place):
    elsewhere = f"memory://runs/{time.monotonic_ns()}" if place == "store" else str(tmp_path / "elsewhere")
    assert ranks(1).run(train_and_resume, str(tmp_path / "run"), elsewhere) == [[2, 3]]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_directory_that_cannot_be_made_is_refused_before_ranks_start(tmp_path, capfd):
    (tmp_path / "file").touch()
    for place in ("/proc/absent/run", f"{tmp_path}/file/run"):
        assert main(["train", "--set", f"run.dir={place}"]) == TrainError.exit_code
        assert f"the run's directory {place} cannot be written" in capfd.readouterr().err
    check_writable(tmp_path / "runs" / "new")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_directory_that_another_run_writes_is_refused_before_ranks_start(tmp_path, capfd, resume):
    with open_run_directory(tmp_path / "run", resume=False):
        assert main(["train", *resume, "--set", f"run.dir={tmp_path / 'run'}"]) == TrainError.exit_code
    assert f"error: another run is writing {tmp_path / 'run'}" in capfd.readouterr().err
