"""A save in the background holds the state of the moment it was asked for, and its failure is told."""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.checkpoint.background import BackgroundSaver
from fullshard.checkpoint.files import LocalFiles
from fullshard.checkpoint.place import LocalPlace
from fullshard.checkpoint.stream import ALIGNMENT, LARGE_BYTES, address
from fullshard.errors import CheckpointError
from tests.checkpoint.states import State, assert_same, loaded, loaded_sharded, numbers, ones_own, sharded


@dataclass
class Training(State):
    """A state that is about to change when `update` is called."""

    waiting: list[Callable[[], None]] = field(default_factory=list)

    def before_update(self, act: Callable[[], None]) -> None:
        self.waiting.append(act)

    def update(self) -> None:
        acts, self.waiting = self.waiting, []
        for act in acts:
            act()
        for tensor in self.held.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(9)


class SlowPlace(LocalPlace):
    """Waits to be let go on before it commits."""

    may_commit = threading.Event()

    @contextmanager
    def writing(self):
        self.may_commit.wait(20)
        with super().writing():
            yield


def save_and_go_on(directory: Path, mesh_shape: tuple[int, ...]) -> list[Any]:
    """Two saves, with updates right after each; the second copies into the buffers of the first."""
    seen: list[Any] = []
    with BackgroundSaver(LocalPlace(directory)) as saver:
        for step in (1, 2):
            state = Training(step, sharded(step, mesh_shape), {"tokens": step * 100})
            saver.save(state)
            state.update()
            dist.all_reduce(torch.ones(3))  # training's own collectives go on meanwhile
            seen.append(saver.staged_bytes)
        saver.wait()
        seen += [(one.step, one.error) for one in saver.outcomes()]
    return seen


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)])
def test_what_is_saved_is_the_state_before_the_updates(ranks, tmp_path, mesh_shape):
    world = torch.Size(mesh_shape).numel()
    for staged, again, *ended in ranks(world).run(save_and_go_on, tmp_path, mesh_shape):
        assert staged == again > 0
        assert ended == [(1, None), (2, None)]
    for step in (2, 1):
        found = ranks(world).run(loaded_sharded, tmp_path / f"step-0000000{step}", mesh_shape)
        for rank, (state, whole) in enumerate(found):
            assert_same(whole, numbers(step) | {f"random.rank{rank}": ones_own(step, rank)})
            assert state.noted == {"tokens": step * 100}


def test_a_state_that_cannot_say_when_it_changes_is_copied_at_once(tmp_path):
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


def test_the_context_ends_when_the_save_is_through(tmp_path):
    SlowPlace.may_commit.clear()
    threading.Timer(0.3, SlowPlace.may_commit.set).start()
    with BackgroundSaver(SlowPlace(tmp_path)) as saver:
        saver.save(State(1, numbers(1)))
    assert (tmp_path / "step-00000001").is_dir()


def test_a_save_waits_for_the_one_before(tmp_path):
    with BackgroundSaver(LocalPlace(tmp_path)) as saver:
        for step in range(1, 6):
            saver.save(State(step, numbers(step)))
        saver.wait()
        assert [one.step for one in saver.outcomes()] == [1, 2, 3, 4, 5]
        assert saver.outcomes() == []


def test_a_failure_is_told_and_the_next_save_succeeds(tmp_path):
    (tmp_path / "step-00000001").write_text("")
    with BackgroundSaver(LocalPlace(tmp_path)) as saver:
        saver.save(State(1, numbers(1)))
        saver.save(State(2, numbers(2)))
        saver.wait()
        one, two = saver.outcomes()
    assert isinstance(one.error, CheckpointError)
    assert "Not a directory" in str(one.error)
    assert one.path is None
    assert two.path == tmp_path / "step-00000002"


def refused_on_one_rank(directory: Path) -> list[str]:
    rank = dist.get_rank()
    tensors = sharded(1, (2,))
    if rank == 1:
        tensors["model.uneven"].to_local().fill_(float("nan"))
    with BackgroundSaver(LocalPlace(directory)) as saver:
        saver.save(State(1, tensors))
        saver.wait()
        return [str(one.error) for one in saver.outcomes()]


def test_a_rank_that_fails_fails_all(ranks, tmp_path):
    for (message,) in ranks(2).run(refused_on_one_rank, tmp_path):
        assert message.startswith("rank 1: model.uneven is not saved.")
    assert not list(tmp_path.glob("step-*"))


class _Watched:
    """A file of which large writes are noted: (place in the file, address), in multiples of 4096 and rest."""

    def __init__(self, file: Any, seen: list[tuple[int, int]]) -> None:
        self.file, self.seen, self.position = file, seen, 0

    def write(self, data: memoryview) -> int:
        if len(data) >= LARGE_BYTES:
            self.seen.append((self.position % ALIGNMENT, address(data) % ALIGNMENT))
        self.position += len(data)
        return self.file.write(data)


@dataclass(frozen=True)
class _WatchedFiles(LocalFiles):
    seen: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def create(self, name: str):
        with super().create(name) as file:
            yield _Watched(file, self.seen)


@dataclass(frozen=True)
class _WatchedPlace(LocalPlace):
    seen: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, step: int, *, needed_bytes: int):
        return _WatchedFiles(super().begin(step, needed_bytes=needed_bytes).path, self.seen)


def large_writes(directory: Path) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (1,))
    shards = {f"model.{n}": torch.full((n, 513), 1.0) for n in (515, 3, 9001, 777)}
    state = State(1, {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in shards.items()})
    place = _WatchedPlace(directory)
    with BackgroundSaver(place) as saver:
        saver.save(state)
        saver.wait()
        assert [one.error for one in saver.outcomes()] == [None]
    return place.seen


def test_large_shards_are_written_from_where_they_were_copied_to(ranks, tmp_path):
    (seen,) = ranks(1).run(large_writes, tmp_path)
    assert seen == [(0, 0)] * 4  # three large shards, one of them of two blocks
