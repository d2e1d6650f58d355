"""Ranks, and the meshes they are laid out in."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.distributed.agreement import all_ranks_have
from fullshard.errors import LaunchError
from fullshard.parallel.mesh import (
    agree_on_store_prefix,
    build_axis_group,
    build_groups,
    build_mesh,
    choose_device_type,
    choose_gpu,
    find_group_across_nodes,
    find_local_rank,
    process_group,
)
from fullshard.training.figures import HostCopy
from fullshard.training.shard import shard
from tests.fakes.architectures import Block
from tests.fakes.plans import STRATEGIES, plan_of


def mesh_of(*settings: str) -> tuple[tuple[str, ...], tuple[int, ...], list[int]]:
    mesh = build_mesh(plan_of(dist.get_world_size(), *settings))
    shard_group = dist.get_process_group_ranks(mesh.get_group("dp_shard"))
    return mesh.mesh_dim_names, mesh.shape, shard_group


@pytest.mark.parametrize(
    ("strategy", "axes", "shape", "shard_groups"),
    [
        ("full_shard", ("dp_shard",), (4,), [[0, 1, 2, 3]] * 4),
        ("zero1", ("dp_shard",), (4,), [[0, 1, 2, 3]] * 4),
        ("no_shard", ("dp_replicate", "dp_shard"), (4, 1), [[0], [1], [2], [3]]),
        ("hybrid_shard", ("dp_replicate", "dp_shard"), (2, 2), [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_mesh_of_each_strategy(
    strategy: str, axes: tuple[str, ...], shape: tuple[int, ...], shard_groups: list[list[int]], ranks: Any
) -> None:
    seen = ranks(4).run(mesh_of, *STRATEGIES[strategy])
    assert seen == [(axes, shape, group) for group in shard_groups]


def groups_of(models: list[int], *settings: str) -> int:
    """Shards models with these numbers of layers, and returns the number of process groups."""
    for layers in models:
        with torch.device("meta"):
            model = nn.Sequential(*(Block() for _ in range(layers)))
        shard(model, plan_of(dist.get_world_size(), *settings))
    return dist.get_pg_count()


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "no_shard"])
def test_process_groups_do_not_grow_with_models(strategy: str, ranks: Any) -> None:
    few, many = (ranks(4).run(groups_of, models, *STRATEGIES[strategy]) for models in ([2], [7, 2]))
    assert few == many


def timeouts_of_all_groups(directory: Path, *settings: str) -> list[tuple[str, float]]:
    """Builds the groups of a run; returns the timeouts of all groups of this process, by description."""
    # As on four nodes: the names of their hosts are compared.
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
    }
    plan = plan_of(dist.get_world_size(), *settings)
    meshes = [build_mesh(plan), build_mesh(plan, is_sharded=False)]
    if plan.has_expert_mesh:
        meshes += [build_mesh(plan, of_experts=True), build_mesh(plan, of_experts=True, is_sharded=False)]
    for axis, degree in {
        "tensor": plan.tensor_parallel,
        "context": plan.context_parallel,
        "expert": plan.expert_parallel,
    }.items():
        if degree > 1:
            build_axis_group(plan, axis)
    with BackgroundSaver(directory):
        groups = [*dist.distributed_c10d._world.pg_map]
        seconds = [
            (one.group_desc, one._get_backend(torch.device("cpu")).options._timeout.total_seconds())
            for one in groups
        ]
    assert dist.group.WORLD in groups
    for mesh in meshes:
        assert set(mesh.get_all_groups()) <= set(groups)
    return seconds


EXPERTS = ("model.experts=4", "model.experts_per_token=2")


@pytest.mark.parametrize(
    ("settings", "axes"),
    [
        (STRATEGIES["hybrid_shard"], {"dp_replicate", "dp_shard"}),
        (("sharding.tensor_parallel=2",), {"dp_replicate", "dp_shard", "tp"}),
        (("sharding.context_parallel=2",), {"dp_shard", "cp"}),
        ((*EXPERTS, "sharding.expert_parallel=2"), {"dp_replicate", "dp_shard", "dp_mod_ep", "ep"}),
    ],
)
def test_every_group_has_the_timeout_of_the_default_group(
    settings: tuple[str, ...], axes: set[str], ranks: Any, tmp_path: Path
) -> None:
    pool = ranks(4)
    for seconds in pool.run(timeouts_of_all_groups, tmp_path, *settings):
        assert {*axes, "default_pg", "undefined"} <= {name for name, _ in seconds}
        assert {timeout for _, timeout in seconds} == {pool.timeout_seconds}, "the default group's"


class WorldOfGpus:
    """A default group as on GPUs, each rank bound to its own."""

    bound_device_id = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("on_host", "divides", "asked"),
    [(False, True, "split nccl"), (False, False, "new nccl"), (True, True, "new None")],
)
def test_groups_of_gpus_have_gloo_only_for_host_tensors_and_divide_the_communicator_once(
    on_host: bool, divides: bool, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def split(parent: Any, ranks: Any, *, timeout: Any, group_desc: str, backend: str | None) -> Any:
        calls.append(f"split {backend}")
        return dist.group.WORLD

    def enumerate_groups(ranks: Any, *, timeout: Any, backend: str | None, group_desc: str) -> Any:
        calls.append(f"new {backend}")
        return dist.group.WORLD, []

    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "split_group", split if divides else lambda parent, ranks: None)
    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", enumerate_groups)
    with process_group("cpu"):
        build_groups(WorldOfGpus(), axis="tp", ranks=[[0, 1], [2, 3]], on_host=on_host)  # type: ignore[arg-type]
    assert calls == [asked]


def test_matmuls_are_shared_over_the_groups_of_the_mesh(ranks: Any) -> None:
    assert ranks(2).run(shares_tensor_group) == [True, True]


def shares_tensor_group() -> bool:
    plan = plan_of(2, "sharding.tensor_parallel=2")
    return build_axis_group(plan, "tensor") is build_mesh(plan)["tp"].get_group()


def build_under_another_default_device() -> tuple[list[float], list[int], bool]:
    numbers = torch.tensor([1.0, 2.0])
    with torch.device("meta"):  # in place of a GPU, of which programs make the default
        mesh = build_mesh(plan_of(2, "sharding.tensor_parallel=2"))
        return HostCopy(numbers).read(), mesh.mesh.flatten().tolist(), all_ranks_have(True)


def test_the_default_device_of_a_program_does_not_matter(ranks: Any) -> None:
    assert ranks(2).run(build_under_another_default_device) == [([1.0, 2.0], [0, 1], True)] * 2


TASK = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "6"}


@pytest.mark.parametrize(
    ("environment", "visible", "current", "gpu"),
    [
        ({"RANK": "13", "LOCAL_RANK": "5"}, 8, None, 5),
        ({"RANK": "14", **TASK}, 8, None, 6),
        ({"RANK": "14", **TASK, "LOCAL_RANK": "2"}, 8, None, 2),
        ({"RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 8, None, 1),
        ({"RANK": "9", "MPI_LOCALRANKID": "1"}, 8, None, 1),
        ({"RANK": "13", "LOCAL_RANK": "5"}, 1, None, 0),  # each task sees its own
        ({"RANK": "13"}, 1, None, 0),
        ({"RANK": "13", "LOCAL_RANK": "5"}, 8, 3, 3),  # chosen by the program
        ({"RANK": "13", "LOCAL_RANK": "5"}, 8, 0, 5),  # used by the program, which chose none
        ({"RANK": "8"}, 8, 0, 0),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 8, None, 0),
        ({"LOCAL_RANK": "5"}, 8, None, 0),  # left by another job
        ({}, 8, 4, 4),
    ],
)
def test_gpu_of_a_rank(environment: dict[str, str], visible: int, current: int | None, gpu: int) -> None:
    assert choose_gpu(environment, visible=visible, current=current) == gpu


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, "the GPU of this rank is not known"),
        # srun of one torchrun per node: its variable is not a rank's
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_LOCALID": "0"}, "the GPU of this rank is not known"),
        ({"RANK": "8", "LOCAL_RANK": "8", "LOCAL_WORLD_SIZE": "9"}, "9 ranks need a GPU each"),
    ],
)
def test_a_gpu_that_is_not_known_or_not_there_is_refused(environment: dict[str, str], said: str) -> None:
    assert find_local_rank({"SLURM_LOCALID": "0"}) is None
    with pytest.raises(LaunchError, match=said):
        choose_gpu(environment, visible=8, current=None)


PAIRS = [(0, 1), (2, 3)]


def test_nodes_whose_ranks_alternate_are_named_where_a_group_would_fit_on_one() -> None:
    assert find_group_across_nodes(PAIRS, hosts=["a", "b", "a", "b"]) == "rank 0 on a, rank 1 on b"
    for hosts in (["a", "a", "b", "b"], ["a"] * 4, ["a", "b", "c", "d"], ["a", "a", "a", "b"]):
        assert find_group_across_nodes(PAIRS, hosts=hosts) == ""
    # A group larger than a node has to be on several.
    assert find_group_across_nodes([(0, 1, 2), (3, 4, 5)], hosts=["a", "b", "a", "b", "c", "c"]) == ""


def test_single_process_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with process_group("cpu") as alone:
        assert (alone.rank, alone.world_size, alone.local_rank, alone.local_world_size) == (0, 1, 0, 1)
        assert alone.device == torch.device("cpu")
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()


def test_a_failure_inside_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(KeyError), process_group("cpu"):
        raise KeyError
    assert not dist.is_initialized()


def group_that_is_there() -> tuple[int, int, bool]:
    with process_group("cpu") as group:
        pass
    return group.rank, group.world_size, dist.is_initialized()


def test_existing_group_is_used_and_kept(ranks: Any) -> None:
    assert ranks(2).run(group_that_is_there) == [(0, 2, True), (1, 2, True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_requested_cuda_without_a_device_is_refused() -> None:
    assert choose_device_type("auto") == "cpu"
    with pytest.raises(LaunchError, match="no CUDA device"):
        choose_device_type("cuda")
    with pytest.raises(LaunchError, match="no kind of device"):
        choose_device_type("gpu")  # pyright: ignore[reportArgumentType]


def test_a_machine_whose_only_gpu_is_apples_trains_on_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device_type("auto") == "cpu"


SOON = timedelta(seconds=120)


def attempt(server: dist.TCPStore, order: tuple[int, ...]) -> list[dict[int, str]]:
    """Returns the addresses that each rank reads; the ranks come in `order`."""

    def one(rank: int) -> dict[int, str]:
        client = dist.TCPStore("127.0.0.1", server.port, timeout=SOON, wait_for_workers=False)
        store = agree_on_store_prefix(client, rank=rank, world_size=len(order), timeout=SOON)
        fresh = not store.check([f"address/{other}" for other in order])
        store.set(f"address/{rank}", f"{order}, {rank}, {fresh}")
        return {other: store.get(f"address/{other}").decode() for other in order}

    with ThreadPoolExecutor(len(order)) as threads:
        return [future.result() for future in [threads.submit(one, rank) for rank in order]]


def test_the_ranks_of_an_attempt_read_nothing_of_those_before() -> None:
    """More ranks than before, and fewer; rank 0 first and last; a rank that died before it was answered."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SOON, wait_for_workers=False)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 3, 2), (1, 0)):
        server.set("fullshard/asks/1", "of one that is dead")
        assert attempt(server, order) == [{rank: f"{order}, {rank}, True" for rank in order}] * len(order)


@pytest.mark.parametrize(("rank", "asked"), [(0, ""), (1, ""), (0, "by a rank that died")])
def test_missing_rank_times_out(rank: int, asked: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=SOON, wait_for_workers=False)
    if asked:
        server.set("fullshard/asks/1", asked)
    with pytest.raises(LaunchError, match="did not meet") as raised:
        agree_on_store_prefix(server, rank=rank, world_size=2, timeout=timedelta(seconds=0.2))
    assert "torchrun" not in str(raised.value)


@pytest.mark.parametrize(("rank", "text"), [(0, "did not meet"), (1, "rank 0 was not started")])
def test_ranks_of_several_machines_that_do_not_meet_name_the_store_of_rank_0(
    rank: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        host, port = "0.0.0.0", str(free.getsockname()[1])  # this machine, but not by its loopback address
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": port}
    for name, value in {**variables, "MASTER_ADDR": host}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=text) as raised, process_group("cpu", timeout_seconds=0.5):
        pass
    assert f"{host}:{port}" in str(raised.value)
    assert "torchrun" not in str(raised.value)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(LaunchError, match="without MASTER_ADDR"), process_group("cpu"):
        pass
