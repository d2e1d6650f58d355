"""The interface of experiment trackers, and those that fullshard comes with. See `docs/trackers.md`."""

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fullshard.errors import INTERRUPTED_EXIT_CODE, SpecError


@dataclass(frozen=True, kw_only=True)
class TrackerStart:
    """The run that a tracker is started for.

    name: name of the run: the last part of `run.dir`
    run_directory: `run.dir`. A tracker may keep files in its subdirectory `trackers`.
    settings: all settings of the run, by `section.key`
    after_step: the step after which the run resumes; 0 for a new run
    run_id: the tracker's `run_id` in the earlier attempt of this run, which it continues; None for a new run
    """

    name: str
    run_directory: Path
    settings: Mapping[str, Any]
    after_step: int
    run_id: str | None


class Tracker(Protocol):
    """A destination for the figures of a run's steps, made by calling an entry point with a TrackerStart.

    Created on rank 0 only. `log` and `close` are called from one thread.
    """

    @property
    def run_id(self) -> str | None:
        """Identifier with which another process continues this record. It is saved in `trackers.json`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step. Steps are repeated after a rollback, and values may be NaN."""

    def close(self, *, exit_code: int) -> None:
        """Sends remaining data, and how the run ended: finished if `exit_code` is 0."""


class TensorboardTracker:
    """Writes event files into `<run.dir>/tensorboard`. Steps that a resumed run repeats are shown once."""

    run_id = None  # a resumed run writes into the same directory

    def __init__(self, start: TrackerStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = start.run_directory / "tensorboard"
        purge = start.after_step + 1 if start.after_step else None
        try:
            self._writer = SummaryWriter(str(directory), purge_step=purge)
        except OSError as error:
            raise SpecError(f"tensorboard cannot write to {directory}.", got=error.strerror) from error
        settings = "\n".join(f"    {name} = {value}" for name, value in start.settings.items())
        self._writer.add_text("run", settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, exit_code: int) -> None:
        del exit_code  # event files have no place for it
        self._writer.close()


class WandbTracker:
    """Logs to a run of the wandb project `fullshard` (or WANDB_PROJECT), with files in `<run.dir>/wandb`.

    The horizontal axis is our own value `step`: wandb's own step only grows, and drops the figures of steps
    that are repeated after a rollback or a resume.
    """

    def __init__(self, start: TrackerStart) -> None:
        wandb = importlib.import_module("wandb")
        start.run_directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fullshard"),
                name=start.name,
                dir=str(start.run_directory),
                config=dict(start.settings),
                id=start.run_id,
                resume="allow",
                allow_val_change=True,  # settings may change when a run resumes
                settings=wandb.Settings(console="off"),  # the terminal is ours
            )
        except wandb.errors.Error as error:
            fix = "wandb login, or WANDB_MODE=offline"
            raise SpecError("wandb will not start.", got=str(error), fix=fix) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.run_id: str = self._run.id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MlflowTracker:
    """Logs to a run of the mlflow experiment `fullshard` (or MLFLOW_EXPERIMENT_NAME).

    The data is stored at MLFLOW_TRACKING_URI, or else in `<run.dir>/mlflow.db`. Parameters of a run cannot
    change in mlflow, so settings that differ when the run resumes are tags.
    """

    def __init__(self, start: TrackerStart) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities: ModuleType = importlib.import_module("mlflow.entities")
        directory = start.run_directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=address)
            self.run_id: str = start.run_id or self._create_mlflow_run(start.name)
            self._log_settings({name: str(value) for name, value in start.settings.items()})
            self._client.update_run(self.run_id, status="RUNNING")
        except mlflow.exceptions.MlflowException as error:
            fix = "MLFLOW_TRACKING_URI=<address of a server>"
            raise SpecError("mlflow will not start.", got=str(error), fix=fix) from error

    def _create_mlflow_run(self, run_name: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fullshard")
        found = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if found is None else found.experiment_id
        return self._client.create_run(experiment_id, run_name=run_name).info.run_id

    def _log_settings(self, settings: Mapping[str, str]) -> None:
        """Logs the settings as parameters, or as tags if the run has the parameter with another value."""
        before: Mapping[str, str] = self._client.get_run(self.run_id).data.params
        new = [self._entities.Param(name, value) for name, value in settings.items() if name not in before]
        for first in range(0, len(new), 100):  # a server accepts at most this many at once
            self._client.log_batch(self.run_id, params=new[first : first + 100])
        for name, value in settings.items():
            if before.get(name, value) != value:
                self._client.set_tag(self.run_id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, *, exit_code: int) -> None:
        status = {0: "FINISHED", INTERRUPTED_EXIT_CODE: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self.run_id, status)
