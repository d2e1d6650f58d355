"""`fullshard report`."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.options import AsJson
from fullshard.spec.records.run_files import PLAN
from fullshard.system.terminal import escape_control_characters

if TYPE_CHECKING:
    from fullshard.report.run_record import RunRecord


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, such as runs/default.")
    ],
    *,
    html_path: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page about the runs, with curves.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --html: replace a file that is not such a page.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what runs predicted and measured, as text or as a page.

    The run may be training still, or have died.
    """
    from fullshard.report.comparison import side_by_side_table
    from fullshard.report.table import show_table

    if html_path is not None and as_json:
        raise typer.BadParameter("--html writes a page, and --json prints values: give one of them")
    if html_path is not None:
        _write_page(directories, html_path, force=force)
        return
    runs = [_read_run(directory) for directory in directories]
    if as_json:
        typer.echo(json.dumps([_run_json_record(run) for run in runs], indent=2))
        return
    for index, run in enumerate(runs):
        if index:
            typer.echo()
        _show_run(run)
    if len(runs) > 1:
        typer.echo()
        show_table(*side_by_side_table(runs))


def _read_run(directory: Path) -> "RunRecord":
    from fullshard.jobs.run_directory import find_run_lock_holder
    from fullshard.report.run_record import read_run

    try:
        is_running = find_run_lock_holder(directory) is not None
    except OSError:  # a lock that this user may not read, or none on such a file system
        is_running = False
    return read_run(directory, is_running=is_running, now=datetime.now(UTC))


def _show_run(run: "RunRecord") -> None:
    from fullshard.report.comparison import show_run

    show_run(run)
    notes = [f"this version cannot read {name}, which is left out" for name in run.unreadable]
    if run.prediction is None:
        why = "its plan was made without the planner" if run.plan else f"there is no {PLAN}"
        notes.append(f"{run.directory} holds no prediction: {why}")
    for note in notes:
        typer.echo(escape_control_characters(f"note: {note}"), err=True)


def _write_page(directories: list[Path], path: Path, *, force: bool) -> None:
    from fullshard.quantities import format_bytes
    from fullshard.report.page import is_report_page, render_page
    from fullshard.system.files import write_file_atomically
    from fullshard.system.targets import check_output_file, convert_write_errors

    check_output_file(path, is_kind=is_report_page, force=force)
    page = render_page(*map(_read_run, directories))
    with convert_write_errors(path):
        write_file_atomically(path, page)
    written = f"wrote {path} ({format_bytes(len(page.encode()))})"
    typer.echo(escape_control_characters(written))


def _run_json_record(run: "RunRecord") -> dict[str, object]:
    """Returns a run's records as JSON values; what is not known is None."""
    from fullshard.report.comparison import compare_run

    prediction, measurement = run.prediction, run.measurement
    return {
        "directory": str(run.directory),
        "state": run.state,
        "step": run.last_step,
        "measurement": None if measurement is None else measurement.model_dump(mode="json"),
        "prediction": None if prediction is None else prediction.model_dump(mode="json"),
        "comparison": None if prediction is None else compare_run(run).model_dump(mode="json"),
    }
