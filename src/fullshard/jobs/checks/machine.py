"""Checks of this machine, its storage and its NVIDIA GPUs, without torch, and their access to the machine."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.quantities import format_bytes
from fullshard.spec.plan import Plan
from fullshard.spec.records.finding import Finding
from fullshard.spec.run import Run
from fullshard.system.process import count_usable_cores

_COMMAND_SECONDS = 20


def _run_command(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _torch_version_file() -> str:
    found = importlib.util.find_spec("torch")  # does not import it
    places = found.submodule_search_locations if found is not None else None
    with suppress(OSError):
        return Path(next(iter(places or ())), "version.py").read_text(encoding="utf-8")
    return ""


def _can_resolve(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _space_bytes(path: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free


@dataclass(frozen=True)
class MachineAccess:
    """The parts of this machine that checks read. Tests replace them.

    environment: environment variables
    root: directory that holds proc and sys
    run_command: returns the output of a command; None if it is absent or fails
    torch_version_file: returns the text of torch's version.py
    can_resolve: returns whether a host name has an address
    space_bytes: returns the total and free bytes of the file system of a directory
    usable_cores: returns the number of cores that this process may use
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    run_command: Callable[[Sequence[str]], str | None] = _run_command
    torch_version_file: Callable[[], str] = _torch_version_file
    can_resolve: Callable[[str], bool] = _can_resolve
    space_bytes: Callable[[Path], tuple[int, int]] = _space_bytes
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

    def memory_bytes(self, name: str) -> int | None:
        """Returns a figure of /proc/meminfo, such as `MemAvailable`, in bytes; None if it is unknown."""
        for line in (self.read("proc/meminfo") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * 1024
        return None


def nearest_existing_directory(path: Path) -> Path:
    """Returns `path`, or its nearest ancestor that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir())


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
    def has_other_hosts(self) -> bool:
        return self.ranks_on_host < self.plan.world_size

    @property
    def checkpoint_directory(self) -> Path | None:
        """The directory of the checkpoints; None on an object store."""
        own = self.run.checkpoint.dir
        if own is not None and "://" in own:
            return None
        return Path(own) if own is not None else Path(self.run.run.dir, "checkpoints")

    @property
    def checkpoint_bytes(self) -> int | None:
        """Predicted bytes of one checkpoint: parameters and optimizer state; None without a prediction."""
        prediction = self.plan.prediction
        if prediction is None:
            return None
        per_rank, offload = prediction.memory.staged_checkpoint_bytes, prediction.offload
        if offload is not None:
            per_rank += max(offload.host_bytes, offload.disk_bytes)
        return per_rank * self.plan.world_size // self.plan.replicate_degree


_PROCESS_BYTES = 400 << 20  # resident memory of a process that has imported torch
# Docker's default is 64 MiB; NCCL's shared memory transport takes about 10 MB per pair of GPUs.
_LEAST_SHARED_MEMORY = 512 << 20
_TRUE = {"1", "true", "yes", "on"}
_NO_GPU = "no NVIDIA driver on this machine"
_HEALTH = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "power.limit",
    "power.default_limit",
    "clocks_throttle_reasons.hw_slowdown",
)
_HOTTEST_CELSIUS = 85  # datasheets of data centre GPUs slow down from 83 to 90
_LEAST_POWER = 0.9


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
    """Names environment variables that make ranks slow, or that name a network interface which is absent."""
    environment, found = context.machine.environment, list[str]()
    for name, hurts, reason in (*(_ON_GPUS if context.is_on_gpus else ()), *_ON_ANY):
        if (value := environment.get(name)) and hurts(value):
            found.append(f"{name}={value} ({reason})")
    adapters = context.machine.list_names("sys/class/infiniband")
    if context.has_other_hosts and adapters and _is_true(environment.get("NCCL_IB_DISABLE", "")):
        found.append(f"NCCL_IB_DISABLE={environment['NCCL_IB_DISABLE']} ({', '.join(adapters)} are not used)")
    found += _interface_problems(context)
    if not found:
        return Finding.ok("no variable that slows ranks down")
    names = " ".join(one.partition("=")[0] for one in found)
    return Finding.warning(
        "; ".join(found),
        why="they change how ranks communicate or compute",
        fix=f"unset {names}, unless they are meant",
    )


def _interface_problems(context: RunContext) -> list[str]:
    existing = context.machine.list_names("sys/class/net")
    found: list[str] = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = context.machine.environment.get(name, "")
        if not value or not existing or value.startswith("^"):
            continue
        named = [one.lstrip("=") for one in value.split(",")]
        if not any(real.startswith(one) for real in existing for one in named):
            found.append(f"{name}={value} (this machine has {', '.join(existing)})")
        elif context.has_other_hosts and all(one.startswith(("lo", "docker", "veth")) for one in named):
            found.append(f"{name}={value} (other machines cannot be reached through it)")
    return found


def check_shared_memory(context: RunContext) -> Finding:
    """Checks the size of /dev/shm, which NCCL uses between the GPUs of a machine."""
    place = context.machine.root / "dev/shm"
    if not context.is_on_gpus or context.ranks_on_host < 2:
        return Finding.skipped("only several GPUs of a machine use /dev/shm")
    try:
        free = context.machine.space_bytes(place)[1]
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
    """Compares the container's limits, and the free memory, with what the ranks of this machine need."""
    machine, prediction = context.machine, context.plan.prediction
    limit_text = machine.read("sys/fs/cgroup/memory.max") or ""
    limit = int(limit_text) if limit_text.isdecimal() else None
    free = machine.memory_bytes("MemAvailable")
    known = [one for one in (limit, free) if one is not None]
    if prediction is not None and known:
        own = prediction.host_bytes_per_rank
        own += 0 if context.is_on_gpus else prediction.required_device_bytes
        needed = context.ranks_on_host * (own + _PROCESS_BYTES)
        if needed > min(known):
            what = "the container may use" if min(known) == limit else "the machine has free"
            return Finding.warning(
                f"{format_bytes(min(known))} of memory {what}",
                why=f"{context.ranks_on_host} ranks need {format_bytes(needed)}, or the kernel kills one",
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


def check_host_names(context: RunContext) -> Finding:
    """Checks that MASTER_ADDR, where the ranks meet, has an address, and that MASTER_PORT is a port."""
    environment = context.machine.environment
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if host is None:
        return Finding.skipped("ranks of one machine meet on its loopback interface")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        return Finding.failure(
            f"MASTER_PORT={port}", why="it is not a port", fix="a number from 1024 to 65535"
        )
    if not context.machine.can_resolve(host):
        return Finding.failure(
            f"MASTER_ADDR={host} has no address",
            why="this machine cannot find the one where the ranks meet",
            fix="its IP address, or a line in /etc/hosts",
        )
    return Finding.ok(f"ranks meet at {host}")


def check_checkpoint_space(context: RunContext) -> Finding:
    """Compares the free space with the checkpoints that the run keeps, and one more."""
    directory, size = context.checkpoint_directory, context.checkpoint_bytes
    if directory is None:
        return Finding.skipped("checkpoints are on an object store")
    if size is None:
        return Finding.skipped("the size of a checkpoint is not predicted for this run")
    section, steps = context.run.checkpoint, context.run.train.step_count
    saves = (steps // section.every if section.every else 0) + 1
    kept = min(saves, section.keep or saves)
    kept += steps // section.keep_every if section.keep_every else 0
    number = min(kept + 1, saves)  # a new one is complete before the oldest is removed
    free = context.machine.space_bytes(nearest_existing_directory(directory))[1]
    text = f"{format_bytes(free)} free for {number} checkpoint{'s' if number > 1 else ''}"
    got = f"{text} of {format_bytes(size)} in {directory}"
    if free < size:
        return Finding.failure(got, why="not even one fits", fix="free some space, or another checkpoint.dir")
    if free < number * size:
        fix = f"checkpoint.keep = {max(1, int(free // size) - 1)}, or another checkpoint.dir"
        return Finding.warning(got, why=f"{format_bytes(number * size)} are needed at once", fix=fix)
    return Finding.ok(got)


def check_cuda_build(context: RunContext) -> Finding:
    """Compares the CUDA that torch was built for with the driver's."""
    shown = context.machine.run_command(["nvidia-smi"])
    if shown is None:
        return Finding.skipped(_NO_GPU)
    built = re.search(r"cuda[^=\n]*= *'([\d.]+)'", context.machine.torch_version_file())
    driver = re.search(r"CUDA Version: *([\d.]+)", shown)
    if built is None:
        return Finding.warning(
            "torch is built without CUDA, and this machine has NVIDIA GPUs",
            why='run.device = "auto" trains on the CPU',
            fix="the CUDA build of torch: https://pytorch.org/get-started/locally/",
        )
    if driver is not None and int(built[1].split(".")[0]) > int(driver[1].split(".")[0]):
        return Finding.failure(
            f"torch is built for CUDA {built[1]}, and the driver supports CUDA {driver[1]}",
            why="a driver runs programs of its own major release of CUDA and of earlier ones",
            fix=f"a newer driver, or torch built for CUDA {driver[1]}",
        )
    return Finding.ok(f"torch for CUDA {built[1]}, driver for {driver[1] if driver else 'unknown'}")


def check_gpu_health(context: RunContext) -> Finding:
    """Checks uncorrectable memory errors, throttling, temperature and power limit of every GPU."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_HEALTH)}", "--format=csv,noheader,nounits"]
    shown = context.machine.run_command(query)
    if shown is None:
        return Finding.skipped(_NO_GPU)
    failed, slow, count = list[str](), list[str](), 0
    for line in shown.strip().splitlines():
        index, errors, celsius, limit, usual, slowdown = (part.strip() for part in line.split(","))
        count += 1
        if errors.isdecimal() and int(errors):
            failed.append(f"GPU {index} has {errors} uncorrectable memory errors")
        if celsius.isdecimal() and int(celsius) >= _HOTTEST_CELSIUS:
            slow.append(f"GPU {index} is at {celsius} °C")
        if slowdown.lower() == "active":
            slow.append(f"GPU {index} slows itself down")
        if _number(limit) < _LEAST_POWER * _number(usual):
            slow.append(f"GPU {index} is limited to {limit} of {usual} W")
    if failed:
        return Finding.failure(
            "; ".join(failed + slow),
            why="its memory returns wrong values, or kills the process that reads them",
            fix="another GPU, or a reset of this one by the administrator (nvidia-smi -r)",
        )
    if slow:
        return Finding.warning(
            "; ".join(slow),
            why="in a synchronous step, all ranks wait for the slowest",
            fix="cooling, or sudo nvidia-smi -pl with the default limit",
        )
    return Finding.ok(f"{count} GPUs without errors, cool, at full power")


def check_other_processes_on_gpus(context: RunContext) -> Finding:
    """Names processes that use the GPUs of this machine."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    shown = context.machine.run_command(query)
    if shown is None:
        return Finding.skipped(_NO_GPU)
    others = [line.strip() for line in shown.splitlines() if line.strip()]
    if others:
        return Finding.warning(
            f"other processes: {'; '.join(others[:3])}{' …' if len(others) > 3 else ''}",
            why="they take memory that the plan counts on, and time of the GPU",
            fix="wait for them or stop them, or other GPUs in CUDA_VISIBLE_DEVICES",
        )
    return Finding.ok("no other process on the GPUs")


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0
