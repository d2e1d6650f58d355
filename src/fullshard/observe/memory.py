"""Measures the peak of live tensor bytes while a block of code runs, and the parts of that peak.

On CUDA, the figures are the allocator's own statistics. On the CPU, they are every allocation and release of
torch's CPU allocator, from the profiler's memory events (`profile_memory=True`), accumulated over time on top
of the tensors that existed before. Threads that inherit torch's state (autograd's, gloo's) are included.
Memory outside tensors (Python, thread stacks, a library's own buffers) is not.
"""

import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from fullshard.distributed.tensors import local_tensor
from fullshard.spec.records.measurement import MemoryParts
from fullshard.torch_private.fake_tensors import is_traceable_wrapper_subclass
from fullshard.torch_private.tensors import profile_event_tree

# Prefixes of FSDP2's ranges in the profiler's trace. What it casts does not count as its own: activations,
# and whole gradients that wait for the last microbatch.
_ENGINE = "FSDP::"
_ENGINE_CASTS = ("FSDP::cast_", "FSDP::post_backward_accumulate", "FSDP::post_backward_reshard")
_STEP = "fullshard::optimizer_step"


@dataclass
class PeakMemory:
    """Peak memory and its parts. `measure_peak_memory` sets the fields when its context ends."""

    bytes: int = 0  # of live tensors
    active_bytes: int = 0  # on CUDA, also of freed blocks that another stream may still read; 0 on the CPU
    reserved_bytes: int = 0  # on CUDA, device memory that the process reserves; 0 on the CPU
    parts: MemoryParts | None = None  # of `bytes`, if a model was given


def storage_bytes_by_part(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, device: torch.device
) -> dict[str, int]:
    """Returns the bytes of parameters, gradients, optimizer state and buffers that are on `device` now."""
    parts = _ModelAndOptimizerStorages(model, optimizer, device=device).storages_by_part()
    names = ("parameter_shards", "gradients", "optimizer_state", "buffers")
    return {name: sum(part.values()) for name, part in zip(names, parts, strict=True)}


def storage_bytes_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of `tensors`, each counted once; for a DTensor, of its local part."""
    return sum(_storage_bytes_by_address(tensors).values())


@contextmanager
def measure_peak_memory(
    device: torch.device, *, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Generator[PeakMemory]:
    """Measures the peak memory of the context's block, which runs one or more steps. Yields the result.

    model, optimizer: their tensors exist before the block, and are parts of the peak

    On the CPU, gradients must be cleared when the block starts, because the release of a tensor that is older
    than the measurement is not recorded.
    """
    peak = PeakMemory()
    holdings = _ModelAndOptimizerStorages(model, optimizer, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        with holdings.record_gradients_before_steps():
            yield peak
        _read_cuda_peak(peak, device, holdings=holdings)
        return
    held = {address: size for part in holdings.storages_by_part() for address, size in part.items()}
    # Kineto prints each start on stderr. It reads this variable once, before the first start in a process.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with (
        holdings.record_gradients_before_steps(),
        profile(use_cpu=True, use_kineto=True, profile_memory=True) as profiler,
    ):
        yield peak
    assert profiler is not None, "it is enabled"
    timeline = _AllocationTimeline.from_profiler(profiler)
    live = timeline.blocks_live_at_peak(held)
    peak.bytes = sum(block.size for block in live.values())
    if model is not None:
        peak.parts = holdings.split_peak(live, timeline)


@dataclass(frozen=True)
class _LiveMemoryBlock:
    """A block of memory: its bytes, whether FSDP2 made it, and the index of that event (-1: older)."""

    size: int
    engine: bool
    birth: int


@dataclass(frozen=True)
class _AllocationTimeline:
    """Allocations and releases of a profile, in order.

    events: (address, bytes, whether FSDP2 made it); the bytes are negative for a release
    steps: number of events before each of the optimizer's steps
    """

    events: list[tuple[int, int, bool]]
    steps: list[int]

    @classmethod
    def from_profiler(cls, profiler: profile) -> "_AllocationTimeline":
        """Reads the memory events and the optimizer's steps of a profile."""
        events: list[tuple[int, int, int, bool]] = []
        steps: list[int] = []
        # Iterative depth-first search: a backward pass nests deeper than Python's recursion limit.
        roots = profile_event_tree(profiler)
        stack: list[tuple[Any, bool]] = [(event, False) for event in roots]
        while stack:
            event, engine = stack.pop()
            fields = event.extra_fields
            if type(fields).__name__ == "_ExtraFields_Allocation":
                if fields.device.type == "cpu":
                    events.append((event.start_time_ns, fields.ptr, fields.alloc_size, engine))
                continue
            if event.name == _STEP:
                steps.append(event.start_time_ns)
            if event.name.startswith(_ENGINE):
                engine = not event.name.startswith(_ENGINE_CASTS)
            stack += [(child, engine) for child in event.children]
        events.sort(key=lambda one: one[0])
        counts = sorted(sum(event[0] < step for event in events) for step in steps)
        return cls([one[1:] for one in events], counts)

    def blocks_live_at_peak(self, held: Mapping[int, int]) -> dict[int, _LiveMemoryBlock]:
        """Returns address -> block at the first moment of the peak. `held`: address -> bytes at the start."""
        changes = list(self._apply_events_and_yield_changes({}))
        totals = list(itertools.accumulate(changes, initial=0))
        live = {pointer: _LiveMemoryBlock(size, engine=False, birth=-1) for pointer, size in held.items()}
        for _ in itertools.islice(self._apply_events_and_yield_changes(live), totals.index(max(totals))):
            pass
        return live

    def _apply_events_and_yield_changes(self, live: dict[int, _LiveMemoryBlock]) -> Iterator[int]:
        """Applies the events to `live`, one by one, and yields the bytes by which each changes the total."""
        for index, (pointer, size, engine) in enumerate(self.events):
            # An address that is allocated again was released before, even if unseen: on another thread.
            old = live.pop(pointer, None)
            change = -old.size if old is not None else 0
            if size > 0:
                live[pointer] = _LiveMemoryBlock(size, engine, birth=index)
                change += size
            yield change

    def last_allocating_events(self, pointers: Iterable[int], *, before: int | None = None) -> set[int]:
        """Returns indices, below `before`, of the events that last allocated these addresses; -1: older."""
        last = {event[0]: i for i, event in enumerate(self.events[:before]) if event[1] > 0}
        return {last.get(pointer, -1) for pointer in pointers}


class _ModelAndOptimizerStorages:
    """The storages that a model and its optimizer keep in the memory of `device`, as address -> bytes."""

    def __init__(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, *, device: torch.device
    ) -> None:
        self._device_type = device.type
        self.model = nn.Module() if model is None else model
        self.optimizer = optimizer
        self._noted: list[dict[int, int]] = []  # gradients at each optimizer step

    def storages_by_part(self) -> list[dict[int, int]]:
        """Returns the storages of [parameters, gradients, optimizer state, buffers]."""
        # An optimizer with offloaded masters has copies of the shards for FSDP2 to gather.
        copies: Iterable[Tensor] = getattr(self.optimizer, "device_shard_copies", ())
        # The part of an offloaded state that currently streams through device memory.
        passing: Iterable[Tensor] = getattr(self.optimizer, "device_buffers", ())
        states = self.optimizer.state.values() if self.optimizer is not None else []
        own = (t for state in states for t in state.values() if isinstance(t, Tensor))
        parameters = self._bytes_by_address([*self.model.parameters(), *copies])
        state = self._bytes_by_address([*own, *passing])
        buffers = self._bytes_by_address(self.model.buffers())
        return [parameters, self.gradient_storage_bytes(), state, buffers]

    def gradient_storage_bytes(self) -> dict[int, int]:
        return self._bytes_by_address(p.grad for p in self.model.parameters() if p.grad is not None)

    def _bytes_by_address(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        return _storage_bytes_by_address(one for one in tensors if one.device.type == self._device_type)

    @contextmanager
    def record_gradients_before_steps(self) -> Generator[None]:
        """Records the gradients before each optimizer step in this context, because the step clears them."""
        if self.optimizer is None:
            yield
            return

        def record_gradients(*_arguments: object) -> None:
            with torch.profiler.record_function(_STEP):
                self._noted.append(self.gradient_storage_bytes())

        handle = self.optimizer.register_step_pre_hook(record_gradients)
        try:
            yield
        finally:
            handle.remove()

    def split_peak(self, live: Mapping[int, _LiveMemoryBlock], timeline: _AllocationTimeline) -> MemoryParts:
        """Returns the bytes of each part of the peak. Assigns `live` blocks by their allocating events."""
        parameters, own_gradients, state, buffers = self.storages_by_part()
        gradients = timeline.last_allocating_events(own_gradients)
        for noted, step in zip(self._noted, timeline.steps, strict=True):
            gradients |= timeline.last_allocating_events(noted, before=step)

        def addresses_live_at_peak(storages: Mapping[int, int]) -> set[int]:
            births = timeline.last_allocating_events(storages)
            return {pointer for pointer in storages if pointer in live and live[pointer].birth in births}

        sets = [
            addresses_live_at_peak(parameters),
            addresses_live_at_peak(own_gradients)
            | {p for p, block in live.items() if block.birth in gradients and block.birth >= 0},
            addresses_live_at_peak(state),
            addresses_live_at_peak(buffers),
        ]
        known = set[int]().union(*sets)
        engine = {pointer for pointer, block in live.items() if block.engine} - known
        rest = live.keys() - known - engine
        parts = zip(MemoryParts.model_fields, (*sets, engine, rest), strict=True)
        return MemoryParts(**{name: sum(live[pointer].size for pointer in part) for name, part in parts})

    def total_bytes_by_part(self) -> list[int]:
        """Returns the bytes of [parameters, gradients before the last step, optimizer state, buffers]."""
        parameters, gradients, state, buffers = self.storages_by_part()
        gradients = gradients or (self._noted[-1] if self._noted else {})
        return [sum(storages.values()) for storages in (parameters, gradients, state, buffers)]


def _read_cuda_peak(peak: PeakMemory, device: torch.device, *, holdings: _ModelAndOptimizerStorages) -> None:
    stats = torch.cuda.memory_stats(device)
    peak.bytes = stats["allocated_bytes.all.peak"]
    peak.active_bytes = stats["active_bytes.all.peak"]
    peak.reserved_bytes = stats["reserved_bytes.all.peak"]
    # The allocator does not report what was alive at the peak, so all gradients are assumed to be.
    sizes = holdings.total_bytes_by_part()
    values = [*sizes, 0, max(0, peak.bytes - sum(sizes))]
    peak.parts = MemoryParts(**dict(zip(MemoryParts.model_fields, values, strict=True)))


def _tensors_holding_data(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the data: codes and scales if it is quantised, else the local part."""
    local = local_tensor(tensor)
    if not is_traceable_wrapper_subclass(local):
        return [local]
    return [getattr(local, name) for name in cast(Any, local).__tensor_flatten__()[0]]


def _storage_bytes_by_address(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns address -> bytes of the tensors' storages, without those that have no data (meta, freed)."""
    sizes: dict[int, int] = {}
    for tensor in itertools.chain.from_iterable(map(_tensors_holding_data, tensors)):
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes
