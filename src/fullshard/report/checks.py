"""Prints what the checks before a run found."""

from collections import defaultdict
from collections.abc import Sequence

from fullshard.quantities import format_seconds
from fullshard.report.table import show_labelled_lines
from fullshard.spec.finding import CheckReport, Finding, worst_status
from fullshard.system.terminal import escape_control_characters

_PLURAL = {"warning": "warnings", "failure": "failures"}


def show_group(group: str, findings: Sequence[Finding], *, verbose: bool) -> None:
    """Prints one line about a group of checks, and its warnings and failures below it.

    verbose: print a line about every check, with what was found
    """
    status = worst_status(findings)
    if verbose:
        rows = [(f"  {one.check}", f"{one.status}: {one.got}") for one in findings if not one.is_problem]
        show_labelled_lines([(group, status), *rows])
    else:
        show_labelled_lines([(f"{group:<9} {status:<8}", group_text(findings))])
    for one in findings:
        if one.is_problem:
            indented = one.text.replace("\n", "\n  ")
            print(escape_control_characters(f"  {one.status}: {indented}"))


def group_text(findings: Sequence[Finding]) -> str:
    """Returns the names of the checks that found nothing, and of those that were skipped with the reasons."""
    fine = [_words(one) for one in findings if one.status == "ok"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for one in findings:
        if one.status == "skipped":
            by_reason[one.got].append(_words(one))
    skipped = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    return "; ".join([*([", ".join(fine)] if fine else []), *([f"skipped: {skipped}"] if skipped else [])])


def _words(finding: Finding) -> str:
    return finding.check.replace("_", " ")


def report_text(report: CheckReport) -> str:
    """Returns the last line: how many checks found what, and how long they took."""
    counts = ", ".join(
        f"{count} {_PLURAL.get(status, status) if count > 1 else status}"
        for status, count in report.counts_by_status().items()
    )
    return (
        f"{len(report.findings)} checks in {format_seconds(report.seconds)} "
        f"({format_seconds(report.processor_seconds)} of processor time): {counts}"
    )
