"""Faults that the checks before a run are meant to find, each with the check that must find it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fullshard.jobs.checks.data import build_data_trial
from fullshard.jobs.checks.every_check import CHECKS, iterate_findings
from fullshard.jobs.checks.machine import RunContext
from fullshard.jobs.checks.model_trial import build_model_trial
from fullshard.spec.plan import Plan
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from tests.fakes.machines import GIB, context_of, gpu_machine, quiet_machine

GROUP_OF = {one.__name__.removeprefix("check_"): group for group, found in CHECKS.items() for one in found}


class Fault(NamedTuple):
    """A fault: what is broken, the check that is meant for it, and the part of a run that the check reads."""

    name: str
    check: str
    make: Callable[[Path], object]


def of_settings(*settings: str) -> Callable[[Path], object]:
    return lambda path: context_of(quiet_machine(path), *settings)


OWN_BATCHES = ("data.source=python", "data.factory=tests.fakes.broken:Batches")


def plan_of_decoder(fault: str, *settings: str, batches: tuple[str, ...] = OWN_BATCHES) -> Plan:
    own = ("model.python=tests.fakes.broken:Decoder", f'model.options={{fault="{fault}"}}')
    plain = ("data.sequence_length=16", "precision.mode=fp32")
    return Plan.from_run(Run.load(overrides=[*own, *batches, *plain, *settings]), world_size=2)


def of_model(fault: str, *settings: str, batches: tuple[str, ...] = OWN_BATCHES) -> Callable[[Path], object]:
    return lambda path: build_model_trial(plan_of_decoder(fault, *settings, batches=batches))


def of_data(fault: str) -> Callable[[Path], object]:
    def make(path: Path) -> object:
        found = build_data_trial(plan_of_decoder("none", f'data.options={{fault="{fault}"}}'))
        return found if isinstance(found, Finding) else replace(found, vocabulary=41)

    return make


def of_evaluation(settings: str) -> Callable[[Path], object]:
    evaluate = f'evaluate=[{{name="quiz", {settings}}}]'
    return lambda path: build_data_trial(plan_of_decoder("none", evaluate))


def space_of(free: int) -> Callable[[Path], RunContext]:
    return lambda path: context_of(
        replace(quiet_machine(path), free_bytes=lambda _: free),
        f"run.dir={path}",
        "checkpoint.every=10",
    )


ENVIRONMENT = (
    Fault("torch that cannot use the GPUs", "unused_gpus", lambda p: context_of(gpu_machine(p))),
    Fault(
        "NCCL_P2P_DISABLE",
        "environment_variables",
        lambda p: context_of(replace(gpu_machine(p), environment={"NCCL_P2P_DISABLE": "1"}), device="cuda"),
    ),
    Fault(
        "small /dev/shm",
        "shared_memory",
        (lambda p: context_of(replace(gpu_machine(p), free_bytes=lambda _: 64 << 20), device="cuda")),
    ),
    Fault(
        "container with little memory",
        "memory_and_quota",
        lambda p: context_of(quiet_machine(cgroup(p, "memory.max", str(GIB)))),
    ),
    Fault(
        "container with half a core",
        "memory_and_quota",
        lambda p: context_of(quiet_machine(cgroup(p, "cpu.max", "50000 100000"))),
    ),
)


def cgroup(path: Path, name: str, text: str) -> Path:
    directory = path / "sys/fs/cgroup"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(text)
    return path


SETTINGS = (
    Fault("warmup longer than the run", "settings", of_settings("train.steps=10")),
    Fault("warmup of the whole run", "settings", of_settings("train.steps=20")),
    Fault("restarts without saves", "settings", of_settings("run.restarts=3")),
    Fault("rollback without saves", "settings", of_settings("fault_tolerance.on_spike=rollback")),
    Fault("saves rarer than steps", "settings", of_settings("checkpoint.every=500")),
    Fault("kept without saves", "settings", of_settings("checkpoint.keep_every=20")),
    Fault("kept between saves", "settings", of_settings("checkpoint.every=20", "checkpoint.keep_every=30")),
    Fault("validation rarer than steps", "settings", of_settings("train.validate_every=1000")),
)
STORAGE = (
    Fault("space for one checkpoint of three", "checkpoint_space", space_of(GIB + GIB)),
    Fault("space for none", "checkpoint_space", space_of(1000)),
)
MODELS = (
    Fault("logits × 12", "first_loss", of_model("hot", "model.options.vocabulary=256", batches=())),
    Fault("loss is NaN", "first_loss", of_model("not finite")),
    Fault("tokens shifted by one", "sees_future", of_model("shifted")),
    Fault("attention without mask", "sees_future", of_model("attends to all")),
    Fault("BatchNorm", "row_independence", of_model("batch norm")),
    Fault("rows added up", "row_independence", of_model("mixes rows")),
    Fault("unused module", "gradients", of_model("unused")),
    Fault("detached", "gradients", of_model("detached")),
    Fault("gradient is NaN", "gradients", of_model("gradient not finite")),
    Fault("mean of means", "microbatches", of_model("none", "train.loss=tests.fakes.broken:mean_of_means")),
    Fault("parameter without initialiser", "initial_values", of_model("uninitialised")),
    Fault("all matrices are zero", "initial_values", of_model("zeros")),
    Fault("tensor that is no buffer", "initial_values", of_model("lost table")),
)
DATA = (
    Fault("evaluation by a function that is missing", "evaluations", of_evaluation('call="no_module:quiz"')),
    Fault("token over the vocabulary", "vocabulary_range", of_data("token too large")),
    Fault("labels mostly masked", "labels", of_data("masked")),
    Fault("all labels masked", "labels", of_data("all masked")),
    Fault("labels not shifted", "labels", of_data("labels not shifted")),
    Fault("same rows on all ranks", "duplicates", of_data("same on all ranks")),
    Fault("same rows in all steps", "duplicates", of_data("repeats")),
    Fault("order by what was read", "order", of_data("depends on what was read")),
    Fault("order by number of ranks", "order", of_data("depends on ranks")),
)
FAULTS = (*SETTINGS, *ENVIRONMENT, *STORAGE, *MODELS, *DATA)


def problems(part: object, *, group: str) -> dict[str, Finding]:
    """Name of the check -> warning or failure, of the checks of a group."""
    return {one.check: one for one in iterate_findings(part, group=group) if one.is_problem}
