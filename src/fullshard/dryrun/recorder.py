"""Records the allocation and release of every storage while a step runs on fake tensors.

A storage is seen when an operation returns it; a weak reference reports its release. Two events are not
operations and are patched (see `StorageEventRecorder.record_resizes_and_random_states`):

- FSDP2 frees the storages of unsharded parameters, and allocates them again, by resizing them.
- Recompute saves the random state of each block.

Of the memory that a kernel allocates and frees within one operation, only the largest parts are known: on
CUDA from `tracing.kernels.transient_kernel_bytes`, on the CPU where FSDP2 copies gradients into one buffer.
Other such memory is not counted.
"""

import re
import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fullshard.distributed.tensors import is_wrapper_class, storage_key, tensors_with_data
from fullshard.dryrun.events import AllocateEvent, Event, FreeEvent
from fullshard.spec.plan import DeviceType
from fullshard.torch_private.fake_tensors import TorchDispatchMode
from fullshard.torch_private.tensors import storage_address, tree_leaves
from fullshard.tracing.kernels import OpCall, run_on_fake_tensors, transient_kernel_bytes

# FSDP2 marks its work as ranges of torch's profiler, which begin and end with these operations. It also marks
# casts of activations, which are not its own memory. `profiler.memory` uses the same rule.
_ENGINE, _ENGINE_CASTS = "FSDP::", "FSDP::cast_"
_RANGE = re.compile(r"FSDP::(?P<act>\w+)(?: \((?P<unit>.*)\))?$")
_BEGIN, _END = "profiler::_record_function_enter_new", "profiler::_record_function_exit"


class StorageEventRecorder(TorchDispatchMode):
    """Records storages in `events` while active. It must be entered inside a FakeTensorMode.

    device: the device type whose kernels it simulates. For CUDA, transient kernel memory is counted too, and
        random states are not, since they are on the host.
    events: allocations and frees, in order.
    moments: (number of events before it, name of the phase that starts there).
    fsdp_blocks: blocks that FSDP2 allocated for itself.

    Streams are numbered in order of appearance. torch's CPU streams do no work but identify the stream that
    FSDP2 is using. An operation that reads a value (`item()`) returns 1, since fake tensors have none.
    """

    def __init__(self, device: DeviceType) -> None:
        super().__init__()
        self.device: DeviceType = device
        self.events: list[Event] = []
        self.moments: list[tuple[int, str]] = []
        self.fsdp_blocks: set[int] = set()
        self._phase = ""
        self._ranges: list[str] = []
        self._blocks: dict[int, int] = {}  # storage -> its current block; absent while it has no bytes
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._streams: list[Any] = [torch.cpu.current_stream()]
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _python_scalar_one(args[0].dtype)
        if any(map(is_wrapper_class, types)):
            return NotImplemented  # the subclass calls operations on the tensors that it holds
        name = func.name().partition(".")[0]
        if name == _BEGIN:
            self._start_profiler_range(args[0])
        elif name == _END:
            self._ranges.pop()
        # DTensor's sharding propagation runs operations on whole tensors that no rank allocates. It runs
        # inside this call, where the mode is not active.
        kwargs = kwargs or {}
        result = run_on_fake_tensors(OpCall(func, args, kwargs))
        self.track_and_get_blocks(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        within = transient_kernel_bytes(OpCall(func, args, kwargs), device=self.device)
        if self.device == "cpu":
            within += _chunk_cat_padding_bytes(func, args, kwargs=kwargs)
        if within:
            self.events.append(FreeEvent(self._record_new_block(within)))
        return result

    def track_and_get_blocks(self, tensors: Iterable[Tensor]) -> set[int]:
        """Starts tracking the storages of `tensors`; returns their blocks."""
        with torch.no_grad():
            blocks = [self._track_storage(one) for tensor in tensors for one in tensors_with_data(tensor)]
        return {block for block in blocks if block is not None}

    def start_phase(self, phase: str) -> None:
        """Records the start of `phase`, such as "microbatch 1"."""
        self._phase = phase
        self.moments.append((len(self.events), phase))

    @contextmanager
    def record_resizes_and_random_states(self) -> Generator[None]:
        """Also records resized storages and saved random states, by patching two functions while active."""
        resize, random_state = torch.UntypedStorage.resize_, torch.get_rng_state

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._record_resize(storage)
            return result

        def get_random_state_and_record() -> Tensor:
            state = random_state()
            if self.device == "cpu":
                self.track_and_get_blocks([state])
            return state

        torch.UntypedStorage.resize_ = resize_and_record  # pyright: ignore[reportAttributeAccessIssue]
        torch.get_rng_state = get_random_state_and_record
        try:
            yield
        finally:
            torch.UntypedStorage.resize_, torch.get_rng_state = resize, random_state

    def _start_profiler_range(self, name: str) -> None:
        outermost = not any(one.startswith(_ENGINE) for one in self._ranges)
        self._ranges.append(name)
        if outermost and (found := _RANGE.match(name)) and not name.startswith(_ENGINE_CASTS):
            act = found["act"].replace("_", " ") + (f" of {found['unit']}" if found["unit"] else "")
            self.moments.append((len(self.events), f"{self._phase}, {act}"))

    def _track_storage(self, tensor: Tensor) -> int | None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if tensor.device.type == "meta":
            return None
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _reference: self._record_release(key))
            self._record_allocation(key, storage.nbytes())
        return self._blocks.get(key)

    def _record_resize(self, storage: torch.UntypedStorage) -> None:
        key = storage_address(storage)
        if key in self._watched:
            self._record_free(key)
            self._record_allocation(key, storage.nbytes())

    def _record_release(self, key: int) -> None:
        del self._watched[key]
        self._record_free(key)

    def _record_allocation(self, key: int, size: int) -> None:
        if size:
            self._blocks[key] = self._record_new_block(size)

    def _record_new_block(self, size: int) -> int:
        self._count += 1
        self.events.append(AllocateEvent(self._count, size, self._current_stream_number()))
        if self._is_inside_fsdp():
            self.fsdp_blocks.add(self._count)
        return self._count

    def _current_stream_number(self) -> int:
        current = torch.cpu.current_stream()
        for index, stream in enumerate(self._streams):
            if stream is current:
                return index
        self._streams.append(current)
        return len(self._streams) - 1

    def _record_free(self, key: int) -> None:
        if key in self._blocks:
            self.events.append(FreeEvent(self._blocks.pop(key)))

    def _is_inside_fsdp(self) -> bool:
        named = [name for name in self._ranges if name.startswith(_ENGINE)]
        return bool(named) and not named[-1].startswith(_ENGINE_CASTS)


def _chunk_cat_padding_bytes(func: Any, args: Sequence[Any], *, kwargs: dict[str, Any]) -> int:
    """Returns the bytes that the CPU's `chunk_cat` allocates to pad gradients with uneven rows."""
    if func.name() != "fsdp::chunk_cat":
        return 0
    named = dict(zip(("tensors", "dim", "num_chunks"), args, strict=False)) | kwargs
    dim, count = named["dim"], named["num_chunks"]
    uneven = [tensor for tensor in named["tensors"] if tensor.size(dim) % count]
    return sum(t.nbytes // t.size(dim) * -(-t.size(dim) // count) * count for t in uneven)


def _python_scalar_one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
