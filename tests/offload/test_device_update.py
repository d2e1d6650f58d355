"""State that passes through the device's memory: updated as on the host, in whatever order lanes allow."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fullshard.offload.adamw import (
    DeviceUpdater,
    DeviceUpdateStreams,
    GroupPieceOnDevice,
    StreamingAdamW,
    iterate_group_pieces,
)
from fullshard.offload.store import HostMemoryStore
from fullshard.spec.groups import CUT_ELEMENTS, ShardSizes, copy_chunk_elements, group_shards
from tests.offload.test_adamw import (
    BF16,
    OPTIONS,
    give_gradients,
    groups_of,
    parameters_of,
    reference,
    same_as,
    streaming,
)

CPU = torch.device("cpu")


@dataclass
class Pending:
    """An act that was put, and what must be done before it."""

    act: Callable[[], None]
    before: list["Pending"]
    done: bool = False

    @property
    def is_free(self) -> bool:
        return not self.done and all(one.done for one in self.before)


@dataclass
class Device:
    """Does what was put on its lanes once the host waits: in any order that lanes and events allow, and all
    of it, since the host's work may be as late as it likes."""

    seed: int
    put: list[Pending] = field(default_factory=list[Pending])

    def settle(self) -> None:
        chance = random.Random(self.seed)
        while free := [one for one in self.put if one.is_free]:
            chosen = chance.choice(free)
            chosen.act()
            chosen.done = True
        assert all(one.done for one in self.put)
        self.put.clear()


@dataclass
class LateLane:
    device: Device
    last: list[Pending] = field(default_factory=list[Pending])
    memory: list[Tensor] = field(default_factory=list[Tensor])

    def enqueue(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        pending = Pending(act, [*self.last, *after])
        self.last = [pending]
        self.device.put.append(pending)
        return pending

    def make_memory_usable_in_stream(self, memory: Tensor) -> None:
        self.memory.append(memory)

    def synchronize(self) -> None:
        self.device.settle()


def late_lanes(seed: int) -> DeviceUpdateStreams:
    device = Device(seed)
    return DeviceUpdateStreams(LateLane(device), LateLane(device), LateLane(device))


def passing(
    parameters: dict[str, nn.Parameter],
    *,
    sub_group_parameters: int,
    moments: torch.dtype | None = None,
    seed: int = 0,
    order: int = 0,
) -> StreamingAdamW:
    """`streaming`, of which state passes through a device that is late. `order`: of what it does."""
    plain = streaming(parameters, moments=moments, sub_group_parameters=sub_group_parameters)
    through = DeviceUpdater(plain.offloaded.groups, device=CPU, moments=moments, streams=late_lanes(order))
    return StreamingAdamW(
        groups_of(parameters),
        plain.offloaded,
        gradients=plain.gradients,
        defaults=OPTIONS,
        seed=seed,
        on_device=through,
    )


@pytest.mark.parametrize("sub_group_parameters", [1, 2048, 10**6])
@pytest.mark.parametrize("order", range(3))
def test_the_update_on_the_device_is_torchs_bit_for_bit(sub_group_parameters: int, order: int) -> None:
    """With groups of other options, gradients that are scaled, and parameters without a gradient."""
    ours, theirs = parameters_of(0), parameters_of(0)
    streamed = passing(ours, sub_group_parameters=sub_group_parameters, order=order)
    other = reference(theirs)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        factor = 0.37 if step % 2 else 1.0
        if factor != 1.0:
            streamed.gradient_factor = factor
        other.grad_scale = torch.tensor(1 / factor)  # by which torch's fused kernel divides
        streamed.step()
        other.step()
        assert same_as(streamed, other)


@pytest.mark.parametrize("masters", [torch.float32, BF16])
def test_stochastic_rounding_is_that_of_the_host_without_cut_pieces(masters: torch.dtype) -> None:
    """Groups of one piece each, which begin where the host's do."""
    ours, others = parameters_of(0, masters), parameters_of(0, masters)
    streams = [
        streaming(ours, moments=BF16, sub_group_parameters=1, seed=7),
        passing(others, moments=BF16, sub_group_parameters=1, seed=7),
    ]
    for step in range(4):
        for parameters, optimizer in zip((ours, others), streams, strict=True):
            give_gradients(parameters, step)
            optimizer.step()
        for name in ours:
            one, other = (optimizer.offloaded.parameter_state_tensors(name) for optimizer in streams)
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_pieces_of_a_parameter_are_rounded_by_different_bits() -> None:
    parameter = nn.Parameter(torch.zeros(3 * CUT_ELEMENTS))
    optimizer = passing({"a": parameter}, moments=BF16, sub_group_parameters=10**6)
    parameter.grad = torch.full((3 * CUT_ELEMENTS,), 0.1)
    optimizer.step()
    first, second, third = optimizer.offloaded.parameter_state_tensors("a")["exp_avg_sq"].view(3, -1)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


# How groups are cut, and what is kept


HELD = st.lists(st.integers(1, 6000), min_size=1, max_size=6)


@given(HELD, st.sampled_from([1, 4096, 20_000]), st.sampled_from([1024, 2048]))
@settings(max_examples=60)
def test_pieces_have_every_element_once_at_its_place(
    sizes: list[int], sub_group_parameters: int, elements: int
) -> None:
    held = [ShardSizes(str(i), size, size, "float32") for i, size in enumerate(sizes)]
    for group in group_shards(held, sub_group_parameters=sub_group_parameters):
        found = {one.name: list[tuple[int, int]]() for one in group.segments}
        offsets = {one.name: one.offset - one.begin for one in group.segments}
        for begin, piece in iterate_group_pieces(group, elements):
            assert begin % CUT_ELEMENTS == 0
            assert 0 < piece.numel_with_gaps <= elements
            for one in piece.segments:
                assert begin + one.offset == offsets[one.name] + one.begin
                found[one.name] += [(one.begin, one.end)]
        for one in group.segments:
            begins, ends = zip(*found[one.name], strict=True)
            assert (begins[0], ends[-1]) == (one.begin, one.end)
            assert begins[1:] == ends[:-1]


def test_two_buffers_hold_a_piece_each_of_state_and_gradients() -> None:
    """16 bytes an element of fp32, 12 with moments in bf16; every lane knows of both."""
    groups = group_shards([ShardSizes("a", 10**6, 10**6, "float32")], sub_group_parameters=10**6)
    for moments, itemsize in ((None, 16), (BF16, 12)):
        device = Device(0)
        lanes = [LateLane(device) for _ in DeviceUpdateStreams._fields]
        through = DeviceUpdater(groups, device=CPU, moments=moments, streams=DeviceUpdateStreams(*lanes))
        assert sum(one.nbytes for one in through.buffers) == 2 * itemsize * copy_chunk_elements(groups)
        assert all(lane.memory == through.buffers for lane in lanes)
    assert copy_chunk_elements(groups) == 61 * CUT_ELEMENTS


def test_pieces_without_a_gradient_are_not_copied() -> None:
    groups = group_shards(
        [ShardSizes(name, 2048, 2048, "float32") for name in "ab"], sub_group_parameters=4096
    )
    store, seen = HostMemoryStore(groups, moments=None, pinned=False), list[str]()
    through = DeviceUpdater(groups, device=CPU, moments=None)

    def change(piece: GroupPieceOnDevice) -> None:
        seen.extend(piece.group.names)
        piece.state.master.copy_(piece.gradient)

    for group, parts in store.stream_for_update():
        through.update_group(group, parts, gradients={"b": torch.ones(2048)}, change=change)
    assert seen == ["b", "b"]
    whole = [store.read_parameter_state(name) for name in "ab"]
    assert [one is not None and one.master.unique().tolist() for one in whole] == [[0.0], [1.0]]


class Full(LateLane):
    """Has no room for the third piece's change."""

    def enqueue(self, act: Callable[[], None], *, after: Sequence[Any]) -> Any:
        if len(self.device.put) == 7:
            raise MemoryError("no room")
        return super().enqueue(act, after=after)


def test_an_error_is_raised_after_the_lanes_are_idle() -> None:
    """Else copies would write into memory that is used again."""
    device = Device(0)
    groups = group_shards([ShardSizes("a", 8192, 8192, "float32")], sub_group_parameters=8192)
    store = HostMemoryStore(groups, moments=None, pinned=False)
    lanes = DeviceUpdateStreams(LateLane(device), Full(device), LateLane(device))
    through = DeviceUpdater(groups, device=CPU, moments=None, streams=lanes)
    for group, parts in store.stream_for_update():
        with pytest.raises(MemoryError):
            through.update_group(group, parts, gradients={"a": torch.ones(8192)}, change=lambda _: None)
    assert not device.put
