"""A save in the background holds the state of the moment it was asked for, and its failure is told."""

import threading
import time
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
from fullshard.checkpoint.load import load
from fullshard.checkpoint.location import LocalLocation
from fullshard.checkpoint.save import save
from fullshard.errors import CheckpointError
from fullshard.system.direct_io import ALIGNMENT, LARGE_BYTES, memory_address
from tests.checkpoint.states import State, assert_same, loaded, loaded_sharded, numbers, ones_own, sharded


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
    """Waits to be let go on before it commits."""

    may_commit = threading.Event()

    @contextmanager
    def lock_for_writing(self):
        self.may_commit.wait(120)
        with super().lock_for_writing():
            yield


def save_and_go_on(directory: Path, mesh_shape: tuple[int, ...]) -> list[Any]:
    """Two saves, with updates right after each; the second copies into the buffers of the first."""
    seen: list[Any] = []
    with BackgroundSaver(LocalLocation(directory)) as saver:
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
    with BackgroundSaver(LocalLocation(tmp_path)) as saver:
        for step in range(1, 6):
            saver.save(State(step, numbers(step)))
        saver.wait()
        assert [one.step for one in saver.outcomes()] == [1, 2, 3, 4, 5]
        assert saver.outcomes() == []


def test_a_failure_is_told_and_the_next_save_succeeds(tmp_path):
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


class _Watched:
    """A file of which large writes are told, with where they lie in memory, before they are made."""

    def __init__(self, file: Any, tell: Callable[[int], None]) -> None:
        self.file, self.tell = file, tell

    def write(self, data: memoryview) -> int:
        if len(data) >= LARGE_BYTES:
            self.tell(memory_address(data))
        return self.file.write(data)


@dataclass(frozen=True)
class _WatchedFiles(LocalFiles):
    tell: Callable[[int], None] = id

    @contextmanager
    def create_file(self, name: str):
        with super().create_file(name) as file:
            yield _Watched(file, self.tell)


@dataclass(frozen=True)
class _WatchedPlace(LocalLocation):
    tell: Callable[[int], None] = id

    def create_draft(self, step: int, *, needed_bytes: int):
        return _WatchedFiles(super().create_draft(step, needed_bytes=needed_bytes).path, tell=self.tell)


def large(step: int) -> Training:
    """Four large shards, of which one takes two writes."""
    mesh = init_device_mesh("cpu", (1,))
    whole = {f"model.{n}": torch.full((n, 513), float(step)) for n in (515, 777, 600, 9001)}
    return Training(step, {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items()})


def places(state: Training) -> set[int]:
    return {tensor.to_local().data_ptr() for tensor in state.held.values()}


def save_well_before_an_update(saver: BackgroundSaver, state: Training) -> None:
    """Half as long again as the save takes passes before it may come."""
    began = time.perf_counter()
    saver.save(state)
    while not saver.is_idle:
        time.sleep(0.01)
    time.sleep((time.perf_counter() - began) / 2)


def writes(directory: Path) -> list[tuple[int, int, int]]:
    """How many of the large writes of each save come from the state itself, of how many, and bytes of copies:
    of two saves that are through when the update comes, and of two whose updates come at once."""
    seen: list[int] = []
    found: list[tuple[int, int, int]] = []
    with BackgroundSaver(_WatchedPlace(directory, tell=seen.append)) as saver:
        for step, patient in enumerate((True, True, False, False), 1):
            state, before = large(step), seen.clear()
            assert before is None
            (save_well_before_an_update if patient else BackgroundSaver.save)(saver, state)
            own = places(state)
            state.update()
            saver.wait()
            found.append((len(own & set(seen)), len(seen), saver.staged_bytes))
        assert [one.error for one in saver.outcomes()] == [None] * 4
    return found


def test_a_save_is_written_from_the_state_where_the_one_before_was_ahead_of_the_update(ranks, tmp_path):
    ((first, second, third, fourth),) = ranks(1).run(writes, tmp_path)
    assert first[:2] == (0, 5)
    assert second[:2] == (4, 5)  # the fifth is the second of a shard
    assert third[1] == 5
    assert fourth[:2] == (0, 5)  # the third was not ahead any more
    assert first[2] == second[2] == third[2] == fourth[2]  # and no memory but the first one's was taken


class _Course:
    """Of the writing in this process; a place names it, and cannot hold it, for places are sent to ranks."""

    seen: list[int] = []
    wanted = 0
    reached = threading.Event()

    @classmethod
    def tell(cls, where: int) -> None:
        cls.seen.append(where)
        if len(cls.seen) == cls.wanted:
            cls.reached.set()
            time.sleep(0.1)  # for the update to come, if it does not wait


def updated_within(directory: Path, number: int) -> None:
    """Saves twice; the second one's update comes while its large write `number` is on its way."""
    _Course.wanted = 5 + number
    _Course.seen.clear()
    _Course.reached.clear()
    with BackgroundSaver(_WatchedPlace(directory, tell=_Course.tell)) as saver:
        first, second = large(1), large(2)
        save_well_before_an_update(saver, first)
        first.update()
        saver.save(second)
        assert _Course.reached.wait(120)
        own = places(second)
        second.update()
        saver.wait()
        assert [one.error for one in saver.outcomes()] == [None, None]
        in_place = len(own & set(_Course.seen[5:]))
        assert min(number, 4) <= in_place <= 4  # more where the update came late


@pytest.mark.parametrize("number", [1, 2, 5])
def test_an_update_amid_the_writing_changes_nothing_of_it(ranks, tmp_path, number):
    ranks(1).run(updated_within, tmp_path, number)
    for step in (1, 2):
        found = State(0, {f"model.{n}": torch.zeros(n, 513) for n in (515, 777, 600, 9001)})
        load(found, tmp_path / f"step-0000000{step}")
        assert_same(found.held, {name: torch.full_like(one, step) for name, one in found.held.items()})


def large_writes(directory: Path) -> list[int]:
    seen: list[int] = []
    state = large(1)
    with BackgroundSaver(_WatchedPlace(directory, tell=seen.append)) as saver:
        saver.save(State(1, state.held))
        saver.wait()
        assert [one.error for one in saver.outcomes()] == [None]
    return [where % ALIGNMENT for where in seen]


def test_large_shards_are_written_from_where_they_were_copied_to(ranks, tmp_path):
    (seen,) = ranks(1).run(large_writes, tmp_path)
    assert seen == [0] * 5  # four large shards, one of them of two blocks
