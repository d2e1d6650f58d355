"""What trackers are told can be read back from where they keep it. What is not installed is skipped."""

import math
from pathlib import Path

import pytest

from fullshard.errors import INTERRUPTED_EXIT_CODE, MissingExtraError
from fullshard.jobs.trackers import Tracker, check_trackers_installed, open_trackers
from fullshard.spec.run import Run

# Their warnings are their own.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(directory: Path, name: str) -> Run:
    return Run.parse({"run": {"dir": str(directory)}, "log": {"trackers": [name]}}, source="the test")


def tell(tracker: Tracker, *, exit_code: int = 0) -> None:
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 3.0 / step, "skipped": False, "grad_norm": math.nan if step == 2 else 1.0})
    tracker.close(exit_code=exit_code)


def test_a_package_that_is_not_there_is_named_with_its_extra():
    with pytest.raises(MissingExtraError) as raised:
        check_trackers_installed(["no_such_tracker"])
    assert 'pip install "fullshard[no_such_tracker]"' in str(raised.value)
    assert 'log.trackers = ["no_such_tracker"]' in str(raised.value)
    assert raised.value.exit_code == 2


def test_no_tracker_needs_no_package(tmp_path: Path):
    check_trackers_installed(())
    assert open_trackers(Run()) == []


def test_tensorboard_keeps_every_step_and_a_resumed_run_shows_it_once(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after_step in (0, 1):
        [tracker] = open_trackers(run(tmp_path, "tensorboard"), after_step=after_step)
        for step in range(after_step + 1, 4):
            tracker.log(step, {"loss": 3.0 / step})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 1.5), (3, 1.0)]


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    [tracker] = open_trackers(run(tmp_path, "wandb"))
    tell(tracker)
    [kept] = tmp_path.rglob("run-*.wandb")
    assert b"grad_norm" in kept.read_bytes()


@pytest.mark.parametrize(
    ("exit_code", "status"), [(0, "FINISHED"), (1, "FAILED"), (INTERRUPTED_EXIT_CODE, "KILLED")]
)
def test_mlflow_keeps_the_figures_the_settings_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, status: str
):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    [tracker] = open_trackers(run(tmp_path, "mlflow"))
    tell(tracker, exit_code=exit_code)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [kept] = client.search_runs([client.get_experiment_by_name("fullshard").experiment_id])
    history = client.get_metric_history(kept.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 3.0), (2, 1.5), (3, 1.0)]
    assert kept.data.params["train.steps"] == "300"
    assert kept.info.status == status
