"""The checks that need neither torch nor the model: of settings, this machine and its storage."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.errors import SpecError
from fullshard.quantities import count_text, format_bytes
from fullshard.spec.plan import Plan
from fullshard.spec.pretrained import locate_config_file
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from fullshard.spec.settings.model_section import HuggingFaceModel
from fullshard.system.files import free_disk_bytes
from fullshard.system.process import count_usable_cores
from fullshard.training.schedule import warmup_warning


@dataclass(frozen=True)
class MachineAccess:
    """The parts of this machine that checks read. Tests replace them.

    environment: environment variables
    root: directory that holds proc and sys
    free_bytes: returns the free bytes of the file system of a directory, which need not exist yet
    usable_cores: returns the number of cores that this process may use
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    free_bytes: Callable[[Path], int] = free_disk_bytes
    usable_cores: Callable[[], int] = count_usable_cores

    def read(self, path: str) -> str | None:
        """Returns the text of a file below `root`, stripped; None if it cannot be read."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.root / path).read_text(encoding="utf-8").strip()
        return None

    def list_names(self, path: str) -> list[str]:
        """Returns the sorted names in a directory below `root`; [] if it cannot be read."""
        with suppress(OSError):
            return sorted(one.name for one in (self.root / path).iterdir())
        return []


@dataclass(frozen=True)
class RunContext:
    """Parts that the checks without torch and without the model read.

    plan: the plan of the run, with its prediction if the planner made one
    machine: access to this machine
    """

    plan: Plan
    machine: MachineAccess = MachineAccess()

    @property
    def run(self) -> Run:
        return self.plan.run

    @property
    def is_on_gpus(self) -> bool:
        return self.plan.device == "cuda"

    @property
    def ranks_on_host(self) -> int:
        """Number of ranks on this machine: torchrun's number if it started this process, else all."""
        given = self.machine.environment.get("LOCAL_WORLD_SIZE", "")
        return int(given) if given.isdecimal() and int(given) else self.plan.world_size

    @property
    def checkpoint_bytes(self) -> int | None:
        """Predicted bytes of one checkpoint, as this run saves it; None without a prediction."""
        prediction = self.plan.prediction
        if prediction is None:
            return None
        per_rank, offload = prediction.memory.checkpoint_bytes(self.run.adapter), prediction.offload
        if offload is not None:
            per_rank += max(offload.host_bytes, offload.disk_bytes)
        return per_rank * self.plan.world_size // self.plan.replicate_degree


_HIGH_RATE_FOR_WEIGHTS = 1e-3
_PROCESS_BYTES = 400 << 20  # resident memory of a process that has imported torch
# Docker's default is 64 MiB; NCCL's shared memory transport takes about 10 MB per pair of GPUs.
_LEAST_SHARED_MEMORY = 512 << 20
_TRUE = {"1", "true", "yes", "on"}


def _is_true(value: str) -> bool:
    return value.lower() in _TRUE


# (variable, predicate on its value, reason) of variables that matter on GPUs alone, and on any device.
_ON_GPUS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("NCCL_P2P_DISABLE", _is_true, "GPUs of a machine exchange data through host memory"),
    ("NCCL_SHM_DISABLE", _is_true, "GPUs without NVLink exchange data through the network"),
    ("NCCL_ALGO", bool, "NCCL no longer chooses the fastest algorithm for each size"),
    ("NCCL_PROTO", bool, "NCCL no longer chooses the fastest protocol for each size"),
    ("NCCL_DEBUG", lambda value: value.upper() in ("INFO", "TRACE"), "every collective is logged"),
    ("NCCL_BLOCKING_WAIT", _is_true, "the host waits for every collective"),
    ("TORCH_NCCL_BLOCKING_WAIT", _is_true, "the host waits for every collective"),
    ("CUDA_LAUNCH_BLOCKING", _is_true, "the host waits for every kernel"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", _is_true, "every tensor is allocated by the driver"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", lambda value: value == "1", "collectives queue behind kernels"),
)
_ON_ANY: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("TORCH_DISTRIBUTED_DEBUG", lambda value: value.upper() == "DETAIL", "every collective is checked first"),
    ("TORCH_SHOW_CPP_STACKTRACES", _is_true, "every error takes seconds to be shown"),
)


def check_environment_variables(context: RunContext) -> Finding:
    """Names environment variables that make ranks slow."""
    environment, found = context.machine.environment, list[str]()
    for name, hurts, reason in (*(_ON_GPUS if context.is_on_gpus else ()), *_ON_ANY):
        if (value := environment.get(name)) and hurts(value):
            found.append(f"{name}={value} ({reason})")
    adapters = context.machine.list_names("sys/class/infiniband")
    has_other_hosts = context.ranks_on_host < context.plan.world_size
    if has_other_hosts and adapters and _is_true(environment.get("NCCL_IB_DISABLE", "")):
        found.append(f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']} ({', '.join(adapters)} are not used)")
    if not found:
        return Finding.ok("no variable that slows ranks down")
    names = " ".join(one.partition("=")[0] for one in found)
    return Finding.warning(
        "; ".join(found),
        why="they change how ranks communicate or compute",
        fix=f"unset {names}, unless they are meant",
    )


def check_shared_memory(context: RunContext) -> Finding:
    """Checks the size of /dev/shm, which NCCL uses between the GPUs of a machine."""
    place = context.machine.root / "dev/shm"
    if not context.is_on_gpus or context.ranks_on_host < 2:
        return Finding.skipped("only several GPUs of a machine use /dev/shm")
    try:
        free = context.machine.free_bytes(place)
    except OSError:
        return Finding.skipped("there is no /dev/shm")
    if free < _LEAST_SHARED_MEMORY:
        return Finding.warning(
            f"{format_bytes(free)} free in /dev/shm",
            why="NCCL keeps buffers there for each pair of GPUs, and fails or is slow without them",
            fix="docker run --shm-size=1g, or --ipc=host",
        )
    return Finding.ok(f"{format_bytes(free)} free in /dev/shm")


def check_memory_and_quota(context: RunContext) -> Finding:
    """Compares memory (free, and the container's) with what the ranks need, and its CPU quota with cores."""
    machine, prediction = context.machine, context.plan.prediction
    limit_text = machine.read("sys/fs/cgroup/memory.max") or ""
    limit = int(limit_text) if limit_text.isdecimal() else None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", machine.read("proc/meminfo") or "", re.MULTILINE)
    free = None if found is None else int(found[1]) * 1024
    known = [one for one in (limit, free) if one is not None]
    if prediction is not None and known:
        own = prediction.host_bytes_per_rank
        own += 0 if context.is_on_gpus else prediction.required_device_bytes
        needed = context.ranks_on_host * (own + _PROCESS_BYTES)
        if needed > min(known):
            what = "the container may use" if min(known) == limit else "the machine has free"
            ranks = count_text(context.ranks_on_host, "rank")
            return Finding.warning(
                f"{format_bytes(min(known))} of memory {what}",
                why=f"{ranks} may use {format_bytes(needed)}, and then the kernel kills one",
                fix="fewer ranks or a smaller train.microbatch, or more memory for the container",
            )
    quota, _, period = (machine.read("sys/fs/cgroup/cpu.max") or "").partition(" ")
    cores = machine.usable_cores()
    if quota.isdecimal() and period.isdecimal() and int(quota) / int(period) < 0.9 * cores:
        share = int(quota) / int(period)
        return Finding.warning(
            f"the container may use {share:g} cores' time, and sees {cores} cores",
            why="threads are started for every visible core, and the kernel pauses all of them in turn",
            fix=f"OMP_NUM_THREADS={max(1, int(share / context.ranks_on_host))}, or --cpuset-cpus, not --cpus",
        )
    return Finding.ok(f"{format_bytes(min(known))} of memory" if known else "no limit known")


def check_checkpoint_space(context: RunContext) -> Finding:
    """Compares the free space with the checkpoints that the run keeps, and one more."""
    own, size = context.run.checkpoint.dir, context.checkpoint_bytes
    if own is not None and "://" in own:
        return Finding.skipped("checkpoints are on an object store")
    directory = Path(own) if own is not None else Path(context.run.run.dir, "checkpoints")
    if size is None:
        return Finding.skipped("the size of a checkpoint is not predicted for this run")
    section, steps = context.run.checkpoint, context.run.train.step_count
    best = int(section.keep_best is not None)
    saves = (steps // int(section.every) if section.every else 0) + 1 + best
    kept = min(saves, section.keep or saves)
    kept += steps // section.keep_every if section.keep_every else 0
    number = min(kept + best + 1, saves)  # a new one is complete before the oldest is removed
    free = context.machine.free_bytes(directory)
    text = f"{format_bytes(free)} free for {count_text(number, 'checkpoint')}"
    got = f"{text} of {format_bytes(size)} in {directory}"
    if free < size:
        return Finding.failure(got, why="not even one fits", fix="free some space, or another checkpoint.dir")
    if free < number * size:
        fix = f"checkpoint.keep = {max(1, int(free // size) - 1)}, or another checkpoint.dir"
        return Finding.warning(got, why=f"{format_bytes(number * size)} are needed at once", fix=fix)
    return Finding.ok(got)


def check_unused_gpus(context: RunContext) -> Finding:
    """Checks that a run on the CPU is not on a machine with NVIDIA GPUs, unless the CPU is asked for."""
    gpus = context.machine.list_names("proc/driver/nvidia/gpus")
    hidden = context.machine.environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if gpus and not context.is_on_gpus and context.run.run.device == "auto" and not hidden:
        return Finding.warning(
            f"the run is on the CPU, and the machine has {len(gpus)} NVIDIA GPUs",
            why="torch cannot use them: it is built without CUDA or for a newer driver, or the container "
            "does not have them",
            fix='a build of torch for this driver, or docker run --gpus all; or run.device = "cpu"',
        )
    return Finding.ok("the run is on GPUs" if context.is_on_gpus else "no GPU is left out")


def check_settings(context: RunContext) -> Finding:
    """Checks learning rate, saves, restarts and validation against the number of steps."""
    found = list(_iterate_setting_problems(context.run))
    if found:
        return Finding.warning(
            "; ".join(one.problem for one in found),
            why="each setting is valid, and together they rarely are what is intended",
            fix="; ".join(dict.fromkeys(f"{one.key} = {one.value}" for one in found)),
        )
    steps = count_text(context.run.train.step_count, "step")
    return Finding.ok(f"{steps}, warmup of {context.run.schedule.warmup_steps}")


class _SettingProblem(NamedTuple):
    """A problem of settings, and the key of run.toml to change, with a value that has no problem."""

    problem: str
    key: str
    value: float


def _iterate_setting_problems(run: Run) -> Iterator[_SettingProblem]:
    steps, schedule, tenth = run.train.step_count, run.schedule, max(1, run.train.step_count // 10)
    if (warmup := warmup_warning(run)) is not None:
        yield _SettingProblem(warmup, "schedule.warmup_steps", tenth)
    elif schedule.kind != "constant" and schedule.warmup_steps == steps > 1:
        problem = "schedule.warmup_steps is train.steps: the rate never decays"
        yield _SettingProblem(problem, "schedule.warmup_steps", tenth)
    yield from _iterate_save_problems(run)
    every = run.train.validate_every
    if every not in (0, type(run.train)().validate_every) and every > steps:
        problem = f"train.validate_every = {every} is more than train.steps = {steps}"
        yield _SettingProblem(problem, "train.validate_every", tenth)
    rate = run.optimizer.learning_rate
    if _has_weights(run) and rate > _HIGH_RATE_FOR_WEIGHTS and not run.adapter.rank:
        problem = f"optimizer.learning_rate = {rate:g} for weights that are trained already"
        yield _SettingProblem(problem, "optimizer.learning_rate", 2e-5)


def _iterate_save_problems(run: Run) -> Iterator[_SettingProblem]:
    steps, key, tenth = run.train.step_count, "checkpoint.every", max(1, run.train.step_count // 10)
    every, kept = int(run.checkpoint.every), run.checkpoint.keep_every
    needing_saves = {
        "run.restarts without checkpoint.every: a restart begins at step 1": run.run.restarts,
        'fault_tolerance.on_spike = "rollback" without checkpoints to return to': (
            run.fault_tolerance.on_spike == "rollback"
        ),
        f"checkpoint.keep_every = {kept} without checkpoint.every": kept,
    }
    if not every:
        for problem in (text for text, needs_saves in needing_saves.items() if needs_saves):
            yield _SettingProblem(problem, key, kept or tenth)
    elif kept % every:
        problem = f"checkpoint.keep_every = {kept} is no multiple of checkpoint.every = {every}"
        yield _SettingProblem(problem, "checkpoint.keep_every", max(1, kept // every) * every)
    if every > steps:
        problem = f"checkpoint.every = {every} is more than train.steps = {steps}"
        yield _SettingProblem(problem, key, tenth)


def _has_weights(run: Run) -> bool:
    if not isinstance(run.model, HuggingFaceModel) or run.model.weights == "none":
        return False
    try:
        directory = locate_config_file(run.model.hf).parent
    except SpecError:
        return False
    return any(directory.glob("*.safetensors"))


# Name of a group -> its checks, each with a public report of a fault that it finds (on GitHub).
CHECKS_WITHOUT_TORCH: Mapping[str, Sequence[Callable[[RunContext], Finding]]] = {
    "settings": (check_settings,),  # PrimeIntellect-ai/prime-rl#968
    "machine": (
        check_unused_gpus,  # pytorch/pytorch#4546
        check_environment_variables,  # NVIDIA/nccl#631
        check_shared_memory,  # pytorch/torchtitan#853
        check_memory_and_quota,  # deepspeedai/DeepSpeed#4239
    ),
    "storage": (check_checkpoint_space,),  # mlfoundations/open_lm#154
}


def name_finding(finding: Finding, check: Callable[[Any], Finding], *, group: str) -> Finding:
    """Returns `finding` with the names of the group and, unless it has a name, of the check."""
    name = finding.check or check.__name__.removeprefix("check_")
    return finding.model_copy(update={"check": name, "group": group})


def quick_problems(context: RunContext) -> list[Finding]:
    """Returns warnings and failures of the checks without torch, which precede every `fullshard train`."""
    found = [
        name_finding(one(context), one, group=group)
        for group, checks in CHECKS_WITHOUT_TORCH.items()
        for one in checks
    ]
    return [one for one in found if one.is_problem]
