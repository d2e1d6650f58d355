"""Experiment trackers that receive a run's figures: tensorboard, wandb and mlflow, each an optional extra."""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fullshard.errors import INTERRUPTED_EXIT_CODE, MissingExtraError, SpecError, TrainError
from fullshard.spec.run import Run


class Tracker(Protocol):
    """A destination for the figures of a run's steps. Created on rank 0 only."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records the values of a step. Raises TrainError if the tracker is not reachable."""

    def close(self, *, exit_code: int = 0) -> None:
        """Sends remaining data, and how the run ended: finished if `exit_code` is 0. Raises TrainError."""


def check_trackers_installed(names: Sequence[str]) -> None:
    """Raises MissingExtraError for the first of the named packages that is not installed. Imports none."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(name, package=name, needed_for=f'log.trackers = ["{name}"]')


def open_trackers(run: Run, *, after_step: int = 0) -> list[Tracker]:
    """Creates the trackers that `run.log.trackers` names, which must be installed.

    after_step: the step after which the run resumes, or 0

    Raises SpecError if a tracker does not start.
    """
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorboardTracker(run, after_step=after_step),
        "wandb": lambda: WandbTracker(run),
        "mlflow": lambda: MlflowTracker(run),
    }
    return [makers[name]() for name in run.log.trackers]


class TensorboardTracker:
    """Writes event files into `<run.dir>/tensorboard`. Steps that a resumed run repeats are shown once."""

    def __init__(self, run: Run, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = Path(run.run.dir, "tensorboard")
        try:
            self._writer = SummaryWriter(str(directory), purge_step=after_step + 1 if after_step else None)
        except OSError as error:
            raise SpecError(f"tensorboard cannot write to {directory}.", got=error.strerror) from error
        settings = "\n".join(f"    {name} = {value}" for name, value in _iterate_settings(run))
        self._writer.add_text("run", settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, exit_code: int = 0) -> None:
        del exit_code  # event files have no place for it
        self._writer.close()


class WandbTracker:
    """Logs to a run of the wandb project `fullshard` (or WANDB_PROJECT), with files in `<run.dir>/wandb`."""

    def __init__(self, run: Run) -> None:
        wandb = importlib.import_module("wandb")
        Path(run.run.dir).mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fullshard"),
                name=Path(run.run.dir).name,
                dir=run.run.dir,
                config=dict(_iterate_settings(run)),
                settings=wandb.Settings(console="off"),  # the terminal is ours
            )
        except wandb.errors.Error as error:
            fix = "wandb login, or WANDB_MODE=offline"
            raise SpecError("wandb will not start.", got=str(error), fix=fix) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)


class MlflowTracker:
    """Logs to a run of the mlflow experiment `fullshard` (or MLFLOW_EXPERIMENT_NAME).

    The data is stored at MLFLOW_TRACKING_URI, or else in `<run.dir>/mlflow.db`.
    """

    def __init__(self, run: Run) -> None:
        mlflow = importlib.import_module("mlflow")
        self._entities: ModuleType = importlib.import_module("mlflow.entities")
        self._failure: type[Exception] = mlflow.exceptions.MlflowException
        directory = Path(run.run.dir).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory / 'mlflow.db'}"
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=address)
            self._run_id: str = self._create_mlflow_run(run)
        except self._failure as error:
            fix = "MLFLOW_TRACKING_URI=<address of a server>"
            raise SpecError("mlflow will not start.", got=str(error), fix=fix) from error

    def _create_mlflow_run(self, run: Run) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fullshard")
        found = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if found is None else found.experiment_id
        run_id = self._client.create_run(experiment_id, run_name=Path(run.run.dir).name).info.run_id
        settings = [self._entities.Param(name, str(value)) for name, value in _iterate_settings(run)]
        for first in range(0, len(settings), 100):  # a server accepts at most this many at once
            self._client.log_batch(run_id, params=settings[first : first + 100])
        return run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        try:
            self._client.log_batch(self._run_id, metrics=metrics)
        except self._failure as error:
            raise TrainError("mlflow does not take the metrics.", got=str(error)) from error

    def close(self, *, exit_code: int = 0) -> None:
        status = {0: "FINISHED", INTERRUPTED_EXIT_CODE: "KILLED"}.get(exit_code, "FAILED")
        try:
            self._client.set_terminated(self._run_id, status)
        except self._failure as error:
            raise TrainError("mlflow does not take the end of the run.", got=str(error)) from error


def _iterate_settings(run: Run) -> Iterator[tuple[str, Any]]:
    """Yields (`section.key`, value) for every setting of the Run."""
    for section, fields in run.model_dump(mode="json").items():
        for key, value in fields.items():
            yield f"{section}.{key}", value
