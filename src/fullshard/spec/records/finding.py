"""Findings of the checks before a run, and the report that contains them."""

from collections.abc import Sequence
from typing import Literal, Self

from fullshard.errors import FullshardError
from fullshard.spec.value import FrozenModel

Status = Literal["ok", "skipped", "warning", "failure"]
_BY_WEIGHT: tuple[Status, ...] = ("skipped", "ok", "warning", "failure")


class Finding(FrozenModel):
    """The result of one check.

    status: `ok`; `skipped` if the check does not apply to this run; `warning` if the run works, but not as
        well as it could, or probably not as intended; `failure` if it cannot work, or its numbers are wrong
    got: what the check found; for `skipped`, the reason
    why: the reason why this is a problem
    fix: a change to try
    check, group: name of the check and of its group; set by the caller of the check
    """

    status: Status
    got: str
    why: str | None = None
    fix: str | None = None
    check: str = ""
    group: str = ""

    @classmethod
    def ok(cls, got: str) -> Self:
        return cls(status="ok", got=got)

    @classmethod
    def skipped(cls, reason: str) -> Self:
        return cls(status="skipped", got=reason)

    @classmethod
    def warning(cls, got: str, *, why: str, fix: str) -> Self:
        return cls(status="warning", got=got, why=why, fix=fix)

    @classmethod
    def failure(cls, got: str, *, why: str | None, fix: str | None, check: str = "") -> Self:
        return cls(status="failure", got=got, why=why, fix=fix, check=check)

    @classmethod
    def from_error(cls, error: FullshardError, *, check: str = "") -> Self:
        return cls.failure(error.what_and_got, why=error.why, fix=error.fix, check=check)

    @property
    def is_problem(self) -> bool:
        return self.status in ("warning", "failure")

    @property
    def text(self) -> str:
        """The name of the check and what was found, with reason and fix on lines of their own."""
        lines = [f"{self.check}: {self.got}"]
        lines += [f"  why: {self.why}"] if self.why else []
        lines += [f"  try: {self.fix}"] if self.fix else []
        return "\n".join(lines)


class CheckReport(FrozenModel):
    """The findings of all checks of a run.

    seconds: duration of the command
    processor_seconds: processor time of the command and of the ranks that it started
    """

    findings: tuple[Finding, ...]
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def worst(self) -> Status:
        return worst_status(self.findings)

    def counts_by_status(self) -> dict[Status, int]:
        """Returns the number of findings of each status that occurs, the worst first."""
        found = [one.status for one in self.findings]
        return {status: found.count(status) for status in reversed(_BY_WEIGHT) if status in found}


def worst_status(findings: Sequence[Finding]) -> Status:
    """Returns the worst status of the findings; `skipped` if there is no other."""
    statuses: list[Status] = ["skipped", *(one.status for one in findings)]
    return max(statuses, key=_BY_WEIGHT.index)
