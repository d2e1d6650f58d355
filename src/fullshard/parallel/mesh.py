"""Opens the process group of a run, and builds the device mesh of a Plan.

[Note: groups are shared] Each group of gloo has a thread that wakes every 10 ms, and each of NCCL has buffers
on the device. So models of one layout share their groups, instead of each having its own. A process that
measures many layouts, such as `fullshard calibrate`, would otherwise be slowed down by groups no longer used.
"""

import logging
import math
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache, partial
from inspect import signature
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.distributed import loopback
from fullshard.distributed.agreement import all_gather_object
from fullshard.errors import LaunchError, PlanError
from fullshard.quantities import count_text
from fullshard.spec.model import SharedAxis
from fullshard.spec.plan import DeviceType, Plan, too_few_gpus_error
from fullshard.system.process import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, raise_open_file_limit
from fullshard.torch_private.groups import find_default_timeout
from fullshard.torch_private.tensors import set_allocator_settings

logger = logging.getLogger("fullshard")

REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS = "dp_replicate", "dp_shard", "tp"
EXPERT_SHARD_AXIS, EXPERT_AXIS = "dp_mod_ep", "ep"
_MEETING = "fullshard"  # key prefix in the store: see `agree_on_store_prefix`
_STORE_TIMEOUT = timedelta(seconds=60)
_TURN_SECONDS = 0.05
_LAST_TENSORS: list[torch.Tensor] = []  # see `_close_process_group`
_MPI_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")  # Open MPI's; Intel MPI's and MPICH's


@dataclass(frozen=True)
class RankInfo:
    """This process's global and local rank, the numbers of ranks, and its device."""

    rank: int  # over all machines
    world_size: int
    local_rank: int  # on this machine
    local_world_size: int
    device: torch.device  # the CPU, or a GPU that no other rank uses


def choose_device_type(asked: Literal["auto", "cpu", "cuda"] = "auto") -> DeviceType:
    """Returns `asked`, or for `auto` CUDA if available, else CPU.

    Raises LaunchError for other devices and absent CUDA.
    """
    if asked not in get_args(DeviceType) and asked != "auto":
        raise LaunchError("this is no kind of device.", got=f"{asked!r}", fix='"auto", "cpu" or "cuda"')
    if asked == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            "this machine has no CUDA device that torch can use.",
            got='run.device = "cuda"',
            fix='run.device = "cpu", or a CUDA build of torch',
        )
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


@contextmanager
def process_group(
    device: Literal["auto", "cpu", "cuda"] = "auto", *, timeout_seconds: float = 600
) -> Generator[RankInfo]:
    """Opens the default process group, and closes it when the context ends.

    The ranks are those of torchrun's environment; without that, there is a single rank. A group that is
    already initialised is used, and stays open. On CUDA each rank uses the GPU of `choose_gpu`, the group
    also serves CPU tensors (with gloo), so that hosts can agree and offloaded gradients be reduced, and
    torch's allocator grows its segments, unless the environment configures it. gloo connects ranks on demand,
    and by loopback if all are on this machine: see `fullshard.distributed.loopback`. The soft limit of open
    files is raised to the hard one.

    Raises LaunchError if the ranks do not meet, and as `choose_gpu` does.

    >>> with fs.process_group() as ranks:  # torchrun's ranks, or a single one
    ...     print(ranks.world_size, ranks.device)
    1 cpu
    """
    kind = choose_device_type(device)
    own_device = torch.device("cpu")
    if kind == "cuda":
        if torch.version.cuda is not None and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
            set_allocator_settings(EXPANDABLE_SEGMENTS)
        gpu = torch.cuda.current_device() if dist.is_initialized() or torch.cuda.is_initialized() else None
        if gpu is None or not dist.is_initialized():
            gpu = choose_gpu(visible=torch.cuda.device_count(), current=gpu)
        own_device = torch.device("cuda", gpu)
        torch.cuda.set_device(own_device)
    is_rank = dist.is_initialized() or "RANK" in os.environ  # else another job has left the variables
    local_rank = (find_local_rank() or 0) if is_rank else 0
    if dist.is_initialized():
        yield _make_rank_info(local_rank, own_device)
        return
    raise_open_file_limit()
    with loopback.set_connection_variables():
        _init_process_group(own_device, timedelta(seconds=timeout_seconds))
        clean = False
        try:
            yield _make_rank_info(local_rank, own_device)
            clean = True
        finally:
            if dist.is_initialized():
                _close_process_group(kind, clean=clean)


def find_local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number of this rank on its machine, as torchrun, srun or MPI set it; None if none has."""
    is_task = environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"  # else the variable is a batch script's
    names = ("LOCAL_RANK", *(["SLURM_LOCALID"] if is_task else []), *_MPI_LOCAL_RANK)
    found = (environment[name] for name in names if environment.get(name, "").isdecimal())
    return next(map(int, found), None)


def choose_gpu(environment: Mapping[str, str] = os.environ, *, visible: int, current: int | None) -> int:
    """Returns the number of the GPU of this rank, of `visible` ones: its local rank, or the only one.

    A scheduler may make only its own GPU visible to each process. Raises LaunchError if there are more ranks
    on this machine than GPUs, and if there are several GPUs and the local rank is not known.

    current: the GPU that the program uses already, which is kept, unless it is the first, which it may use
        without having chosen it; None if it uses none
    """
    local_rank = find_local_rank(environment)
    if current or "RANK" not in environment or visible == 1:
        return current or 0
    if local_rank is None and current is None and environment.get("WORLD_SIZE") != "1":
        raise LaunchError(
            "the GPU of this rank is not known.",
            got=f"RANK={environment['RANK']}, {visible} GPUs, no LOCAL_RANK",
            why="all ranks of this machine would use its first GPU",
            fix="torchrun, or LOCAL_RANK for each rank, or torch.cuda.set_device before this",
        )
    if (local_rank or 0) >= visible:
        ranks = int(environment.get("LOCAL_WORLD_SIZE", (local_rank or 0) + 1))
        raise too_few_gpus_error(ranks, gpus=visible, got=f"LOCAL_RANK = {local_rank}")
    return local_rank or 0


def _make_rank_info(local_rank: int, device: torch.device) -> RankInfo:
    world_size = dist.get_world_size()
    local_world_size = min(int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))), world_size)
    return RankInfo(dist.get_rank(), world_size, local_rank, local_world_size, device)


def _close_process_group(kind: DeviceType, *, clean: bool) -> None:
    if clean:
        if kind == "cuda":
            torch.cuda.synchronize()
        # A rank that tears down early aborts the others' last collectives. This one is over gloo, whose wait
        # ends if a peer dies. The list keeps the tensor alive: a thread of gloo that releases it while the
        # interpreter ends aborts the process (pytorch/pytorch#179291).
        _LAST_TENSORS.append(torch.zeros(1, device="cpu"))
        dist.all_reduce(_LAST_TENSORS[-1])
    if clean or kind == "cpu":
        dist.destroy_process_group()
        forget_groups()
    # Otherwise the process is about to end: destroying NCCL would wait for messages a failed rank never sent.


def _init_process_group(device: torch.device, timeout: timedelta) -> None:
    """Opens the default group. With `device_id`, NCCL connects the ranks now, not in the first step."""
    backend, own = ("gloo", None) if device.type == "cpu" else ("cpu:gloo,cuda:nccl", device)
    open_group = partial(dist.init_process_group, backend, timeout=timeout, device_id=own)
    address = () if loopback.all_ranks_are_local() else ("MASTER_ADDR",)
    missing = [name for name in ("WORLD_SIZE", *address, "MASTER_PORT") if name not in os.environ]
    if missing and "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1":
        raise LaunchError(
            "the environment is that of a rank, but not whole.",
            got=f"RANK={os.environ['RANK']}, without {', '.join(missing)}",
            fix="torchrun, which sets all; or none of them, for a single rank",
        )
    if "RANK" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        open_group(store=dist.HashStore(), rank=0, world_size=1)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _connect_to_store(rank, timeout)
    store = agree_on_store_prefix(store, rank=rank, world_size=world_size, timeout=timeout)
    open_group(store=store, rank=rank, world_size=world_size)


def _connect_to_store(rank: int, timeout: timedelta) -> dist.Store:
    """Connects to torchrun's store, or else to one that rank 0 serves. Raises LaunchError.

    Rank 0 serves its store until its process ends, because other ranks stay connected when it opens a group
    again.
    """
    host, port = os.environ.get("MASTER_ADDR", loopback.LOOPBACK), int(os.environ["MASTER_PORT"])
    serve: Callable[[int], object] | None = None
    why = "rank 0 was not started or died, another process has that port, or this node cannot reach it"
    # Set by torchrun if the store is its own, which outlives our processes.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        why = "the torchrun that kept it (that of rank 0) has gone, or this node cannot reach it"
        timeout = min(timeout, _STORE_TIMEOUT)  # it existed before this process was started
    elif loopback.all_ranks_are_local():
        host, serve = loopback.LOOPBACK, loopback.start_store_until_exit
    else:
        serve = partial(_start_store_until_exit, host)
    try:
        if rank == 0 and serve is not None:
            serve(port)
        return dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    except (OSError, dist.DistError) as error:
        raise LaunchError(
            "the store in which the ranks find each other cannot be reached.",
            got=f"rank {rank}, {host}:{port}: {str(error).splitlines()[0]}",
            why=why,
            fix="start all ranks again, with another MASTER_PORT if that one is taken; docs/restarts.md",
        ) from error


_start_store_until_exit = cache(partial(dist.TCPStore, is_master=True, wait_for_workers=False))


def agree_on_store_prefix(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Returns `store` with a key prefix that only the ranks of this attempt use. Every rank calls this.

    torchrun's store survives restarts, and gloo and NCCL use any address that they find in it, even one of a
    dead attempt (https://github.com/pytorch/pytorch/issues/135712). Agents count only their own restarts, so
    a count does not identify an attempt. Instead, rank 0 chooses a random prefix. Each other rank asks for it
    under a unique key, and rank 0 answers under that key. Nobody reads its answers to dead ranks.

    Raises LaunchError if not all ranks ask within `timeout`.
    """
    try:
        if rank == 0:
            attempt = _choose_and_send_store_prefix(store, world_size=world_size, timeout=timeout)
        else:
            attempt = _ask_for_store_prefix(store, rank=rank, timeout=timeout)
    except dist.DistStoreError as error:
        raise _missing_ranks_error(rank, world_size, got=str(error).splitlines()[0]) from error
    return dist.PrefixStore(attempt, store)


def _ask_for_store_prefix(store: dist.Store, *, rank: int, timeout: timedelta) -> str:
    own = uuid.uuid4().hex
    store.set(f"{_MEETING}/asks/{rank}", own)
    answer = f"{_MEETING}/answer/{own}"
    store.wait([answer], timeout)
    attempt = store.get(answer).decode()
    store.add(f"{attempt}/here", 1)
    return attempt


def _choose_and_send_store_prefix(store: dist.Store, *, world_size: int, timeout: timedelta) -> str:
    attempt, answered = f"{_MEETING}/{uuid.uuid4().hex}", set[bytes]()
    asks = [f"{_MEETING}/asks/{rank}" for rank in range(1, world_size)]
    deadline = time.monotonic() + timeout.total_seconds()
    if asks:
        store.wait(asks, timeout)
    while (here := store.add(f"{attempt}/here", 0)) < len(asks):
        # A rank may ask after its dead predecessor was answered. Then a later iteration answers it.
        for own in set(store.multi_get(asks)) - answered:
            store.set(f"{_MEETING}/answer/{own.decode()}", attempt)
            answered.add(own)
        if time.monotonic() > deadline:
            got = f"{count_text(here + 1, 'rank')} after {timeout.total_seconds():.0f} s"
            raise _missing_ranks_error(0, world_size, got=got)
        time.sleep(_TURN_SECONDS)
    return attempt


def _missing_ranks_error(rank: int, world_size: int, *, got: str) -> LaunchError:
    return LaunchError(
        f"the {world_size} ranks of this attempt did not meet.",
        got=f"rank {rank}: {got}",
        why="some were not started, died before they came, or cannot reach the store in which they meet "
        f"({os.environ.get('MASTER_ADDR', loopback.LOOPBACK)}:{os.environ.get('MASTER_PORT')})",
    )


def build_mesh(plan: Plan, *, is_sharded: bool = True, of_experts: bool = False) -> DeviceMesh:
    """Builds the plan's mesh, with the axes (`dp_replicate`, `dp_shard`, `tp`).

    An axis `tp` of size 1 is left out, and also `dp_replicate`, except for unsharded units. Adjacent ranks
    are on one `tp` axis, and then on one `dp_shard` axis, since their links are faster. Raises PlanError if
    there is no process group, or its size is not the plan's.

    is_sharded: False for units that the plan does not shard: their mesh replicates them, and splits matmuls
    of_experts: whether it is the mesh of experts over the same ranks, (`dp_replicate`, `dp_mod_ep`, `ep`).
        Adjacent ranks divide the experts. Those that have the same ones shard and replicate them.
    """
    world = _find_group_of_plan(plan)
    replicas, shards, inner = plan.replicate_degree, plan.shard_degree, plan.tensor_parallel
    if of_experts:
        (replicas, shards), inner = plan.expert_degrees(is_sharded=is_sharded), plan.expert_parallel
    elif not is_sharded:
        replicas, shards = replicas * shards, 1
    sizes = {REPLICATE_AXIS: replicas} if replicas > 1 or not (is_sharded or of_experts) else {}
    sizes[EXPERT_SHARD_AXIS if of_experts else SHARD_AXIS] = shards
    if inner > 1:
        sizes[EXPERT_AXIS if of_experts else TENSOR_AXIS] = inner
    return build_mesh_of_axes(
        world, device=plan.device, sizes=tuple(sizes.items()), on_host=_has_tensors_on_host(plan)
    )


def _has_tensors_on_host(plan: Plan) -> bool:
    """Returns whether collectives along an axis, such as those of `full_tensor`, may get host tensors."""
    return plan.device == "cpu" or plan.run.offload.offloads_optimizer


@lru_cache
def build_mesh_of_axes(
    world: dist.ProcessGroup,
    *,
    device: DeviceType,
    sizes: tuple[tuple[str, int], ...],
    on_host: bool = False,
) -> DeviceMesh:
    """Builds a mesh of axes (name, size) over `world`. Callers share it: see [Note: groups are shared].

    on_host: as for `build_groups`
    """
    names, counts = zip(*sizes, strict=True)
    mesh, groups = torch.arange(math.prod(counts), device="cpu").view(counts), list[dist.ProcessGroup]()
    for place, name in enumerate(names):
        ranks = mesh.movedim(place, -1).reshape(-1, counts[place]).tolist()
        # FSDP2 and the sums of the step, which come in one order on all ranks, share the default group.
        is_default = len(ranks) == 1 and name not in (TENSOR_AXIS, EXPERT_AXIS)
        build = partial(_build_group_once, world, axis=name, ranks=_as_tuples(ranks), on_host=on_host)
        groups.append(world if is_default else build())
    one = groups[0] if len(groups) == 1 else groups
    return DeviceMesh.from_group(one, device, mesh=mesh, mesh_dim_names=names)


def split_inner_axis(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Returns the axes that FSDP2 shards and replicates over, and the `tp` or `ep` axis inside, if any."""
    names = mesh.mesh_dim_names
    assert names is not None, "all our meshes have names"
    if names[-1] not in (TENSOR_AXIS, EXPERT_AXIS):
        return mesh, None
    return mesh[names[:-1]], mesh[names[-1]]


def build_axis_group(plan: Plan, axis: SharedAxis) -> dist.ProcessGroup:
    """Builds the groups of ranks that share work along `axis`, and returns this rank's. Collective.

    Raises PlanError as `build_mesh` does.
    """
    world = _find_group_of_plan(plan)
    every, tensor = torch.arange(plan.world_size, device="cpu"), plan.tensor_parallel
    context = every.view(-1, plan.context_parallel, tensor).transpose(1, 2)
    # Those of the inner axes are groups of meshes, too.
    name, ranks = {
        "tensor": (TENSOR_AXIS, every.view(-1, tensor)),
        "context": ("cp", context.reshape(-1, plan.context_parallel)),
        "expert": (EXPERT_AXIS, every.view(-1, plan.expert_parallel)),
    }[axis]
    every = _as_tuples(ranks.tolist())
    return _build_group_once(world, axis=name, ranks=every, on_host=_has_tensors_on_host(plan))


def _as_tuples(ranks: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, ranks))


@lru_cache
def _build_group_once(
    world: dist.ProcessGroup, *, axis: str, ranks: tuple[tuple[int, ...], ...], on_host: bool
) -> dist.ProcessGroup:
    """Builds groups of `ranks` of `world`, shared as meshes are, and returns the one with this rank."""
    if ranks[0] == tuple(range(len(ranks[0]))) and not loopback.all_ranks_are_local():
        places = find_group_across_nodes(ranks, hosts=all_gather_object(socket.gethostname()))
        if places and dist.get_rank() == 0:
            fix = "srun --distribution=block (mpirun --map-by slot) keeps the ranks of a node together"
            logger.warning("the collectives of %s cross the network: %s; %s", axis, places, fix)
    return build_groups(world, axis=axis, ranks=[*map(list, ranks)], on_host=on_host)


def build_groups(
    world: dist.ProcessGroup, *, axis: str, ranks: list[list[int]], on_host: bool
) -> dist.ProcessGroup:
    """Builds groups, which divide the ranks of `world`, and returns the one with this rank. Collective.

    They have the timeout of `world`, the default group, where torch would take 30 minutes.

    on_host: whether their collectives may get tensors in host memory. If not, groups of GPUs have NCCL alone.
        Its communicator is divided once for all groups, if torch can divide that of `world` without gloo;
        `new_group` divides it once per group, each time with all ranks.
    """
    timeout = find_default_timeout()
    backend = "nccl" if not on_host and "cuda:nccl" in dist.get_backend_config(world) else None
    is_divisible = world.bound_device_id is not None and "backend" in signature(dist.split_group).parameters
    if backend is not None and is_divisible:
        own = dist.split_group(world, ranks, timeout=timeout, group_desc=axis, backend=backend)
    else:
        own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend, group_desc=axis)
    assert isinstance(own, dist.ProcessGroup), "every rank is in a group"
    return own


def find_group_across_nodes(ranks: Sequence[Sequence[int]], *, hosts: Sequence[str]) -> str:
    """Returns the places of a group of adjacent ranks that is on several nodes because their ranks alternate.

    Returns an empty text if the ranks of each host are adjacent, or the groups are larger than nodes.
    """
    runs, most = 1 + sum(one != other for one, other in pairwise(hosts)), max(Counter(hosts).values())
    across = next((group for group in ranks if len({hosts[rank] for rank in group}) > 1), ())
    if runs == len(set(hosts)) or len(across) > most:
        return ""
    return ", ".join(f"rank {rank} on {hosts[rank]}" for rank in across[:3])


def forget_groups() -> None:
    """Forgets meshes and groups of a process group that was destroyed."""
    for build_once in (build_mesh_of_axes, _build_group_once):
        build_once.cache_clear()


def _find_group_of_plan(plan: Plan) -> dist.ProcessGroup:
    if (world := dist.group.WORLD) is None:
        raise PlanError(
            "there is no process group to lay a mesh over.",
            fix="with fullshard.process_group(): around the training code",
        )
    if dist.get_world_size() != plan.world_size:
        raise PlanError(
            f"the plan is for {count_text(plan.world_size, 'rank')}.",
            got=count_text(dist.get_world_size(), "rank"),
            fix="make the plan with world_size=torch.distributed.get_world_size()",
        )
    return world
