"""Hosts agree in few rounds, in which each rank needs few connections."""

import math
import os
import resource
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.distributed.agreement import (
    all_gather_object,
    all_ranks_have,
    largest_over_ranks,
    run_on_rank_zero,
)
from fullshard.distributed.loopback import set_connection_variables
from fullshard.parallel.mesh import process_group


def agreed() -> tuple[list[str], list[bool], int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    texts = all_gather_object(f"{rank}" * 1000 * rank)  # of different sizes; one is empty
    group: Any = dist.group.WORLD
    before = group._get_backend(group._device_types[0])._get_sequence_number_for_group()
    alone = [all_ranks_have(rank != odd) for odd in range(ranks + 1)]
    counted = group._get_backend(group._device_types[0])._get_sequence_number_for_group() - before
    return texts, alone, counted


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_ranks_learn_the_same_in_as_many_messages(n: int, ranks: Callable[..., Any]) -> None:
    texts = [f"{rank}" * 1000 * rank for rank in range(n)]
    messages = 2 * math.ceil(math.log2(n)) * (n + 1)
    assert ranks(n).run(agreed) == [(texts, [False] * n + [True], messages)] * n


def largest() -> list[float]:
    rank = dist.get_rank()
    return largest_over_ranks([-((rank - 1) ** 2), 2.0**52 + rank])


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_ranks_learn_the_largest_list(n: int, ranks: Callable[..., Any]) -> None:
    assert ranks(n).run(largest) == [max([-((rank - 1) ** 2), 2.0**52 + rank] for rank in range(n))] * n


class CountingStore(dist.Store):
    """Passes requests on to another store."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.requests = Counter[str]()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self.requests["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self._store.get(key)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.requests["wait"] += 1
        self._store.wait(keys, *timeout)


def requests_of_agreement(path: Path) -> tuple[int, int]:
    """Opens a group and agrees. Returns this rank's requests to the store, and its new sockets."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dist.destroy_process_group()
    before, store = len(os.listdir("/proc/self/fd")), CountingStore(dist.FileStore(str(path), ranks))
    with set_connection_variables():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        for _ in range(2):
            all_gather_object(rank)
            all_ranks_have(True)
            run_on_rank_zero(lambda: rank, doing="x")
        descriptors = len(os.listdir("/proc/self/fd")) - before
        dist.destroy_process_group()
    return store.requests.total(), descriptors


def test_connections_and_requests_to_the_store_grow_with_the_logarithm(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    for requests, descriptors in ranks(8).run(requests_of_agreement, tmp_path / "store"):
        peers = 2 * 3 - 1  # 1, 2 and 4 away in both directions; 4 is the same in both
        assert requests <= 1 + 2 * peers, "its address; of each peer, a wait and a read"
        assert descriptors <= peers + 4, "the device's, besides"


def limits_in_a_group() -> tuple[int, int]:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    with process_group("cpu"):
        return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_group_may_have_as_many_connections_as_the_system_allows(ranks: Callable[..., Any]) -> None:
    [(soft, hard)] = ranks(1).run(limits_in_a_group)
    assert soft == hard
