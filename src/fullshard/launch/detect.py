"""Detects this machine's hardware, from the user's hardware.toml or the names that the system reports."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from fullshard.errors import SpecError
from fullshard.quantities import count_text
from fullshard.spec.machine import catalog
from fullshard.spec.machine.hardware import AttentionKernel, Chip, CollectiveRate, Hardware, Link
from fullshard.system.process import count_cores_of_rank, count_usable_cores

HARDWARE_VARIABLE = "FULLSHARD_HARDWARE"
CALIBRATION_VARIABLE = "FULLSHARD_CALIBRATION"
# Runs in its own process: a CUDA context in the process that starts the ranks would take memory on one of
# their GPUs, and prevent that process from forking. NVML does not cover AMD's GPUs and hidden GPUs.
_ASK = """
import json, torch
n = torch.cuda.device_count()
p = torch.cuda.get_device_properties(0) if n else None
cudnn = torch.backends.cudnn.version() if n and torch.version.cuda else None
print(json.dumps([n, p.name, p.total_memory, p.major, cudnn] if p else [0, "", 0, 0, None]))
"""
# Files that drivers create on Linux: NVIDIA's (also before its device files exist, and on Jetson), AMD's and
# WSL's. Without any of them, there is no GPU.
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/nvmap", "/dev/kfd", "/dev/dxg")


class DetectedGpus(NamedTuple):
    """The number of GPUs that torch can use, with properties of the first.

    major: major number of its compute capability
    cudnn: version of cuDNN as torch counts it (91900 for 9.19); None without it, and on AMD's GPUs
    """

    number: int
    name: str
    memory_bytes: int
    major: int
    cudnn: int | None

    def attention_kernel(self, environment: Mapping[str, str]) -> AttentionKernel:
        """Returns the kernel that torch's attention prefers: its `check_prefer_cudnn_attention` (2.11)."""
        wanted = environment.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        if not wanted or self.major not in (9, 10) or (self.cudnn or 0) <= 91500:
            return "flash"
        return "cudnn_256" if self.major == 9 else "cudnn"


_NO_GPUS = DetectedGpus(0, "", 0, 0, None)


def detect_hardware(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Hardware:
    """Returns the hardware of a run on this machine, or on machines like it.

    A hardware.toml ($FULLSHARD_HARDWARE, or the file that `fullshard calibrate` wrote) is used if it is for
    this chip, and on the CPU for this number of ranks per node. Otherwise GPUs are looked up in the catalog,
    and CPUs get what a run measured before (`kept_measurement_path`), or else the figures of a measured core.

    ranks: number of all ranks; None: torchrun's number if it started this process, else one per GPU; on the
        CPU the number that the file is for, else one
    ranks_per_node: None: torchrun's number if it started this process, else all ranks

    Raises SpecError for an invalid file, and for a GPU that is neither in the file nor in the catalog.

    >>> hardware = fs.detect_hardware("cpu")
    >>> hardware.world_size
    1
    """
    if ranks is None and {"RANK", "WORLD_SIZE"} <= environment.keys():
        ranks = int(environment["WORLD_SIZE"])
        ranks_per_node = ranks_per_node or int(environment.get("LOCAL_WORLD_SIZE", str(ranks)))
    path = user_hardware_path(environment)
    saved = Hardware.load(path) if path.exists() or environment.get(HARDWARE_VARIABLE) else None
    gpus = detect_gpus(device)
    by_file = saved.ranks_per_node if saved is not None and saved.device == "cpu" else 1
    count = ranks or gpus.number or by_file
    each = ranks_per_node or count
    kept = None if gpus.number else _load_kept_measurement(each, environment)
    for known in (saved, kept):
        if known is not None and _is_same_chip(known, gpus) and (gpus.number or known.ranks_per_node == each):
            return known.with_rank_counts(nodes=max(1, count // each), ranks_per_node=each)
    found = catalog_hardware_of_machine(gpus, ranks=count, ranks_per_node=each, environment=environment)
    if gpus.number and catalog.find_catalog_entry_of_chip(found.chip) is None:
        raise SpecError(
            "this GPU is not in the catalog.",
            got=gpus.name,
            why="its rates are not known",
            fix="fullshard calibrate, which measures it; or a hardware.toml in $FULLSHARD_HARDWARE",
        )
    if saved is None:
        return found
    other = f"; {path} is of {count_text(saved.ranks_per_node, 'rank')} on {saved.chip.name}"
    return found.model_copy(update={"source": found.source + other})


def catalog_hardware_of_machine(
    gpus: DetectedGpus, *, ranks: int, ranks_per_node: int, environment: Mapping[str, str] = os.environ
) -> Hardware:
    """Returns this machine's hardware from the catalog; a GPU that it lacks gets placeholder rates."""
    nodes = max(1, ranks // ranks_per_node)
    if not gpus.number:
        share = _cpu_hardware_per_rank(ranks_per_node)
        cpu = share.with_rank_counts(nodes=nodes, ranks_per_node=ranks_per_node)
        return cpu if nodes > 1 else cpu.model_copy(update={"across": None})
    chip = catalog.find_chip_by_device_name(gpus.name, memory_bytes=gpus.memory_bytes)
    entry = catalog.find_catalog_entry_of_chip(chip) if chip is not None else None
    host_memory_bytes = _host_memory_bytes() // ranks_per_node
    kernel = gpus.attention_kernel(environment)
    if entry is not None:
        one = catalog.catalog_chip_hardware(entry, attention_kernel=kernel)
        known = one.with_rank_counts(nodes=nodes, ranks_per_node=ranks_per_node)
        return known.model_copy(update={"host_memory_bytes": host_memory_bytes})
    return Hardware(
        name=gpus.name,
        device="cuda",
        chip=Chip(
            name=gpus.name,
            device_names=(),
            memory_bytes=gpus.memory_bytes,
            memory_bytes_per_second=1.0,
            flops_per_second={},
            source="not in the catalog",
        ),
        attention_kernel=kernel,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        rates=catalog.default_cpu_rates(1),
        within=catalog.link_from_catalog("pcie4"),
        across=catalog.link_from_catalog("nic-100"),
        source="not in the catalog",
        host_memory_bytes=host_memory_bytes,
    )


def user_hardware_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the user's hardware.toml: $FULLSHARD_HARDWARE, or in the user's configuration directory."""
    if environment.get(HARDWARE_VARIABLE):
        return Path(environment[HARDWARE_VARIABLE])
    configuration = environment.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(configuration), "fullshard", "hardware.toml")


def kept_measurement_path(ranks_per_node: int, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the path of this machine's rates for this many CPU ranks, which the first run measures.

    It is in `fullshard/hardware` of $XDG_CACHE_HOME or ~/.cache. None if FULLSHARD_CALIBRATION=off.
    """
    if environment.get(CALIBRATION_VARIABLE) == "off":
        return None
    root = os.path.expanduser(environment.get("XDG_CACHE_HOME") or "~/.cache")
    machine = hashlib.sha256(f"{platform.node()} {cpu_name_with_core_count()}".encode()).hexdigest()[:16]
    path = Path(root, "fullshard", "hardware", f"{machine}-{ranks_per_node}.toml")
    return path if path.is_absolute() else None


def _load_kept_measurement(ranks_per_node: int, environment: Mapping[str, str]) -> Hardware | None:
    """Returns what `kept_measurement_path` holds; None if it is missing, or no longer valid."""
    path = kept_measurement_path(ranks_per_node, environment)
    if path is None or not path.exists():
        return None
    with suppress(SpecError):
        return Hardware.load(path)
    return None


def cpu_name_with_core_count() -> str:
    """Returns the CPU's model and the number of cores that this process may use: `AMD EPYC, 2 cores`."""
    cores = count_usable_cores()
    return f"{_read_cpu_model_name()}, {cores} core{'s' if cores > 1 else ''}"


def _is_same_chip(saved: Hardware, gpus: DetectedGpus) -> bool:
    if not gpus.number:
        return saved.device == "cpu" and saved.chip.name == cpu_name_with_core_count()
    chip = catalog.find_chip_by_device_name(gpus.name, memory_bytes=gpus.memory_bytes)
    return saved.device == "cuda" and saved.chip.name == (chip.name if chip is not None else gpus.name)


def may_have_gpus() -> bool:
    """Returns False if this is a Linux machine without GPU driver. Does not import torch."""
    return sys.platform != "linux" or any(Path(path).exists() for path in _DRIVER_FILES)


def detect_gpus(device: Literal["auto", "cpu", "cuda"] = "auto") -> DetectedGpus:
    """Returns the GPUs that torch can use; none for the device "cpu". Raises SpecError if torch fails."""
    if device == "cpu" or not may_have_gpus():
        return _NO_GPUS
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
        number, memory = torch.cuda.device_count(), properties.total_memory
        return DetectedGpus(number, properties.name, memory, properties.major, cudnn)
    if torch is not None and not torch.cuda.device_count():  # asks the driver, without creating a context
        return _NO_GPUS
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpecError("torch could not list the GPUs.", got=str(error)) from error
    if done.returncode:
        raise SpecError("torch could not list the GPUs.", got=done.stderr.strip().splitlines()[-1:])
    return DetectedGpus(*json.loads(done.stdout))


def _cpu_hardware_per_rank(ranks_per_node: int) -> Hardware:
    """Returns one rank's share of this CPU and memory, with the rates of the core in `rates.toml`."""
    table = catalog.read_machine_tables("rates")["cpu"]
    cores = count_cores_of_rank(ranks_per_node)
    bandwidth = table["collective_bytes_per_second"]
    rate = CollectiveRate(
        base_seconds=0.0, hop_seconds=table["collective_seconds"], bytes_per_second=bandwidth
    )
    link = Link(
        name="this machine's memory",
        bytes_per_second=bandwidth,
        all_gather=rate,
        reduce_scatter=rate,
        all_reduce=rate,
        source=table["source"],
    )
    chip = Chip(
        name=cpu_name_with_core_count(),
        device_names=("cpu",),
        memory_bytes=_host_memory_bytes() // ranks_per_node,
        memory_bytes_per_second=table["bytes_per_second"] * cores,
        flops_per_second={"fp32": table["flops_per_second"] * cores},
        source=table["source"],
    )
    return Hardware(
        name=chip.name,
        device="cpu",
        chip=chip,
        rates=catalog.default_cpu_rates(cores),
        within=link,
        across=link,
        overlap=0.0,  # compute and communication threads share the cores
        source=f"not calibrated; {table['source']}",
    )


def _read_cpu_model_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "CPU")


def _host_memory_bytes() -> int:
    """Returns the bytes of this machine's memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
