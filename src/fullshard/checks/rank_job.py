"""The work of each rank of `fullshard check`: facts about itself, its links, and a sharded step."""

import hashlib
import importlib.util
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.checks.ranks import FILE_NAME, PairRate, RankFacts
from fullshard.checks.sharded_step import StepError, compare_sharded_steps, optimizer_state_dtypes
from fullshard.distributed.agreement import all_gather_object
from fullshard.errors import SpecError
from fullshard.profiler.detect import detect_hardware
from fullshard.sharding.mesh import RankInfo, process_group
from fullshard.spec.dotted import append_working_directory_to_path
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.system.files import write_file_atomically

_PACKAGES = ("torch", "transformers", "numpy", "torchao", "peft")
_COMPARED = ("NCCL_", "TORCH_", "GLOO_", "CUDA_LAUNCH", "PYTORCH_", "OMP_NUM_THREADS", "FULLSHARD_")
# These differ between ranks or hosts by design.
_OWN = ("TORCHELASTIC_", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
_PROBE_BYTES, _PROBES = 4 << 20, 4
_CONNECT_SECONDS = 5.0
_TIMEOUT_SECONDS = 120.0
_MOST_PAIRS = 28  # of 8 ranks

Connect = Callable[[str, int], str | None]


def connect_to(host: str, port: int) -> str | None:
    """Connects to a port of a host. Returns the error, or None."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return None
    except OSError as error:
        return error.strerror or str(error)


@dataclass(frozen=True)
class RankAccess:
    """Sources from which a rank reads its machine; tests may replace each of them.

    host: name of this host
    environment: environment variables
    connect: connects to a port of a host; returns the error, or None
    """

    host: str = field(default_factory=socket.gethostname)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    connect: Connect = connect_to


def run_rank_checks(run: Run, *, resume: bool, plan: Plan | None, command_started: float) -> None:
    """Gathers the facts of all ranks, and writes them into `run.run.dir` on rank 0."""
    del resume, command_started
    with process_group(run.run.device, timeout_seconds=_TIMEOUT_SECONDS) as ranks:
        facts = gather_rank_facts(run, plan=plan, ranks=ranks)
        if ranks.rank == 0:
            write_file_atomically(Path(run.run.dir, FILE_NAME), facts.model_dump_json())


def gather_rank_facts(
    run: Run,
    *,
    plan: Plan | None,
    ranks: RankInfo,
    access: "RankAccess | None" = None,
) -> RankFacts:
    """Returns the facts about all ranks, on every rank. Collective.

    plan: the plan of the run, for any number of ranks; None for plain defaults
    access: how this rank reads its machine
    """
    access = access or RankAccess()
    hosts = all_gather_object(access.host)
    own = rank_settings(run, access.environment)
    device, error = ranks.device, None
    try:
        comparison = compare_sharded_steps(run, world_size=ranks.world_size, rank=ranks.rank)
    except StepError as raised:
        comparison, error = "a sharded step raises", str(raised)
    return RankFacts(
        hosts=tuple(hosts),
        settings=tuple(all_gather_object(own)),
        unreachable=unreachable_hosts(hosts, connect=access.connect),
        pairs=_pair_rates(device, world_size=ranks.world_size),
        device=device.type,
        catalog_bytes_per_second=_catalog_rate(device, ranks),
        comparison=comparison,
        step_error=error,
        state_dtypes=optimizer_state_dtypes(run, world_size=ranks.world_size),
        master_dtype=plan.precision.master if plan is not None else "fp32",
    )


def rank_settings(run: Run, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions, code and environment variables that must be equal on all ranks."""
    import importlib.metadata

    found = {"python": platform.python_version(), "code of fullshard": digest_of_code("fullshard")}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    dotted = [getattr(run.model, "python", None), run.train.loss, run.data.factory]
    for name in filter(None, dotted):
        found[f"code of {name}"] = digest_of_code(name.partition(":")[0])
    if run.run.device != "cpu" and torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    compared = (n for n in environment if n.startswith(_COMPARED) and not n.startswith(_OWN))
    return found | {name: environment[name] for name in compared}


def digest_of_code(module: str) -> str:
    """Returns a digest of the Python files of a package or module; `absent` if it is not found."""
    try:
        append_working_directory_to_path()
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return "absent"
    if found is None:
        return "absent"
    if found.submodule_search_locations:
        paths = [path for root in found.submodule_search_locations for path in Path(root).rglob("*.py")]
    else:
        paths = [Path(found.origin)] if found.origin else []
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def unreachable_hosts(hosts: list[str], *, connect: Connect) -> tuple[str, ...]:
    """Returns the pairs of hosts of which the first cannot connect to the second. Collective.

    hosts: host of each rank. The first rank of each host connects to a port of every other host's.
    """
    own = dist.get_rank()
    first_of = {host: hosts.index(host) for host in hosts}
    if len(first_of) < 2:
        return ()
    with socket.create_server(("", 0)) as listening:
        ports = all_gather_object(listening.getsockname()[1])
        failed: list[str] = []
        if first_of[hosts[own]] == own:
            for host, rank in first_of.items():
                error = None if rank == own else connect(host, ports[rank])
                failed += [f"{hosts[own]} cannot connect to {host}: {error}"] if error else []
        found = all_gather_object(failed)
    return tuple(text for texts in found for text in texts)


def _pair_rates(device: torch.device, *, world_size: int) -> tuple[PairRate, ...]:
    """Returns the rates between pairs of ranks, measured one after another: the best of four exchanges."""
    rates: list[PairRate] = []
    own, data = dist.get_rank(), torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    for one, other in list(combinations(range(world_size), 2))[:_MOST_PAIRS]:
        best = float("inf")
        if own in (one, other):
            for _ in range(_PROBES):
                started = time.perf_counter()
                _exchange(data, peer=other if own == one else one, sends_first=own == one)
                best = min(best, time.perf_counter() - started)
        seconds = min(all_gather_object(best))
        rates.append(PairRate(ranks=(one, other), bytes_per_second=2 * _PROBE_BYTES / seconds))
    return tuple(rates)


def _exchange(data: torch.Tensor, *, peer: int, sends_first: bool) -> None:
    for sends in (sends_first, not sends_first):
        (dist.send if sends else dist.recv)(data, peer)
    if data.is_cuda:
        torch.cuda.synchronize(data.device)


def _catalog_rate(device: torch.device, ranks: RankInfo) -> float | None:
    if device.type != "cuda":
        return None
    try:
        return detect_hardware("cuda", ranks=ranks.world_size).within.bytes_per_second
    except SpecError:
        return None
