"""The report of this machine's environment that `fullshard version --all` prints, for issues."""

import os
import platform
import re
from pathlib import Path

from fullshard.checks.machine_access import MachineAccess
from fullshard.profiler.detect import cpu_name_with_core_count
from fullshard.quantities import format_bytes

_PACKAGES = (
    "numpy",
    "pydantic",
    "safetensors",
    "transformers",
    "tokenizers",
    "peft",
    "datasets",
    "pyarrow",
    "torchao",
    "triton",
    "fsspec",
    "s3fs",
)
_PREFIXES = (
    "NCCL_",
    "TORCH",
    "GLOO_",
    "CUDA_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "FULLSHARD_",
    "HF_",
)
_SCHEDULER_PREFIXES = (
    "TRITON_",
    "SLURM_JOB",
    "SLURM_STEP",
    "MASTER_",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "XDG_CACHE",
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_LOGIN_IN_URL = re.compile(r"://[^/@\s]+@")
_GPU_QUERY = "--query-gpu=index,name,memory.total,driver_version,pstate"


def environment_report(machine: MachineAccess) -> dict[str, str]:
    """Returns (label -> text) of Python, torch, GPUs, drivers, packages, cores, memory, drive and variables.

    Values of variables whose names suggest a secret, and logins in URLs, are left out.
    """
    report = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {_distribution(machine)}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": _torch_build(machine),
        "nccl": _nccl_versions(machine),
        "packages": ", ".join(
            f"{name} {version}" for name in _PACKAGES if (version := machine.version(name)) is not None
        ),
        "gpus": _gpus(machine),
        "cpu": cpu_name_with_core_count(),
        "memory": _memory(machine),
        "drive": _drive(machine),
    }
    for name in sorted(machine.environment):
        if name.startswith((*_PREFIXES, *_SCHEDULER_PREFIXES)):
            report[f"${name}"] = _shown_value(name, machine.environment[name])
    return report


def _distribution(machine: MachineAccess) -> str:
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.read("etc/os-release") or "", re.MULTILINE)
    inside = " in a container" if (machine.root / ".dockerenv").exists() else ""
    return f"{named[1] if named else 'unknown distribution'}{inside}"


def _torch_build(machine: MachineAccess) -> str:
    text = machine.torch_version_file()
    found = [f"{machine.version('torch') or 'not installed'}"]
    for kind in ("cuda", "hip", "xpu"):
        built = re.search(rf"^{kind}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
        found += [f"{kind} {built[1]}"] if built else []
    commit = re.search(r"git_version[^=\n]*= *'([0-9a-f]{7})", text)
    return ", ".join([*found, *([f"commit {commit[1]}"] if commit else [])])


def _nccl_versions(machine: MachineAccess) -> str:
    names = {re.split(r"[=<>; ]", one)[0] for one in machine.requirements("torch") if "nccl" in one}
    found = [f"{name} {version}" for name in sorted(names) if (version := machine.version(name)) is not None]
    return ", ".join(found) or "none"


def _gpus(machine: MachineAccess) -> str:
    shown = machine.run_command(["nvidia-smi", _GPU_QUERY, "--format=csv,noheader"])
    return "; ".join(line.strip() for line in shown.splitlines()) if shown else "none that nvidia-smi reports"


def _memory(machine: MachineAccess) -> str:
    total, free = (machine.memory_bytes(name) for name in ("MemTotal", "MemAvailable"))
    limit = machine.read("sys/fs/cgroup/memory.max") or ""
    parts = [f"{format_bytes(total)}"] if total is not None else ["unknown"]
    parts += [f"{format_bytes(free)} available"] if free is not None else []
    return ", ".join(parts + ([f"container limit {format_bytes(int(limit))}"] if limit.isdecimal() else []))


def _drive(machine: MachineAccess) -> str:
    place = Path.cwd()
    total, free = machine.space_bytes(place)
    kind = machine.file_system_kind(place) or "unknown file system"
    return f"{kind}, {format_bytes(free)} of {format_bytes(total)} free in the working directory"


def _shown_value(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(set)"
    home = os.path.expanduser("~")
    shown = _LOGIN_IN_URL.sub("://…@", value)
    return shown.replace(home, "~") if len(home) > 1 else shown
