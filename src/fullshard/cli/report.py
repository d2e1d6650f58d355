"""`fullshard report`."""

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from fullshard.cli.options import AsJson
from fullshard.spec.records.run_files import MEASUREMENT, METRICS, PLAN
from fullshard.system.terminal import escape_control_characters

if TYPE_CHECKING:
    from fullshard.report.kernels import KernelSummary
    from fullshard.report.run_record import RunRecord
    from fullshard.spec.machine.hardware import Hardware
    from fullshard.spec.plan import Plan
    from fullshard.spec.records.measurement import Measurement


class _RunResults(NamedTuple):
    """The results of one run. `plan` is None if the directory has none."""

    directory: Path
    measurement: "Measurement"
    plan: "Plan | None"


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, such as runs/default.")
    ],
    *,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page about the runs, also while they train."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --html: replace a file that is not such a page.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what was predicted and measured, as text or as a page."""
    if html_path is not None:
        if as_json:
            raise typer.BadParameter("--html writes a page, and --json prints values: give one of them")
        _write_page(directories, html_path, force=force)
        return
    runs = [_read_run_results(directory) for directory in directories]
    if as_json:
        typer.echo(json.dumps([_run_json_record(run) for run in runs], indent=2))
        return
    from fullshard.report.comparison import show_measurement
    from fullshard.report.kernels import show_kernels

    for index, run in enumerate(runs):
        if index:
            typer.echo()
        prediction = run.plan.prediction if run.plan is not None else None
        show_measurement(run.measurement, prediction=prediction)
        if prediction is None:
            why = "its plan was made without the planner" if run.plan else f"there is no {PLAN}"
            note = f"note: {run.directory} holds no prediction: {why}"
            typer.echo(escape_control_characters(note), err=True)
        if (kernels := _read_kernels(run)) is not None:
            typer.echo()
            show_kernels(kernels)


def _write_page(directories: list[Path], path: Path, *, force: bool) -> None:
    """Writes the page about the runs to `path`. Raises SpecError if it cannot be written."""
    from fullshard.errors import SpecError
    from fullshard.jobs.run_directory import find_run_lock_holder
    from fullshard.quantities import format_bytes
    from fullshard.report.page import is_page, render_page
    from fullshard.report.run_record import read_run
    from fullshard.system.files import write_file_atomically
    from fullshard.system.targets import check_output_file

    check_output_file(path, is_kind=is_page, force=force)
    now, hardware = datetime.now(UTC), _calibrated_hardware()
    runs: list[RunRecord] = []
    for directory in directories:
        try:
            is_running = find_run_lock_holder(directory) is not None
        except OSError:  # a lock that this user may not read, or none on such a file system
            is_running = False
        runs.append(read_run(directory, is_running=is_running, now=now, hardware=hardware))
    page = render_page(runs)
    try:
        write_file_atomically(path, page)
    except OSError as error:
        raise SpecError(f"{path} cannot be written.", got=error.strerror, fix="another path") from error
    written = f"wrote {path} ({format_bytes(len(page.encode()))})"
    typer.echo(escape_control_characters(written))


def _read_run_results(directory: Path) -> _RunResults:
    """Reads a run's results. Raises SpecError if `directory` is not the directory of a finished run."""
    from fullshard.errors import SpecError
    from fullshard.spec.plan import Plan
    from fullshard.spec.records.measurement import Measurement

    if not os.path.isdir(directory):
        raise SpecError(f"{directory} is not a directory.", fix="the directory of a run: runs/default")
    measured, planned = directory / MEASUREMENT, directory / PLAN
    if not measured.exists():
        got = f"no {MEASUREMENT} and no {METRICS}"
        why = "this is not the directory of a run"
        fix = "the directory that run.dir names, such as runs/default"
        if (directory / METRICS).exists():  # the run has started
            got = f"no {MEASUREMENT}"
            why = "a run writes it when it ends, or is stopped by Ctrl-C or SIGTERM"
            fix = "wait for its end, or resume it: fullshard train --resume"
        raise SpecError(f"{directory} holds no measurement.", got=got, why=why, fix=fix)
    # A run that was set aside has moved to another directory. The sample is only for the end of a run.
    moved = {"directory": str(directory), "sample": None}
    measurement = Measurement.load(measured).model_copy(update=moved)
    return _RunResults(directory, measurement, Plan.load(planned) if planned.exists() else None)


def _calibrated_hardware() -> "Hardware | None":
    """Returns the hardware that `fullshard calibrate` measured; None without a readable file."""
    from fullshard.errors import SpecError
    from fullshard.launch.detect import user_hardware_path
    from fullshard.spec.machine.hardware import Hardware

    path = user_hardware_path()
    try:
        return Hardware.load(path) if path.exists() else None
    except SpecError:
        return None


def _read_kernels(run: _RunResults) -> "KernelSummary | None":
    from fullshard.report.kernels import summarise_last_profile
    from fullshard.report.run_record import rates_of_run

    return summarise_last_profile(run.directory, rates=rates_of_run(run.plan, _calibrated_hardware()))


def _run_json_record(run: _RunResults) -> dict[str, object]:
    """Returns a run's results as JSON values; `comparison` and `prediction` are None without a prediction."""
    from fullshard.report.comparison import compare_prediction

    prediction = run.plan.prediction if run.plan is not None else None
    comparison = None if prediction is None else compare_prediction(prediction, run.measurement)
    kernels = _read_kernels(run)
    return {
        "directory": str(run.directory),
        "measurement": run.measurement.model_dump(mode="json"),
        "prediction": None if prediction is None else prediction.model_dump(mode="json"),
        "comparison": None if comparison is None else comparison.model_dump(mode="json"),
        "kernels": None if kernels is None else asdict(kernels),
    }
