"""Measures memory: the figures of this process after each step, and the peak of live tensor bytes in a block.

On CUDA, the figures are those of torch's allocator, which the host keeps: reading them does not wait for the
device. On the CPU, the peak follows from every allocation and release of torch's CPU allocator, from the
profiler's memory events (`profile_memory=True`), accumulated over time on top of the tensors that existed
before. Threads that inherit torch's state (autograd's, gloo's) are included. Memory outside tensors (Python,
thread stacks, a library's own buffers) is not.
"""

import itertools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from fullshard.distributed.tensors import tensors_with_data
from fullshard.spec.records.measurement import MemoryParts
from fullshard.torch_private.tensors import profile_event_tree

Storages: TypeAlias = dict[int, int]
"""Address of a storage -> its bytes."""

# Prefixes of FSDP2's ranges in the profiler's trace. What it casts does not count as its own: activations,
# and whole gradients that wait for the last microbatch.
_ENGINE = "FSDP::"
_ENGINE_CASTS = ("FSDP::cast_", "FSDP::post_backward_accumulate", "FSDP::post_backward_reshard")
_STEP = "fullshard::optimizer_step"


def read_memory_and_reset_peaks(device: torch.device) -> dict[str, float]:
    """Returns the memory of this process after a step, as figures by name. On CUDA, resets the peaks.

    resident_bytes: resident memory of the process; the only figure on the CPU
    allocated_bytes, reserved_bytes: live tensors on the device, and device memory that the allocator reserves
    peak_allocated_bytes, peak_reserved_bytes: their highest values since the previous reading
    allocator_retries: number of times since the start that the allocator freed its cache to serve a request
    fragmentation: fraction of the reserved memory that is free, in blocks split off from blocks in use
    """
    figures: dict[str, float] = {}
    with suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        figures["resident_bytes"] = int(pages) * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        figures |= allocator_figures(torch.cuda.memory_stats_as_nested_dict(device))
        torch.cuda.reset_peak_memory_stats(device)
    return figures


def allocator_figures(stats: Any) -> dict[str, float]:
    """Returns the figures of torch.cuda.memory_stats_as_nested_dict; zeros before the first allocation."""

    def figure(name: str, kind: str) -> int:
        return stats.get(name, {}).get("all", {}).get(kind, 0)

    reserved = figure("reserved_bytes", "current")
    return {
        "allocated_bytes": figure("allocated_bytes", "current"),
        "reserved_bytes": reserved,
        "peak_allocated_bytes": figure("allocated_bytes", "peak"),
        "peak_reserved_bytes": figure("reserved_bytes", "peak"),
        "allocator_retries": stats.get("num_alloc_retries", 0),
        "fragmentation": figure("inactive_split_bytes", "current") / reserved if reserved else 0.0,
    }


MEMORY_FIGURES = ("resident_bytes", *allocator_figures({}))


def read_live_bytes(device: torch.device) -> int:
    """Returns the bytes of live tensors on a GPU; on the CPU, the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(read_memory_and_reset_peaks(device).get("resident_bytes", 0))


@dataclass
class PeakMemory:
    """Peak memory and its parts. `measure_peak_memory` sets the fields when its context ends."""

    bytes: int = 0  # of live tensors
    reserved_bytes: int = 0  # on CUDA, device memory that the process reserves; 0 on the CPU
    parts: MemoryParts | None = None  # of `bytes`; None on the CPU if no model was given


def storages_by_part(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    device: torch.device,
    averages: Iterable[Tensor] = (),
) -> dict[str, Storages]:
    """Returns the storages of parameters, gradients, optimizer state and buffers that are on `device` now."""
    states = optimizer.state.values() if optimizer is not None else []
    own = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    # An optimizer with offloaded masters has copies of the shards for FSDP2 to gather, and buffers through
    # which the offloaded state streams.
    copies: Iterable[Tensor] = getattr(optimizer, "device_shard_copies", ())
    passing: Iterable[Tensor] = getattr(optimizer, "device_buffers", ())
    tensors = {
        "parameter_shards": [*(p for p in model.parameters() if p.requires_grad), *copies],
        "frozen_shards": (p for p in model.parameters() if not p.requires_grad),
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer_state": [*own, *passing],
        "parameter_averages": averages,
        "buffers": model.buffers(),
    }
    return {
        part: _storage_bytes_by_address(one for one in tensors[part] if one.device.type == device.type)
        for part in tensors
    }


def storage_bytes_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of `tensors`, each counted once; for a DTensor, of its local part."""
    return sum(_storage_bytes_by_address(tensors).values())


@contextmanager
def measure_peak_memory(
    device: torch.device,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    averages: Sequence[Tensor] = (),
) -> Generator[PeakMemory]:
    """Measures the peak memory of the context's block, which runs one or more steps. Yields the result.

    model, optimizer, averages: their tensors exist before the block, and are parts of the peak

    On the CPU, gradients must be cleared when the block starts, because the release of a tensor that is older
    than the measurement is not recorded.
    """
    peak, kept = PeakMemory(), nn.Module() if model is None else model
    read_storages = partial(storages_by_part, kept, optimizer, device=device, averages=averages)
    gradients: list[Storages] = []  # before each step, which clears them

    def record_gradients(*_arguments: object) -> None:
        with torch.profiler.record_function(_STEP):
            gradients.append(read_storages()["gradients"])

    with ExitStack() as stack:
        if optimizer is not None:
            stack.callback(optimizer.register_step_pre_hook(record_gradients).remove)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            yield peak
            _fill_in_cuda_peak(peak, device, storages=read_storages(), gradients=gradients)
            return
        older = {address: size for part in read_storages().values() for address, size in part.items()}
        # Kineto prints each start on stderr, unless this variable is set before the first one of a process.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        profiler = stack.enter_context(profile(use_cpu=True, use_kineto=True, profile_memory=True))
        yield peak
        stack.close()
        assert profiler is not None, "it is enabled"
        timeline = _AllocationTimeline.from_profiler(profiler)
        live = timeline.blocks_live_at_peak(older)
        peak.bytes = sum(block.size for block in live.values())
        if model is not None:
            peak.parts = _split_peak(live, timeline, storages=read_storages(), gradients=gradients)


class _LiveMemoryBlock(NamedTuple):
    """A block of memory: its bytes, whether FSDP2 made it, and the index of its allocation (-1: older)."""

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
        events: list[tuple[int, int, int, bool]] = []
        steps: list[int] = []
        # Iterative depth-first search: a backward pass nests deeper than Python's recursion limit.
        stack: list[tuple[Any, bool]] = [(event, False) for event in profile_event_tree(profiler)]
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

    def blocks_live_at_peak(self, older: Storages) -> dict[int, _LiveMemoryBlock]:
        """Returns address -> block at the first moment of the peak. `older`: storages at the start."""
        changes = list(self._apply_events_and_yield_changes({}))
        totals = list(itertools.accumulate(changes, initial=0))
        live = {pointer: _LiveMemoryBlock(size, engine=False, birth=-1) for pointer, size in older.items()}
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


def _split_peak(
    live: Mapping[int, _LiveMemoryBlock],
    timeline: _AllocationTimeline,
    *,
    storages: Mapping[str, Storages],
    gradients: Iterable[Storages],
) -> MemoryParts:
    """Returns the bytes of each part of the peak. Assigns `live` blocks by their allocating events."""
    births = timeline.last_allocating_events(storages["gradients"])
    for noted, step in zip(gradients, timeline.steps, strict=True):
        births |= timeline.last_allocating_events(noted, before=step)
    parts: dict[str, set[int]] = {}
    for name, part in storages.items():
        own = timeline.last_allocating_events(part)
        parts[name] = {pointer for pointer in part if pointer in live and live[pointer].birth in own}
    parts["gradients"] |= {p for p, block in live.items() if block.birth in births and block.birth >= 0}
    known = set[int]().union(*parts.values())
    parts["units_in_flight"] = {pointer for pointer, block in live.items() if block.engine} - known
    parts["rest"] = live.keys() - known - parts["units_in_flight"]
    return MemoryParts(**{name: sum(live[one].size for one in part) for name, part in parts.items()})


def _fill_in_cuda_peak(
    peak: PeakMemory, device: torch.device, *, storages: Mapping[str, Storages], gradients: Sequence[Storages]
) -> None:
    stats = torch.cuda.memory_stats(device)
    peak.bytes = stats["allocated_bytes.all.peak"]
    peak.reserved_bytes = stats["reserved_bytes.all.peak"]
    # The allocator does not report what was alive at the peak, so all gradients are assumed to be.
    if gradients and not storages["gradients"]:
        storages = {**storages, "gradients": gradients[-1]}
    sizes = {name: sum(part.values()) for name, part in storages.items()}
    peak.parts = MemoryParts(**sizes, units_in_flight=0, rest=max(0, peak.bytes - sum(sizes.values())))


def _storage_bytes_by_address(tensors: Iterable[Tensor]) -> Storages:
    """Returns address -> bytes of the tensors' storages, without those that have no data (meta, freed)."""
    sizes: Storages = {}
    for tensor in itertools.chain.from_iterable(map(tensors_with_data, tensors)):
        storage = tensor.untyped_storage()
        if storage.device.type != "meta" and storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes
