"""The checks that need neither torch nor the model, some of which precede every `fullshard train`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from fullshard.checks.gpus import (
    check_cuda_build,
    check_gpu_health,
    check_other_processes_on_gpus,
    check_topology,
)
from fullshard.checks.machine import (
    check_environment_variables,
    check_host_names,
    check_huge_pages,
    check_idle_machine,
    check_memory_and_quota,
    check_open_files,
    check_pinned_cores,
    check_shared_memory,
    check_threads,
    check_torch_version,
)
from fullshard.checks.run_context import RunContext
from fullshard.checks.settings import check_settings
from fullshard.checks.storage import check_atomic_rename, check_checkpoint_space, check_flush
from fullshard.errors import CheckFailedError
from fullshard.spec.finding import Finding


class Check(NamedTuple):
    """One check.

    name: as in docs/check.md
    group: findings of a group are printed together
    find: makes the finding, from the part of the context that `group` needs
    is_quick: whether it precedes every `fullshard train`
    """

    name: str
    group: Literal["settings", "machine", "storage", "model", "data", "ranks"]
    find: Callable[[Any], Finding]
    is_quick: bool = False

    def name_finding(self, finding: Finding) -> Finding:
        """Returns `finding` with the names of the group and, unless it has a name, of the check."""
        return finding.model_copy(update={"check": finding.check or self.name, "group": self.group})


CHECKS_WITHOUT_TORCH = (
    Check("settings", "settings", check_settings, is_quick=True),
    Check("torch_version", "machine", check_torch_version, is_quick=True),
    Check("cuda_build", "machine", check_cuda_build),
    Check("topology", "machine", check_topology),
    Check("environment_variables", "machine", check_environment_variables, is_quick=True),
    Check("open_files", "machine", check_open_files, is_quick=True),
    Check("shared_memory", "machine", check_shared_memory, is_quick=True),
    Check("memory_and_quota", "machine", check_memory_and_quota, is_quick=True),
    Check("pinned_cores", "machine", check_pinned_cores, is_quick=True),
    Check("threads", "machine", check_threads, is_quick=True),
    Check("huge_pages", "machine", check_huge_pages, is_quick=True),
    Check("gpu_health", "machine", check_gpu_health),
    Check("other_processes", "machine", check_other_processes_on_gpus),
    Check("host_names", "machine", check_host_names, is_quick=True),
    Check("idle_machine", "machine", check_idle_machine),
    Check("atomic_rename", "storage", check_atomic_rename),
    Check("flush", "storage", check_flush),
    Check("checkpoint_space", "storage", check_checkpoint_space, is_quick=True),
)


def quick_problems(context: RunContext) -> list[Finding]:
    """Returns the warnings and failures of the quick checks, which take milliseconds and no torch."""
    quick = [one for one in CHECKS_WITHOUT_TORCH if one.is_quick]
    found = [one.name_finding(one.find(context)) for one in quick]
    return [one for one in found if one.is_problem]


def raise_first_failure(findings: Sequence[Finding]) -> None:
    """Raises CheckFailedError for the first finding that is a failure, if any."""
    for one in findings:
        if one.status == "failure":
            raise CheckFailedError(f"the check {one.check} failed.", got=one.got, why=one.why, fix=one.fix)
