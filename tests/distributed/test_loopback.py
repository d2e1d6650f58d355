"""Ranks listen on loopback if all of them are on this machine, unless the user has set another interface."""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.distributed.loopback import (
    all_ranks_are_local,
    find_loopback_interface,
    set_connection_variables,
)
from fullshard.errors import LaunchError
from fullshard.parallel.mesh import process_group
from tests.launch.sockets import listening

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc lists the sockets")
TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        (TWO | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu007"}, True),
        (TWO | {"MASTER_ADDR": "localhost"}, True),
        (TWO | {"MASTER_ADDR": "::1"}, True),
        (TWO | {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.7"}, False),
        (TWO | {"MASTER_ADDR": "gpu007"}, False),
    ],
)
def test_ranks_are_local_if_the_environment_shows_it(environment: dict[str, str], local: bool) -> None:
    assert all_ranks_are_local(environment) is local
    found = dict(environment)
    with set_connection_variables(found):
        assert ("GLOO_SOCKET_IFNAME" in found) is local
        assert ("NCCL_SOCKET_IFNAME" in found) is local
    assert found == environment


@linux
def test_the_interface_is_the_one_that_has_the_loopback_address() -> None:
    assert find_loopback_interface() in {name for _, name in socket.if_nameindex()}
    environment: dict[str, str] = {}
    with set_connection_variables(environment):
        assert environment["NCCL_SOCKET_IFNAME"] == f"={find_loopback_interface()}"


def test_what_the_user_has_set_is_kept() -> None:
    own = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth", "TORCH_GLOO_LAZY_INIT": "0"}
    environment = dict(own)
    with set_connection_variables(environment):
        assert environment == own
    assert environment == own


def listening_in_a_group_of_our_own(port: int) -> tuple[bool, int, float]:
    """Ranks that no agent keeps a store for; they make a group twice, and something holds on to the first."""
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    total = torch.ones(1)
    with process_group("cpu"):
        held = dist.group.WORLD
        dist.all_reduce(total)
    with process_group("cpu"):
        dist.all_reduce(total)
        found = listening(os.getpid())
    del held
    return all(address.is_loopback for address, _ in found), len(found), total.item()


@linux
def test_ranks_without_an_agent_meet_on_loopback_each_time(ranks: Callable[..., Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seen = ranks(2).run(listening_in_a_group_of_our_own, port)
    assert [(on_loopback, total) for on_loopback, _, total in seen] == [(True, 4.0)] * 2
    assert all(count > 0 for _, count, _ in seen)


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {**TWO, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(LaunchError, match=f"rank 0, 127.0.0.1:{port}: "), process_group("cpu"):
            pass
