"""Checks of the NVIDIA GPUs of this machine, by what `nvidia-smi` reports."""

import re
from itertools import combinations

from fullshard.checks.run_context import RunContext
from fullshard.spec.finding import Finding

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


def check_cuda_build(context: RunContext) -> Finding:
    """Compares the CUDA that torch was built for with the driver's, and NCCL with what torch requires."""
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
    for requirement in context.machine.requirements("torch"):
        named = re.match(r"(nvidia-nccl-\w+)==([\d.]+)", requirement)
        found = context.machine.version(named[1]) if named else None
        if named and found is not None and found != named[2]:
            return Finding.warning(
                f"{named[1]} {found}",
                why=f"torch is built and tested with {named[2]}",
                fix=f"pip install {named[1]}=={named[2]}",
            )
    return Finding.ok(f"torch for CUDA {built[1]}, driver for {driver[1] if driver else 'unknown'}")


def check_topology(context: RunContext) -> Finding:
    """Checks how the GPUs of this machine are joined: by NVLink, PCIe, or through the processors."""
    shown = context.machine.run_command(["nvidia-smi", "topo", "-m"])
    if shown is None:
        return Finding.skipped(_NO_GPU)
    rows = [line.split() for line in shown.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if len(row) > 1 and "GPU" not in row[1]]  # without the header
    joined = {f"GPU{i}-GPU{j}": rows[i][1 + j] for i, j in combinations(range(len(rows)), 2)}
    if not joined:
        return Finding.skipped("a single GPU")
    across = [pair for pair, kind in joined.items() if kind in ("SYS", "NODE")]
    linked = [pair for pair, kind in joined.items() if kind.startswith("NV")]
    if across:
        some = ", ".join(across[:4]) + (f" and {len(across) - 4} more pairs" if len(across) > 4 else "")
        mixed = f"; {len(linked)} pairs have NVLink" if linked else ""
        return Finding.warning(
            f"{some} exchange data through the processors{mixed}",
            why="a ring is as fast as its slowest pair",
            fix='sharding.strategy = "hybrid_shard" within the GPUs that NVLink joins, or other GPUs',
        )
    return Finding.ok(f"{len(rows)} GPUs, joined by {', '.join(sorted(set(joined.values())))}")


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
