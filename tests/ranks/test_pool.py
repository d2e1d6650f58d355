"""The pool shows failures, replaces dead ranks, and never hangs."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.errors import ShardError
from tests.ranks import RankFailed


def gathered_ranks(offset: int) -> list[int]:
    world = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(world, torch.tensor([dist.get_rank() + offset]))
    return [int(t) for t in world]


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fail_and_hold_the_world_in_a_cycle() -> None:
    """As a sharded model holds its mesh, whose groups hold the connections."""
    model: dict[str, object] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    model["model"] = model
    if dist.get_rank() == 1:
        raise ShardError("rank one says no.", fix="nothing")
    dist.barrier()


def sleep_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def leave_a_mess() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def global_state() -> tuple[object, ...]:
    return torch.get_default_dtype(), torch.initial_seed(), os.environ.get("LEFT_BEHIND"), os.getcwd()


def sum_over_columns(shape: tuple[int, int]) -> float:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("row", "column"))["column"]
    tensor = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
    return float((tensor * 2).sum().full_tensor())


def strategies_are_kept() -> bool:
    """Returns whether torch keeps strategies of operations, and so the mesh and its groups, as 2.11 does."""
    sum_over_columns((1, 1))
    gc.collect()
    return any(type(one).__name__ == "OpStrategy" for one in gc.get_objects())


def threads_and_sockets() -> tuple[int, int]:
    files = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    sockets = sum(os.path.islink(file) and os.readlink(file).startswith("socket:") for file in files)
    return len(os.listdir("/proc/self/task")), sockets


def test_ranks_that_wait_for_one_that_failed_are_not_left_to_their_timeout(ranks):
    before = ranks(2).run(rank_and_pid)
    with pytest.raises(ShardError, match="rank one says no") as raised:
        ranks(2).run(fail_and_hold_the_world_in_a_cycle)
    assert raised.value.fix == "nothing"
    note = "".join(raised.value.__notes__)
    assert note.startswith("on rank 1:")
    assert "in fail_and_hold_the_world_in_a_cycle" in note
    assert ranks(2).run(rank_and_pid) == before, "a rank that did not answer was ended"


def test_a_hung_rank_is_ended_by_the_timeout(ranks):
    with pytest.raises(RankFailed, match=r"rank \d (did not answer within 1 s|died)"):
        ranks(2, timeout_seconds=1.0).run(sleep_on_rank_one)
    assert ranks(2).run(gathered_ranks, 0) == [[0, 1]] * 2


def test_nothing_leaks_from_one_call_to_the_next(ranks):
    before = ranks(1).run(global_state)
    ranks(1).run(leave_a_mess)
    assert ranks(1).run(global_state) == before


def test_new_meshes_leave_no_threads_or_sockets_and_no_stale_groups(ranks):
    if ranks(1).run(strategies_are_kept) == [True]:
        pytest.skip("this torch keeps the mesh of every operation on DTensors")
    ranks(2).run(sum_over_columns, (1, 2))
    before = ranks(2).run(threads_and_sockets)
    for shape in [(1, 2), (2, 1), (1, 2), (2, 1)]:
        assert ranks(2).run(sum_over_columns, shape) == [132.0, 132.0]
    assert ranks(2).run(threads_and_sockets) == before
