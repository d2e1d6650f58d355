"""`fullshard report`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fullshard.cli.options import AsJson
from fullshard.cli.train import MEASUREMENT_NAME, PLAN_NAME
from fullshard.system.terminal import escape_control_characters

if TYPE_CHECKING:
    from fullshard.spec.measurement import Measurement
    from fullshard.spec.plan import Plan

# A file in every run's directory: see `fullshard.jobs.run_directory`.
_METRICS = "metrics.jsonl"


class _RunResults(NamedTuple):
    """The results of one run. `plan` is None if the directory has none."""

    directory: Path
    measurement: "Measurement"
    plan: "Plan | None"


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, such as runs/default.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show what was predicted for past runs, and what was measured."""
    runs = [_read_run_results(directory) for directory in directories]
    if as_json:
        typer.echo(json.dumps([_run_json_record(run) for run in runs], indent=2))
        return
    from fullshard.report.measurement import show_measurement

    for index, run in enumerate(runs):
        if index:
            typer.echo()
        prediction = run.plan.prediction if run.plan is not None else None
        show_measurement(run.measurement, prediction=prediction)
        if prediction is None:
            why = "its plan was made without the planner" if run.plan else f"there is no {PLAN_NAME}"
            note = f"note: {run.directory} holds no prediction: {why}"
            typer.echo(escape_control_characters(note), err=True)


def _read_run_results(directory: Path) -> _RunResults:
    """Reads a run's results. Raises SpecError if `directory` is not the directory of a finished run."""
    from fullshard.errors import SpecError
    from fullshard.spec.measurement import Measurement
    from fullshard.spec.plan import Plan

    if not os.path.isdir(directory):
        raise SpecError(f"{directory} is not a directory.", fix="the directory of a run: runs/default")
    measured, planned = directory / MEASUREMENT_NAME, directory / PLAN_NAME
    if not measured.exists():
        got = f"no {MEASUREMENT_NAME} and no {_METRICS}"
        why = "this is not the directory of a run"
        fix = "the directory that run.dir names, such as runs/default"
        if (directory / _METRICS).exists():  # the run has started
            got = f"no {MEASUREMENT_NAME}"
            why = "a run writes it when it ends, or is stopped by Ctrl-C or SIGTERM"
            fix = "wait for its end, or resume it: fullshard train --resume"
        raise SpecError(f"{directory} holds no measurement.", got=got, why=why, fix=fix)
    # A run that was set aside has moved to another directory. The sample is only for the end of a run.
    moved = {"directory": str(directory), "sample": None}
    measurement = Measurement.load(measured).model_copy(update=moved)
    return _RunResults(directory, measurement, Plan.load(planned) if planned.exists() else None)


def _run_json_record(run: _RunResults) -> dict[str, object]:
    """Returns a run's results as JSON values; `comparison` and `prediction` are None without a prediction."""
    from fullshard.report.comparison import compare_prediction

    prediction = run.plan.prediction if run.plan is not None else None
    comparison = None if prediction is None else compare_prediction(prediction, run.measurement)
    return {
        "directory": str(run.directory),
        "measurement": run.measurement.model_dump(mode="json"),
        "prediction": None if prediction is None else prediction.model_dump(mode="json"),
        "comparison": None if comparison is None else comparison.model_dump(mode="json"),
    }
