"""`fullshard check`."""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.options import AsJson, Overrides, RunPath
from fullshard.system.terminal import escape_control_characters, is_live_terminal

if TYPE_CHECKING:
    from fullshard.spec.plan import Plan
    from fullshard.spec.records.finding import CheckReport, Finding
    from fullshard.spec.run import Run

# On the CPU, two ranks show what more ranks would show.
_CPU_RANKS = 2
_TIMEOUT_SECONDS = 120.0  # how long ranks wait for each other
_PLURAL = {"warning": "warnings", "failure": "failures"}


def check(
    run_path: RunPath = None,
    *,
    overrides: Overrides = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what every check found.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check model, data, machine and settings before a run.

    Trains nothing, and takes about half a minute. Under torchrun or srun, checks the links and versions
    of all hosts. The exit code is 0 without a failure (warnings are allowed), and 10 with one.
    docs/check.md explains every check.
    """
    from fullshard.errors import CheckFailedError
    from fullshard.spec.records.finding import CheckReport
    from fullshard.spec.run import Run

    started, run = time.monotonic(), Run.load(run_path, overrides=overrides or [])
    plan, found = _plan_and_check_ranks_of_launcher(run)
    if os.environ.get("RANK", "0") != "0":
        raise typer.Exit(0)
    if plan is not None:
        found = _collect_and_show(plan, by_ranks=found, verbose=verbose, as_json=as_json)
    elif not as_json:
        _show_group("settings", found, verbose=verbose)
    seconds = time.monotonic() - started
    report = CheckReport(
        findings=tuple(found), seconds=round(seconds, 2), processor_seconds=round(sum(os.times()[:4]), 2)
    )
    if as_json:
        typer.echo(report.model_dump_json())
    else:
        typer.echo(_totals_text(report))
        if plan is None:
            typer.echo(_checks_not_run_text())
    raise typer.Exit(CheckFailedError.exit_code if report.worst == "failure" else 0)


def _plan_and_check_ranks_of_launcher(run: "Run") -> "tuple[Plan | None, Sequence[Finding]]":
    """Returns (the plan that `fullshard train` would run, rank 0's findings).

    If no plan is found, the plan is None, and its error is the finding. Ranks of torchrun or srun are checked
    here, because they would wait while rank 0 makes the other checks.
    """
    from fullshard.errors import FullshardError
    from fullshard.jobs.for_run import planned_on_rank_zero, request_with_plan
    from fullshard.launch.environment import is_started_by_torchrun
    from fullshard.launch.request import LaunchRequest
    from fullshard.spec.records.finding import Finding

    request, failures = LaunchRequest(run=run), list[Finding]()

    def plan_or_note_failure() -> LaunchRequest:
        try:
            return request_with_plan(request)
        except FullshardError as error:
            failures.append(Finding.from_error(error, check="plan").model_copy(update={"group": "settings"}))
            return request

    with planned_on_rank_zero(request, plan_or_note_failure, timeout_seconds=_TIMEOUT_SECONDS) as planned:
        if planned.plan is None or not is_started_by_torchrun():
            return planned.plan, failures
        return planned.plan, _run_rank_checks(planned.plan)


def _collect_and_show(
    plan: "Plan", *, by_ranks: "Sequence[Finding]", verbose: bool, as_json: bool
) -> "Sequence[Finding]":
    """Shows and returns what all checks find. `by_ranks`: findings of ranks, if these were checked before."""
    from fullshard.jobs.checks.every_check import CHECKS, iterate_findings

    found: list[Finding] = []
    for group in (*CHECKS, "ranks"):
        if is_live_terminal(sys.stderr) and group in ("model", "data", "ranks"):
            print(f"checking the {group} …", file=sys.stderr, flush=True)
        if group == "ranks":
            own = by_ranks or _run_rank_checks(plan)
        else:
            own = list(iterate_findings(_build_input_of_checks(group, plan), group=group))
        if not as_json:
            _show_group(group, own, verbose=verbose)
        found += own
    return found


def _build_input_of_checks(group: str, plan: "Plan") -> object:
    """Returns what the checks of `group` read, or the finding that says why it is missing."""
    if group == "model":
        from fullshard.jobs.checks.model_trial import build_model_trial

        return build_model_trial(plan)
    if group == "data":
        from fullshard.jobs.checks.data import build_data_trial

        return build_data_trial(plan)
    from fullshard.jobs.checks.machine import RunContext

    return RunContext(plan)


def _run_rank_checks(plan: "Plan") -> "Sequence[Finding]":
    """Returns what the ranks of the run find out about each other, or a finding that they failed.

    Starts the ranks, on the CPU at most two; under torchrun or srun, this process is one of them.
    """
    from fullshard.jobs.checks.ranks import FILE_NAME
    from fullshard.launch.request import LaunchRequest
    from fullshard.launch.start import perform_request, temporary_private_directory
    from fullshard.spec.records.finding import CheckReport, Finding

    ranks = min(plan.world_size, _CPU_RANKS) if plan.device == "cpu" else plan.world_size
    with temporary_private_directory() as directory:
        own = {"dir": directory, "ranks": ranks, "restarts": 0, "device": plan.device}
        run = plan.run.with_settings({"run": own})
        job, arguments = "fullshard.jobs.checks.ranks:run_rank_checks", {"timeout_seconds": _TIMEOUT_SECONDS}
        exit_code = perform_request(LaunchRequest(run=run, job=job, arguments=arguments))
        path = Path(directory, FILE_NAME)
        if exit_code == 0 and path.exists():
            return CheckReport.read_json(path, what="the findings of the ranks").findings
    if exit_code > 128:  # a signal ended them
        raise typer.Exit(exit_code)
    failed = Finding.failure(
        f"the ranks ended with exit code {exit_code}; the message is above",
        why="a run would end like this in its first step",
        fix="FULLSHARD_TRACEBACK=1 fullshard check shows where",
    )
    return [failed.model_copy(update={"check": "ranks", "group": "ranks"})]


def _show_group(group: str, findings: "Sequence[Finding]", *, verbose: bool) -> None:
    """Prints one line about a group of checks, and its warnings and failures below it.

    verbose: print a line about every check, with what was found
    """
    from fullshard.report.table import show_labelled_lines
    from fullshard.spec.records.finding import worst_status

    status = worst_status(findings)
    if verbose:
        rows = [(f"  {one.check}", f"{one.status}: {one.got}") for one in findings if not one.is_problem]
        show_labelled_lines([(group, status), *rows])
    else:
        show_labelled_lines([(f"{group:<9} {status:<8}", passed_and_skipped_check_names(findings))])
    for one in findings:
        if one.is_problem:
            indented = one.text.replace("\n", "\n  ")
            print(escape_control_characters(f"  {one.status}: {indented}"))
    sys.stdout.flush()


def passed_and_skipped_check_names(findings: "Sequence[Finding]") -> str:
    """Returns the names of the checks that found nothing, and of those that were skipped with the reasons."""
    fine = [_name_of_check_in_words(one) for one in findings if one.status == "ok"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in findings:
        if one.status == "skipped":
            by_reason[one.got].append(_name_of_check_in_words(one))
    skipped = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return "; ".join([*([", ".join(fine)] if fine else []), *([f"skipped: {skipped}"] if skipped else [])])


def _name_of_check_in_words(finding: "Finding") -> str:
    return finding.check.replace("_", " ")


def _checks_not_run_text() -> str:
    from fullshard.jobs.checks.every_check import CHECKS
    from fullshard.quantities import count_text

    number = count_text(sum(len(checks) for checks in CHECKS.values()), "check")
    return f"not run, because there is no plan: {number} of {', '.join(CHECKS)}, and those of the ranks"


def _totals_text(report: "CheckReport") -> str:
    """Returns the last line: the number of checks by status, and how long they took."""
    from fullshard.quantities import count_text, format_seconds

    counts = ", ".join(
        f"{count} {_PLURAL.get(status, status) if count > 1 else status}"
        for status, count in report.counts_by_status().items()
    )
    return (
        f"{count_text(len(report.findings), 'check')} in {format_seconds(report.seconds)} "
        f"({format_seconds(report.processor_seconds)} of processor time): {counts}"
    )
