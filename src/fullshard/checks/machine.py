"""Checks of this machine that need neither torch nor a GPU."""

import re
import time
from collections.abc import Callable

from fullshard.checks.run_context import RunContext
from fullshard.quantities import format_bytes
from fullshard.spec.finding import Finding
from fullshard.system.load import other_programs_fraction

_FILES_PER_PROCESS, _FILES_PER_RANK = 256, 16
_PROCESS_BYTES = 400 << 20  # resident memory of a process that has imported torch
# Docker's default is 64 MiB; NCCL's shared memory transport takes about 10 MB per pair of GPUs.
_LEAST_SHARED_MEMORY = 512 << 20
_SAMPLE_SECONDS = 0.2
_BUSY_CPU, _BUSY_GPU = 0.25, 0.9
_TRUE = {"1", "true", "yes", "on"}


def check_torch_version(context: RunContext) -> Finding:
    """Compares the installed torch with the releases that fullshard is tested with."""
    found = context.machine.version("torch")
    wanted = next((r for r in context.machine.requirements("fullshard") if re.match(r"torch\b", r)), "")
    if found is None or not wanted:
        return Finding.skipped("the versions of torch that fullshard supports are not known here")
    least, below = (re.search(rf"{sign}(\d+\.\d+)", wanted) for sign in (">=", "<"))
    too_old = least is not None and _version_key(found) < _version_key(least[1])
    too_new = below is not None and _version_key(found) >= _version_key(below[1])
    if not too_old and not too_new:
        return Finding.ok(f"torch {found}")
    return Finding.warning(
        f"torch {found}",
        why=f"fullshard is tested with {wanted.removeprefix('torch')}: FSDP2 may differ in others",
        fix=f'pip install "{wanted}"',
    )


def _version_key(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


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
# Each rank would place its threads on the same first cores.
_PINNING = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def check_environment_variables(context: RunContext) -> Finding:
    """Names environment variables that make ranks slow, or that name a network interface which is absent."""
    environment, found = context.machine.environment, list[str]()
    for name, hurts, reason in (*(_ON_GPUS if context.is_on_gpus else ()), *_ON_ANY):
        if (value := environment.get(name)) and hurts(value):
            found.append(f"{name}={value} ({reason})")
    if context.ranks_on_host > 1 and not context.is_on_gpus:
        for name in _PINNING:
            value = environment.get(name, "")
            if value and value.lower() not in ("false", "disabled", "none"):
                found.append(f"{name}={value} (all ranks are pinned to the same cores)")
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


def check_open_files(context: RunContext) -> Finding:
    """Compares the limits of open files and locked memory with what the ranks of this machine need."""
    files, locked = (context.machine.soft_limit(name) for name in ("RLIMIT_NOFILE", "RLIMIT_MEMLOCK"))
    needed = _FILES_PER_PROCESS + _FILES_PER_RANK * context.plan.world_size
    if files is not None and files < needed:
        return Finding.warning(
            f"{files} open files are allowed per process",
            why=f"a rank among {context.plan.world_size} may need {needed}: connections, data, checkpoints",
            fix=f"ulimit -n {max(needed, 65536)}",
        )
    adapters = context.machine.list_names("sys/class/infiniband")
    if context.has_other_hosts and adapters and locked is not None and locked < 1 << 30:
        return Finding.warning(
            f"{format_bytes(locked)} of memory may be locked",
            why="InfiniBand registers its buffers, which must stay in memory",
            fix="ulimit -l unlimited (in a container: --ulimit memlock=-1)",
        )
    return Finding.ok(f"{'unlimited' if files is None else f'{files:,}'} open files")


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


def check_pinned_cores(context: RunContext) -> Finding:
    """Compares the cores that this process may use with the ranks of this machine."""
    cores, ranks = context.machine.usable_cores(), context.ranks_on_host
    online = (context.machine.read("sys/devices/system/cpu/online") or "").rpartition("-")[2]
    of = f" of {int(online) + 1}" if online.isdecimal() and int(online) + 1 > cores else ""
    if cores < ranks:
        return Finding.warning(
            f"{ranks} ranks may use {cores} core{'s' if cores > 1 else ''}{of}",
            why="ranks that share a core wait for each other in every collective",
            fix=f"run.ranks = {cores}, or more cores (taskset -cp $$ shows those of the shell)",
        )
    return Finding.ok(f"{cores} cores{of} for {ranks} ranks")


def check_threads(context: RunContext) -> Finding:
    """Compares OMP_NUM_THREADS times the ranks of this machine with its cores."""
    given = context.machine.environment.get("OMP_NUM_THREADS", "")
    if not given.isdecimal():
        return Finding.ok("threads are chosen by the number of cores")
    cores, ranks = context.machine.usable_cores(), context.ranks_on_host
    if int(given) > 1 and int(given) * ranks > cores:
        return Finding.warning(
            f"OMP_NUM_THREADS={given} in {ranks} ranks: {int(given) * ranks} threads on {cores} cores",
            why="threads that wait for a core hold up all others of their operation",
            fix=f"OMP_NUM_THREADS={max(1, cores // ranks)}, or unset it",
        )
    return Finding.ok(f"{given} thread{'s' if given != '1' else ''} in {ranks} ranks on {cores} cores")


def check_huge_pages(context: RunContext) -> Finding:
    """Checks transparent huge pages, where state in host memory is updated in every step."""
    text = context.machine.read("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    if not context.run.offload.offloads_optimizer:
        return Finding.skipped("only offloaded state is large enough for huge pages to matter")
    if chosen is None:
        return Finding.skipped("this kernel does not report transparent huge pages")
    if chosen[1] == "never":
        return Finding.warning(
            "transparent huge pages are off",
            why="each GiB of offloaded state takes 262,144 pages, and the first step a fault for each",
            fix="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Finding.ok(f"transparent huge pages: {chosen[1]}")


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


def check_idle_machine(context: RunContext) -> Finding:
    """Measures for 0.2 s how much of the processors other programs use."""
    before = context.machine.processor_seconds()
    time.sleep(_SAMPLE_SECONDS)
    others = other_programs_fraction([context.machine.processor_seconds().since(before)])
    if others > (_BUSY_GPU if context.is_on_gpus else _BUSY_CPU):
        return Finding.warning(
            f"other programs use {others:.0%} of the processors",
            why="ranks that wait for a core hold up all others, and figures of speed are too low",
            fix="wait for them or stop them; top shows which they are",
        )
    return Finding.ok(f"other programs use {others:.0%} of the processors")
