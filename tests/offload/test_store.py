"""A store returns the state that was streamed last; on a drive, with three groups in memory."""

import errno
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullshard.errors import OffloadError
from fullshard.offload.directories import DataFileRegion, RunRankIdentity
from fullshard.offload.drive import SYSTEM, DriveSystemCalls
from fullshard.offload.drive_store import GROUP_BUFFERS, DriveStore
from fullshard.offload.generations import GenerationFiles
from fullshard.offload.store import GroupLayout as GroupRecord
from fullshard.offload.store import GroupStore, HostMemoryStore, MasterAndMoments
from fullshard.planner.predict.offload import slot_bytes_at_update_start
from fullshard.spec.groups import OffloadGroup, ShardSizes, group_shards
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run

SIZES = [("a", 2500), ("b", 700), ("c", 1), ("d", 3100), ("e", 64), ("f", 1024), ("g", 900)]
GROUPS = group_shards(
    [ShardSizes(name, size, size, "float32") for name, size in SIZES], sub_group_parameters=1
)
FEW = {n: GROUPS[:n] for n in (0, 1, 2, 3)}
BF16 = torch.bfloat16


@contextmanager
def drive_store(
    directory: Path,
    groups: Sequence[OffloadGroup] = GROUPS,
    *,
    moments: torch.dtype | None = None,
    system: DriveSystemCalls = SYSTEM,
) -> Iterator[DriveStore]:
    records: list[DataFileRegion] = []
    end = 0
    for group in groups:
        size = GroupRecord(group, moments=moments).size_bytes
        records.append(DataFileRegion(name=str(group.index), offset_bytes=end, length_bytes=size))
        end += size
    identity = RunRankIdentity(run_id="run", rank=0, world_size=1, layout="ab" * 16)
    generations = GenerationFiles(
        directory / "rank", records, identity=identity, payload_bytes=4096, system=system
    )
    with closing(DriveStore(groups, generations, moments=moments, pinned=False)) as store:
        yield store


def content(group: OffloadGroup, parts: MasterAndMoments, *, time_: int) -> list[Tensor]:
    """Numbers that say of which group, part and pass they are."""
    return [
        (torch.arange(group.numel_with_gaps) % 97 + 100 * i + 10 * group.index + time_).to(one.dtype)
        for i, one in enumerate(parts)
    ]


def holds(group: OffloadGroup, parts: MasterAndMoments, *, time_: int | None) -> bool:
    """As `put` has left it; None: as it began."""
    expected = content(group, parts, time_=time_ or 0)
    return all(
        torch.equal(a, b if time_ else torch.zeros_like(b)) for a, b in zip(parts, expected, strict=True)
    )


def put(
    store: GroupStore,
    groups: Sequence[OffloadGroup] = GROUPS,
    *,
    time_: int,
    fresh: bool = False,
    before: int = 0,
) -> None:
    """A pass that finds what the one of `before` has left."""
    seen: list[OffloadGroup] = []
    for group, parts in store.stream_for_update(fresh=fresh):
        assert [one.shape for one in parts] == [(group.numel_with_gaps,)] * 3
        assert fresh or holds(group, parts, time_=before)
        seen.append(group)
        for one, new in zip(parts, content(group, parts, time_=time_), strict=True):
            one.copy_(new)
    assert seen == list(groups)


def put_and_settle(store: GroupStore, groups: Sequence[OffloadGroup], *, time_: int, before: int) -> None:
    put(store, groups, time_=time_, before=before)
    store.wait_for_writes()


def all_hold(store: GroupStore, *, time_: int, verify: bool = False) -> bool:
    return all([holds(group, parts, time_=time_) for group, parts in store.stream_read_only(verify=verify)])


# What is read


PASSES = st.lists(
    st.sampled_from(["stream", "stream", "fresh", "ahead", "look", "verified look", "whole", "commit"]),
    max_size=12,
)


def run(store: GroupStore, passes: Sequence[str]) -> None:
    """Streams, begins anew, reads ahead, looks at the groups or at one parameter, or commits."""
    put(store, time_=1, fresh=True)
    newest = 1
    for time_, kind in enumerate(passes, start=2):
        match kind:
            case "stream" | "fresh":
                put(store, time_=time_, fresh=kind == "fresh", before=newest)
                newest = time_
            case "ahead":
                store.prefetch_first_groups()
            case "commit":
                if isinstance(store, DriveStore):
                    store.commit_generation(time_, b"beside")
            case "whole":
                store.wait_for_writes()
                check_whole(store, time_=newest)
            case _:
                if kind == "verified look":
                    store.wait_for_writes()
                assert all_hold(store, time_=newest, verify=kind == "verified look")


def check_whole(store: GroupStore, *, time_: int) -> None:
    """Checks that each parameter is the pieces of its groups, in order."""
    assert store.read_parameter_state("nobody") is None
    for name, size in SIZES:
        found = store.read_parameter_state(name)
        assert found is not None
        for i, one in enumerate(found):
            assert one.shape == (size,)
            for group in GROUPS:
                numbers = content(group, found, time_=time_)[i]
                for own in (s for s in group.segments if s.name == name):
                    piece = one.cpu()[own.begin : own.end]
                    assert torch.equal(piece, numbers[own.offset : own.offset + own.numel])


@pytest.mark.parametrize("moments", [None, BF16])
@settings(max_examples=15)
@given(passes=PASSES)
def test_a_store_returns_the_state_streamed_last(moments: torch.dtype | None, passes: list[str]) -> None:
    run(HostMemoryStore(GROUPS, moments=moments, pinned=False), passes)
    with tempfile.TemporaryDirectory() as directory, drive_store(Path(directory), moments=moments) as store:
        run(store, passes)


def slow(name: str) -> DriveSystemCalls:
    """Calls with random delays, during which the memory that they move must not change."""
    rng = random.Random(0)

    def call(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(rng.random() * 0.004)
        return getattr(SYSTEM, name)(descriptor, buffers, offset)

    return replace(SYSTEM, **{name: call})


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_memory_of_a_transfer_is_not_overwritten(name: str, tmp_path: Path) -> None:
    with drive_store(tmp_path, system=slow(name)) as store:
        put(store, time_=1, fresh=True)
        for time_ in range(2, 8):
            put(store, time_=time_, before=time_ - 1)
            if time_ % 2:
                store.prefetch_first_groups()
        store.wait_for_writes()
        assert all_hold(store, time_=7, verify=True)


@pytest.mark.parametrize("n", FEW)
@pytest.mark.parametrize("where", ["memory", "drive"])
def test_fewer_groups_than_slots_go_through_as_well(n: int, where: str, tmp_path: Path) -> None:
    def check(store: GroupStore) -> None:
        put(store, FEW[n], time_=1, fresh=True)
        put(store, FEW[n], time_=2, before=1)
        put(store, FEW[n], time_=3, before=2)
        assert all_hold(store, time_=3)
        store.wait_for_writes()

    if where == "memory":
        check(HostMemoryStore(FEW[n], moments=None, pinned=False))
    else:
        with drive_store(tmp_path, FEW[n]) as store:
            check(store)
            store.commit_generation(7, b"x")


# What it takes


def test_a_drive_needs_the_memory_of_three_groups(tmp_path: Path) -> None:
    assert len(GROUPS) > 2 * GROUP_BUFFERS
    places: set[int] = set()
    with drive_store(tmp_path) as store:
        for fresh in (True, False, False):
            places |= {parts.master.data_ptr() for _, parts in store.stream_for_update(fresh=fresh)}
        places |= {parts.master.data_ptr() for _, parts in store.stream_read_only()}
        assert len(places) == GROUP_BUFFERS == 3


@dataclass
class Counted:
    """Bytes that have gone either way."""

    read_bytes: int = 0
    written_bytes: int = 0

    def system(self) -> DriveSystemCalls:
        return replace(SYSTEM, preadv=self._preadv, pwritev=self._pwritev)

    def _preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(descriptor, buffers, offset)
        self.read_bytes += count
        return count

    def _pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = os.pwritev(descriptor, buffers, offset)
        self.written_bytes += count
        return count


@pytest.mark.parametrize("count", [1, 3, 4, len(GROUPS)])
def test_the_first_groups_are_read_ahead(count: int, tmp_path: Path) -> None:
    """Three groups, less those that are still there; and what was read ahead is not read again."""
    groups = GROUPS[:count]
    sizes = [GroupRecord(group, moments=None).size_bytes for group in groups]
    ahead = [group.index for group in groups[:3] if group not in groups[-3:]]
    counted = Counted()
    with drive_store(tmp_path, groups, system=counted.system()) as store:
        put(store, groups, time_=1, fresh=True)
        store.commit_generation(1, b"")
        store.prefetch_first_groups()
        deadline = time.monotonic() + 120
        while counted.read_bytes < sum(sizes[index] for index in ahead) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert counted.read_bytes == sum(sizes[index] for index in ahead)
        put(store, groups, time_=2, before=1)
        store.wait_for_writes()
        assert counted.read_bytes == sum(sizes[index] for index in ahead) + sum(sizes[3:])


@pytest.mark.parametrize("count", range(1, len(GROUPS) + 1))
def test_steps_read_the_planned_bytes(count: int, tmp_path: Path) -> None:
    groups, counted = GROUPS[:count], Counted()
    plan = Plan.from_run(Run.load(overrides=["offload.tier=optimizer:nvme"]), world_size=2)
    sizes = [GroupRecord(group, moments=None).size_bytes for group in groups]
    with drive_store(tmp_path, groups, system=counted.system()) as store:
        put(store, groups, time_=1, fresh=True)
        for time_ in range(2, 6):
            store.commit_generation(time_, b"")
            store.prefetch_first_groups()
            put(store, groups, time_=time_, before=time_ - 1)
        store.wait_for_writes()
        assert counted.read_bytes == 4 * (sum(sizes) - slot_bytes_at_update_start(plan, sizes).kept)
        assert counted.written_bytes >= 5 * sum(sizes)


@pytest.mark.parametrize("verify", [False, True], ids=["an update", "a checkpoint"])
def test_an_error_of_a_read_ahead_is_raised_when_the_group_is_used(verify: bool, tmp_path: Path) -> None:
    """Though it could be read by then."""
    drive = Breaking("preadv")
    with drive_store(tmp_path, system=drive.system()) as store:
        put(store, time_=1, fresh=True)
        store.commit_generation(1, b"")
        drive.broken = True
        store.prefetch_first_groups()
        assert drive.refused.wait(120)
        drive.broken = False
        through = store.stream_read_only(verify=True) if verify else store.stream_for_update()
        with pytest.raises(OffloadError, match="cannot be read"):
            list(through)


# What fails


@dataclass
class Breaking:
    """A drive that fails from some moment on."""

    name: str
    broken: bool = False
    refused: threading.Event = field(default_factory=threading.Event)

    def system(self) -> DriveSystemCalls:
        return replace(SYSTEM, **{self.name: self._call})

    def _call(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.broken:
            self.refused.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return getattr(SYSTEM, self.name)(descriptor, buffers, offset)


@pytest.mark.parametrize("groups", [GROUPS, FEW[2]], ids=["many", "few"])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_failing_drive_raises_path_and_offset_and_keeps_the_last_generation(
    name: str, groups: Sequence[OffloadGroup], tmp_path: Path
) -> None:
    """By settle at the latest, and again; and what was whole before still is."""
    drive = Breaking(name)
    with drive_store(tmp_path, groups, system=drive.system()) as store:
        put(store, groups, time_=1, fresh=True)
        store.commit_generation(1, b"beside")
        if name == "preadv":
            (one,) = store.generations.list_complete_generations()
            store.swap_newest_slot(one.slot)  # nothing is in memory
        drive.broken = True
        with pytest.raises(OffloadError, match=r"(?s)state-\d\.data.*at offset \d+"):
            put_and_settle(store, groups, time_=2, before=1)
        drive.broken = False
    with drive_store(tmp_path, groups) as store:
        (one,) = store.generations.list_complete_generations()
        assert (one.step, store.generations.read_generation_payload(one)) == (1, b"beside")
        store.swap_newest_slot(one.slot)
        assert all_hold(store, time_=1, verify=True)


@pytest.mark.parametrize("after", [0, 1, 3, 5])
def test_a_look_may_be_left_early(after: int, tmp_path: Path) -> None:
    with drive_store(tmp_path) as store:
        put(store, time_=1, fresh=True)
        look = store.stream_read_only()
        for _ in range(after):
            next(look)
        look.close()
        put(store, time_=2, before=1)
        assert all_hold(store, time_=2)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_pass_that_was_left_early_leaves_the_last_whole_state(after: int, tmp_path: Path) -> None:
    with drive_store(tmp_path) as store:
        put(store, time_=1, fresh=True)
        store.commit_generation(1, b"")
        stream = store.stream_for_update()
        for _ in range(after):
            next(stream)[1].master.fill_(-1)
        stream.close()
        store.wait_for_writes()
        (one,) = store.generations.list_complete_generations()
        store.swap_newest_slot(one.slot)
        assert all_hold(store, time_=1, verify=True)
        put(store, time_=2, before=1)
        store.commit_generation(2, b"")
        assert [one.step for one in store.generations.list_complete_generations()] == [2, 1]


# Generations


def test_only_committed_passes_are_resumed(tmp_path: Path) -> None:
    with drive_store(tmp_path) as store:
        put(store, time_=1, fresh=True)
        put(store, time_=2, before=1)
        store.commit_generation(10, b"ten")
        put(store, time_=3, before=2)
        store.commit_generation(11, b"eleven")
        store.commit_generation(11, b"nothing new")
        put(store, time_=4, before=3)
    with drive_store(tmp_path) as store:
        (one,) = store.generations.list_complete_generations()
        assert (one.step, store.generations.read_generation_payload(one)) == (11, b"eleven")
        store.swap_newest_slot(one.slot)
        put(store, time_=5, before=3)


def test_going_back_to_an_earlier_step_drops_the_later_ones(tmp_path: Path) -> None:
    with drive_store(tmp_path) as store:
        for step in (1, 2, 9):
            put(store, time_=step, fresh=True)
            store.commit_generation(step, b"old")
        put(store, time_=3, fresh=True)  # another state is loaded
        store.commit_generation(3, b"new")
        put(store, time_=4, before=3)
        store.commit_generation(4, b"new")
        found = [
            (one.step, store.generations.read_generation_payload(one))
            for one in store.generations.list_complete_generations()
        ]
        assert found == [(4, b"new"), (3, b"new")]


def test_state_of_an_interrupted_load_is_refused(tmp_path: Path) -> None:
    with drive_store(tmp_path) as store:
        put(store, time_=1, fresh=True)
        stream = store.stream_for_update(fresh=True)
        next(stream)
        stream.close()
        found = store.read_parameter_state("a")
        assert found is not None
        with pytest.raises(OffloadError, match="there is no optimizer state on the drive"):
            found.master.cpu()
        put(store, time_=2, fresh=True)
        check_whole(store, time_=2)
