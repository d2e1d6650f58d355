"""A background save holds the state at the time of the call, and reports its failure."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from tests.checkpoint.states import State, assert_same, loaded, loaded_sharded, numbers, ones_own, sharded
from tests.faults.collectives import last_collective


@dataclass
class Training(State):
    """A state that is about to change when `update` is called."""

    waiting: list[Callable[[], None]] = field(default_factory=list)

    def register_before_next_update(self, act: Callable[[], None]) -> None:
        self.waiting.append(act)

    def update(self) -> None:
        acts, self.waiting = self.waiting, []
        for act in acts:
            act()
        for tensor in self.held.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(9)


class SlowPlace(LocalLocation):
    """Waits for `may_commit` before it commits."""

    may_commit = threading.Event()

    @contextmanager
    def lock_for_writing(self):
        self.may_commit.wait(120)
        with super().lock_for_writing():
            yield


def save_and_update(directory: Path, mesh_shape: tuple[int, ...]) -> list[Any]:
    """Two saves, with updates right after each; the second copies into the buffers of the first."""
    seen: list[Any] = []
    with BackgroundSaver(LocalLocation(directory)) as saver:
        for step in (1, 2):
            state = Training(step, sharded(step, mesh_shape), {"tokens": step * 100})
            saver.save(state)
            state.update()
            dist.all_reduce(torch.ones(3))  # training runs collectives meanwhile
            seen.append(saver.staged_bytes)
        saver.wait()
        seen += [(one.step, one.error) for one in saver.outcomes()]
    return seen


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)])
def test_a_background_save_holds_the_state_before_the_updates(ranks, tmp_path, mesh_shape):
    world = torch.Size(mesh_shape).numel()
    for staged, again, *ended in ranks(world).run(save_and_update, tmp_path, mesh_shape):
        assert staged == again > 0
        assert ended == [(1, None), (2, None)]
    for step in (2, 1):
        found = ranks(world).run(loaded_sharded, tmp_path / f"step-0000000{step}", mesh_shape)
        for rank, (state, whole) in enumerate(found):
            assert_same(whole, numbers(step) | {f"random.rank{rank}": ones_own(step, rank)})
            assert state.noted == {"tokens": step * 100}


def test_a_state_without_update_hooks_is_copied_at_once(tmp_path):
    SlowPlace.may_commit.clear()
    with BackgroundSaver(SlowPlace(tmp_path)) as saver:
        state = State(1, numbers(1))
        saver.save(state)
        for tensor in state.held.values():
            tensor.zero_()
        assert not saver.outcomes()
        assert not list(tmp_path.glob("step-*"))
        SlowPlace.may_commit.set()
    (outcome,) = saver.outcomes()
    assert (outcome.path, outcome.error) == (tmp_path / "step-00000001", None)
    assert_same(loaded(tmp_path).held, numbers(1))


def test_a_failure_is_reported_and_the_next_save_succeeds(tmp_path):
    save(State(1, {"model.other": torch.ones(3)}), tmp_path)
    with BackgroundSaver(LocalLocation(tmp_path)) as saver:
        saver.save(State(1, numbers(1)))
        saver.save(State(2, numbers(2)))
        saver.wait()
        one, two = saver.outcomes()
    assert isinstance(one.error, CheckpointError)
    assert "holds another model" in str(one.error)
    assert one.path is None
    assert two.path == tmp_path / "step-00000002"


def refused_on_one_rank(directory: Path) -> list[str]:
    rank = dist.get_rank()
    tensors = sharded(1, (2,))
    if rank == 1:
        tensors["model.uneven"].to_local().fill_(float("nan"))
    with BackgroundSaver(LocalLocation(directory)) as saver:
        saver.save(State(1, tensors))
        saver.wait()
        return [str(one.error) for one in saver.outcomes()]


def test_a_rank_that_fails_fails_all(ranks, tmp_path):
    for (message,) in ranks(2).run(refused_on_one_rank, tmp_path):
        assert message.startswith("rank 1: model.uneven is not saved.")
    assert not list(tmp_path.glob("step-*"))


def saves_after_a_lost_connection(directory: Path, *, at: int) -> list[str | None]:
    """The errors of a save whose thread loses its connection on rank 1, and of the next save.

    at: which of the thread's collectives fails, the first (0) or the last (-1)
    """
    saver = BackgroundSaver(directory)
    state = State(1, sharded(1, (2,)))
    with last_collective(10**6, kills=False) as count:
        saver.save(state)
        saver.wait()
        of_thread = range(1 + 8, 1 + count())  # behind the two agreements of `save` itself
    state.step = 2
    with last_collective(of_thread[at] if dist.get_rank() == 1 else 10**6, kills=False):
        saver.save(state)
        saver.wait()
    state.step = 3
    saver.save(state)
    saver.wait()
    return [None if one.error is None else str(one.error) for one in saver.outcomes()]


@pytest.mark.parametrize("at", [0, -1])
def test_ranks_connect_again_after_a_thread_has_lost_its_connection(ranks, tmp_path, at):
    """No rank waits for the timeout of the group, although rank 1 lives."""
    found = ranks(2, timeout_seconds=60.0).run(partial(saves_after_a_lost_connection, at=at), tmp_path)
    assert "saving step 2 in the background failed" in found[1][1]
    assert [(first, last) for first, _, last in found] == [(None, None)] * 2
    assert (tmp_path / "step-00000003" / MANIFEST).exists()
