"""Checks of this machine, its storage and its NVIDIA GPUs, without torch."""

import re
from collections.abc import Callable

from fullshard.checks.run_context import RunContext, nearest_existing_directory
from fullshard.quantities import format_bytes
from fullshard.spec.finding import Finding

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
