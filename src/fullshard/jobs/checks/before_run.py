"""The checks that need neither torch nor the model, some of which precede every `fullshard train`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from fullshard.errors import CheckFailedError, SpecError
from fullshard.jobs.checks.machine import (
    RunContext,
    check_checkpoint_space,
    check_cuda_build,
    check_environment_variables,
    check_gpu_health,
    check_host_names,
    check_memory_and_quota,
    check_other_processes_on_gpus,
    check_shared_memory,
)
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.training.learning_rates import learning_rate_factor, warmup_warning

_HIGH_RATE_FOR_WEIGHTS = 1e-3


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


def _check_settings(context: RunContext) -> Finding:
    """Checks learning rate, saves, restarts and validation against the number of steps."""
    found = list(_iterate_problems(context.run))
    if found:
        return Finding.warning(
            "; ".join(problem for problem, _ in found),
            why="each setting is valid, and together they rarely are what is intended",
            fix="; ".join(fix for _, fix in found),
        )
    section = context.run.train
    return Finding.ok(f"{section.step_count} steps, warmup of {context.run.schedule.warmup_steps}")


def _iterate_problems(run: Run) -> Iterator[tuple[str, str]]:
    """Yields (problem, fix)."""
    steps, saves, schedule = run.train.step_count, run.checkpoint, run.schedule
    if (warmup := warmup_warning(run)) is not None:
        yield warmup, f"schedule.warmup_steps = {max(1, steps // 10)}"
    elif schedule.kind != "constant" and schedule.warmup_steps == steps > 1:
        yield "schedule.warmup_steps is train.steps: the rate never decays", "fewer schedule.warmup_steps"
    if steps > 1 and learning_rate_factor(schedule, step=steps - 1, steps=steps) == 0:
        yield "the learning rate is 0 in the last step, which trains nothing", "schedule.min_lr_ratio = 0.01"
    if run.run.restarts and not saves.every:
        yield "run.restarts without checkpoint.every: a restart begins at step 1", "checkpoint.every = 100"
    if run.fault_tolerance.on_spike == "rollback" and not saves.every:
        yield 'fault_tolerance.on_spike = "rollback" without checkpoints to return to', "checkpoint.every"
    if saves.every > steps:
        yield f"checkpoint.every = {saves.every} is more than train.steps = {steps}", "a smaller one"
    if saves.keep_every and (not saves.every or saves.keep_every % saves.every):
        yield (
            f"checkpoint.keep_every = {saves.keep_every} is no multiple of checkpoint.every = {saves.every}",
            "a multiple of it, since only steps that are saved are kept",
        )
    validates = run.train.validate_every not in (0, type(run.train)().validate_every)
    if validates and run.train.validate_every > steps:
        every = run.train.validate_every
        yield f"train.validate_every = {every} is more than train.steps = {steps}", "a smaller one"
    if _has_weights(run) and run.optimizer.learning_rate > _HIGH_RATE_FOR_WEIGHTS and not run.adapter.rank:
        rate = run.optimizer.learning_rate
        yield f"optimizer.learning_rate = {rate:g} for weights that are trained already", "2e-5"


def _has_weights(run: Run) -> bool:
    if not isinstance(run.model, HuggingFaceModel) or run.model.weights == "none":
        return False
    try:
        directory = locate_config_file(run.model.hf).parent
    except SpecError:
        return False
    return any(directory.glob("*.safetensors"))


CHECKS_WITHOUT_TORCH = (
    Check("settings", "settings", _check_settings, "PrimeIntellect-ai/prime-rl#968", is_quick=True),
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
