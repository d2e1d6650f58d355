"""`fullshard train`."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.options import AsJson, Overrides, RunPath
from fullshard.spec.records.run_files import EVENTS, LAUNCH, MEASUREMENT, OUT_OF_MEMORY, PLAN
from fullshard.system.files import append_to_file, hold_exclusive_file_lock
from fullshard.system.terminal import escape_control_characters

if TYPE_CHECKING:
    from fullshard.launch.request import LaunchRequest
    from fullshard.spec.plan import Plan
    from fullshard.spec.run import Run

_FITTING, _PLANNING_SECONDS = "would have fitted: ", 600.0


def train(
    *,
    run_path: RunPath = None,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in the run's directory.")
    ] = False,
    plan_path: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="PLAN.json",
            help="A saved plan. It contains its run, except permission to run code.",
        ),
    ] = None,
    no_plan: Annotated[
        bool, typer.Option("--no-plan", help="Do not trace the model or search: the run's plain defaults.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a sharded model on all GPUs, or on two CPU ranks.

    Under torchrun or srun, the ranks that they started train it.
    """
    started = time.time()
    if no_plan and plan_path is not None:
        raise typer.BadParameter("--plan gives a plan, and --no-plan wants none")
    request = _build_train_request(run_path, overrides or [], plan_path=plan_path, started=started)
    request = request.model_copy(update={"resume": resume})
    _check_run_directory(request.run, resume=resume)
    if request.run.log.trackers:
        from fullshard.observe.trackers import check_trackers_installed

        check_trackers_installed(request.run.log.trackers)
    from fullshard.jobs.for_run import planned_on_rank_zero, request_with_plan
    from fullshard.launch.environment import is_started_by_torchrun
    from fullshard.launch.start import perform_request
    from fullshard.quantities import count_text

    def plan_and_check() -> "LaunchRequest":
        planned = request_with_plan(request, plain_defaults=no_plan)
        _run_quick_checks(planned)
        return planned

    with planned_on_rank_zero(request, plan_and_check) as planned:
        # Ranks print nothing until they have imported torch, built the model and opened the data.
        if planned.plan is not None and not is_started_by_torchrun():
            typer.echo(f"starting {count_text(planned.plan.world_size, 'rank')} …", err=True)
        try:
            exit_code = perform_request(planned)
        finally:
            _advise_after_out_of_memory(request.run, planned.plan, since=started)
    if os.environ.get("RANK", "0") == "0":
        with suppress(SystemExit):  # the reader of standard output has left, after the run has ended
            _show_measurement(request.run, since=started, as_json=as_json)
            sys.stdout.flush()
    raise typer.Exit(exit_code)


def _build_train_request(
    run_path: Path | None, overrides: list[str], *, plan_path: Path | None, started: float
) -> "LaunchRequest":
    from fullshard.launch.request import LaunchRequest
    from fullshard.spec.plan import Plan
    from fullshard.spec.run import Run
    from fullshard.spec.settings.run_checks import check_plan_is_trusted_and_of_run

    given = Run.load(run_path, overrides=overrides)
    if plan_path is None:
        return LaunchRequest(run=given, command_started=started)
    plan = Plan.load(plan_path, ignores_unknown=False)
    check_plan_is_trusted_and_of_run(plan.run, given, plan=str(plan_path))
    return LaunchRequest(run=plan.run, plan=plan, command_started=started)


def _check_run_directory(run: "Run", *, resume: bool) -> None:
    """Checks `run.dir` before anything is planned or started; under torchrun or srun, only its name.

    Raises SpecError if it is not a run's directory, TrainError if it cannot be written or is in use.
    """
    from fullshard.jobs.run_directory import (
        LaunchId,
        check_unlocked,
        check_usable_by_new_run,
        check_writable,
        parse_run_directory,
    )
    from fullshard.launch.environment import is_started_by_torchrun

    directory = parse_run_directory(run.run.dir)
    # Ranks that torchrun or srun started can only decide together whether they resume the existing run.
    if is_started_by_torchrun():
        return
    if LaunchId.from_environment().find_earlier_attempt(directory / LAUNCH) is None:
        if not resume:
            check_usable_by_new_run(directory, offload_path=run.offload.path)
            check_writable(directory)
        check_unlocked(directory)


def _run_quick_checks(request: "LaunchRequest") -> None:
    """Prints the warnings of the checks without torch. Raises CheckFailedError for a failure."""
    if request.plan is None:
        return
    from fullshard.errors import CheckFailedError
    from fullshard.jobs.checks.machine import RunContext, quick_problems

    found = quick_problems(RunContext(request.plan))
    for one in found:
        if one.status == "warning":
            typer.echo(escape_control_characters(f"warning: {one.text}"), err=True)
    for one in found:
        if one.status == "failure":
            raise CheckFailedError(f"the check {one.check} failed.", got=one.got, why=one.why, fix=one.fix)


def _advise_after_out_of_memory(given: "Run", plan: "Plan | None", *, since: float) -> None:
    """Prints the settings that would have fitted, and adds them to the reports of ranks without memory.

    Does nothing if there are none since `since`. Under torchrun or srun, one of the ranks that end plans, and
    the others wait for it: torchrun ends all ranks once one has ended.

    given: the run before the planner chose its open settings
    """
    from fullshard.jobs.for_run import fitting_settings_text
    from fullshard.spec.records.event import read_events

    directory = Path(given.run.dir, OUT_OF_MEMORY)
    with suppress(OSError):
        if plan is None or directory.stat().st_mtime < since:
            return
        with hold_exclusive_file_lock(directory / "planning", patience_seconds=_PLANNING_SECONDS):
            failures = [
                one
                for one in read_events(Path(given.run.dir, EVENTS))
                if one.event == "out_of_memory"
                and one.at.timestamp() >= since
                and isinstance(one.details.get("held_bytes"), int)
            ]
            reports = [directory / Path(str(one.details.get("path"))).name for one in failures]
            is_written = (one.is_file() and _FITTING in one.read_text(errors="replace") for one in reports)
            if not failures or any(is_written):
                return
            text = fitting_settings_text(given, plan, failures=failures)
            line = f"{_FITTING}{text or 'unknown'}"  # unknown is written too, so that no other rank plans
            for report in reports:
                with suppress(OSError):  # such as a link in its place
                    append_to_file(report, f"\n{line}\n")
            if text is not None:
                typer.echo(escape_control_characters(line), err=True)


def _show_measurement(run: "Run", *, since: float, as_json: bool) -> None:
    """Prints the run's measurement, unless it is absent or from before `since` (seconds of the epoch)."""
    path = Path(run.run.dir, MEASUREMENT)
    if not path.exists() or path.stat().st_mtime < since:
        return
    if as_json:
        typer.echo(escape_control_characters(path.read_text(encoding="utf-8").rstrip()))
        return
    from fullshard.report.comparison import show_measurement
    from fullshard.spec.plan import Plan
    from fullshard.spec.records.measurement import Measurement

    prediction = Plan.load(path.with_name(PLAN)).prediction
    show_measurement(Measurement.load(path), prediction=prediction)
