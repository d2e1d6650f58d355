"""Ranks, and the meshes they are laid out in."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import LaunchError
from fullshard.parallel.mesh import agree_on_store_prefix, build_mesh, choose_device_type, process_group
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
    with pytest.raises(LaunchError, match="did not meet"):
        agree_on_store_prefix(server, rank=rank, world_size=2, timeout=timedelta(seconds=0.2))
