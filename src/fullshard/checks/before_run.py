"""The checks that need neither torch nor the model, some of which precede every `fullshard train`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from fullshard.checks.machine import (
    check_checkpoint_space,
    check_cuda_build,
    check_environment_variables,
    check_gpu_health,
    check_host_names,
    check_memory_and_quota,
    check_other_processes_on_gpus,
    check_shared_memory,
)
from fullshard.checks.run_context import RunContext
from fullshard.checks.settings import check_settings
from fullshard.errors import CheckFailedError
from fullshard.spec.finding import Finding


class Check(NamedTuple):
    """One check.

    name: as in docs/check.md
    group: findings of a group are printed together
    find: makes the finding, from the part of the context that `group` needs
    report: a public report of a fault that the check finds: an issue or pull request of GitHub
    is_quick: whether it precedes every `fullshard train`
    """

    name: str
    group: Literal["settings", "machine", "storage", "model", "data", "ranks"]
    find: Callable[[Any], Finding]
    report: str
    is_quick: bool = False

    def name_finding(self, finding: Finding) -> Finding:
        """Returns `finding` with the names of the group and, unless it has a name, of the check."""
        return finding.model_copy(update={"check": finding.check or self.name, "group": self.group})


CHECKS_WITHOUT_TORCH = (
    Check("settings", "settings", check_settings, "PrimeIntellect-ai/prime-rl#968", is_quick=True),
    Check("cuda_build", "machine", check_cuda_build, "pytorch/pytorch#4546"),
    Check("environment_variables", "machine", check_environment_variables, "NVIDIA/nccl#631", is_quick=True),
    Check("shared_memory", "machine", check_shared_memory, "pytorch/torchtitan#853", is_quick=True),
    Check("memory_and_quota", "machine", check_memory_and_quota, "deepspeedai/DeepSpeed#4239", is_quick=True),
    Check("gpu_health", "machine", check_gpu_health, "huggingface/trl#4149"),
    Check("other_processes", "machine", check_other_processes_on_gpus, "pytorch/pytorch#4293"),
    Check("host_names", "machine", check_host_names, "pytorch/examples#540", is_quick=True),
    Check("checkpoint_space", "storage", check_checkpoint_space, "mlfoundations/open_lm#154", is_quick=True),
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
