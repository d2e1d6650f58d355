"""Activation offload: moves tensors that blocks save for backward to the host, and back for backward.

[Note: moving activations]
Each storage that a block's forward saves is copied whole, once, however many views of it are saved:

forward    When a block is done, its saved storages are copied to the host while the next of these blocks
           computes. When that block is done, the computing stream waits for the copies, and the storages may
           be freed. So at most two blocks' storages are on the device: one being copied, one being computed.
backward   When a block's backward requests its first saved tensor, all that the block saved is copied back.
           Then the copies for the preceding block start, and run beside this block's backward.
last       The last of the blocks keeps its storages on the device: its backward runs next, or nearly so.

These stay on the device: parameters (FSDP2 frees and gathers their storages itself, and a copy of one would
keep it whole); buffers; storages that are small compared with the block's input; tensors that are not strided
or are on another device.

Changing a tensor in place after it was saved is an error in backward, as it is without hooks. Torch does not
check tensors that pass through hooks, so this module does.

Copies run on one stream. They wait for the computation enqueued before them, and the computing stream waits
for their event. Device memory is allocated on the computing stream, and held until that stream has waited, so
that it is never reused while a copy reads or writes it. Torch's pinned allocator does not reuse pinned memory
that a copy still reads.

On the CPU, device and host memory are the same: a saved tensor is copied, and backward gets the copy. This
saves nothing, but runs the same steps.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import storage_key
from fullshard.spec.plan import DeviceType
from fullshard.torch_private.fake_tensors import is_traceable_wrapper_subclass
from fullshard.torch_private.tensors import base, tree_leaves, version

Way = Literal["out", "back", "wait"]
Report = Callable[[Way, int], None]  # the kind of act, and the bytes of one tensor (0 for a wait)


class HostCopier(Protocol):
    """Copies flat tensors to the host and back. A ticket stands for copies in progress; None: none are.

    Each implementation has its own form for the copies on the host.

    is_concurrent: whether copies run concurrently with computing; the device tensors of a copy must then stay
        allocated until computing has waited for its ticket
    """

    is_concurrent: bool

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Copies to the host, after the computation enqueued so far. Returns (host copies, ticket)."""
        ...

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        """Copies back to the device. Returns (tensors, ticket). `hosts` may be freed after the call."""
        ...

    def make_stream_wait(self, ticket: Any) -> None:
        """Makes the computation enqueued after this call wait for the copies of `ticket`."""
        ...


class CpuHostCopier:
    """Copier for the CPU, where device memory is host memory. `copy_to_host` clones the tensors."""

    is_concurrent = False

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        return [flat.clone() for flat in flats], None

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        return list(hosts), None

    def make_stream_wait(self, ticket: Any) -> None:
        pass


class CudaHostCopier:
    """Copier for CUDA: copies to and from pinned memory, in order, on one stream of its own."""

    is_concurrent = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            hosts = [
                torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True, device="cpu") for flat in flats
            ]
            for host, flat in zip(hosts, flats, strict=True):
                host.copy_(flat, non_blocking=True)
            return list(hosts), self._stream.record_event()

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        # Allocated on the computing stream, which may still use this memory for an earlier tensor. So the
        # copy waits for that stream too.
        flats = [torch.empty(host.shape, dtype=host.dtype, device=device) for host in hosts]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, flat in zip(hosts, flats, strict=True):
                flat.copy_(host, non_blocking=True)
            return flats, self._stream.record_event()

    def make_stream_wait(self, ticket: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(ticket)


class FakeReportingCopier:
    """Copier for fake tensors in place of a GPU's: copies nothing, calls `report` for each copy."""

    is_concurrent = True

    def __init__(self, report: Report = lambda _way, _size: None) -> None:
        self.report = report

    def copy_to_host(self, flats: Sequence[Tensor]) -> tuple[list[Any], Any]:
        for flat in flats:
            self.report("out", flat.nbytes)
        return [(flat.numel(), flat.dtype) for flat in flats], self  # nothing is allocated

    def copy_to_device(self, hosts: Sequence[Any], *, device: torch.device) -> tuple[list[Tensor], Any]:
        flats = [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in hosts]
        for flat in flats:
            self.report("back", flat.nbytes)
        return flats, self

    def make_stream_wait(self, ticket: Any) -> None:
        self.report("wait", 0)


def choose_host_copier(device: DeviceType, actual: torch.device) -> HostCopier:
    """Returns the copier for a plan's `device`. `actual`: the tensors' device, the CPU for fake tensors."""
    if device == "cpu":
        return CpuHostCopier()
    return CudaHostCopier(actual) if actual.type == "cuda" else FakeReportingCopier()


Forward = Callable[..., Any]


def offload_activations(
    blocks: Sequence[nn.Module],
    *,
    smallest_fraction: float,
    device: DeviceType,
    copier: HostCopier | None = None,
) -> None:
    """Makes `blocks`, in order of use, keep tensors saved for backward on the host.

    See [Note: moving activations].

    smallest_fraction: size of the smallest storage to move, as a fraction of the bytes of the block's input
    device: the plan's device
    copier: the copier to use; None chooses the device's
    """
    mover = ActivationOffloader(device, copier=copier)
    for block in blocks:
        smallest_to_move = smallest_fraction if block is not blocks[-1] else None
        block.forward = _offloading_forward(block, mover, smallest_fraction=smallest_to_move)


def _offloading_forward(
    block: nn.Module, mover: "ActivationOffloader", *, smallest_fraction: float | None
) -> Forward:
    """Returns the block's forward with saved-tensor hooks of `mover`. With None, nothing moves."""
    forward = block.forward

    @wraps(forward)
    def forward_and_offload(*args: Any, **kwargs: Any) -> Any:  # signature: the block's own
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        entering = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        smallest_bytes = (
            None if smallest_fraction is None or entering is None else smallest_fraction * entering.nbytes
        )
        call = mover.start_forward_call(block, entering, smallest_bytes=smallest_bytes)
        with saved_tensors_hooks(partial(mover.pack_saved_tensor, call), mover.unpack_saved_tensor):
            result = forward(*args, **kwargs)
        mover.end_forward_call(call)
        return result

    return forward_and_offload


@dataclass(eq=False)
class SavedStorage:
    """A device storage that was saved for backward, and its copies."""

    reference: "weakref.ref[torch.UntypedStorage]"
    version: int  # version of the tensor when it was saved
    source: Tensor | None  # flat view of the whole storage, until it has been copied to the host
    host: Any = None  # copy on the host
    copy: Tensor | None = None  # flat tensor on the device, once the storage was copied back
    pending_fetch: "PendingCopyToDevice | None" = None  # the copy back, if computing has not waited for it
    overwritten: bool = False  # whether it was changed in place after it was saved

    def set_overwritten_if_changed(self) -> None:
        if self.source is not None and version(self.source) != self.version:
            self.overwritten = True


@dataclass(eq=False)
class PendingCopyToDevice:
    """Copies to the device that computing has not waited for, and the tensors to hold until then."""

    ticket: Any
    flats: list[Tensor]


@dataclass(eq=False)
class BlockForwardCall:
    """One forward call of one block, with the storages that it saved."""

    block: nn.Module
    device: torch.device | None
    smallest_bytes: float | None  # smaller storages stay on the device; None: all storages stay
    before: "weakref.ref[BlockForwardCall] | None"  # the preceding forward call, of any block
    held: set[int] | None  # storages of parameters and buffers, which stay; None: not gathered yet
    saved: list["weakref.ref[SavedStorage]"] = field(default_factory=list["weakref.ref[SavedStorage]"])
    is_in_backward: bool = False

    def keeps_on_device(self, tensor: Tensor) -> bool:
        if self.smallest_bytes is None or tensor.device != self.device or tensor.layout is not torch.strided:
            return True
        if is_traceable_wrapper_subclass(tensor) or tensor.is_conj() or tensor.is_neg():
            return True
        size = tensor.untyped_storage().nbytes()
        if size < max(self.smallest_bytes, 1) or size % tensor.itemsize:
            return True
        viewed = base(tensor)
        viewed = tensor if viewed is None else viewed
        held = self.held if self.held is not None else _parameter_and_buffer_storage_keys(self.block)
        return isinstance(viewed, nn.Parameter) or storage_key(tensor) in held


class TensorKeptOnDevice(NamedTuple):
    call: BlockForwardCall
    tensor: Tensor
    version: int


class ViewOfOffloadedStorage(NamedTuple):
    """A saved tensor whose storage is moved: the storage, and how the tensor views it."""

    call: BlockForwardCall
    storage: SavedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class ActivationOffloader:
    """Moves the saved storages of all blocks of a model to the host and back.

    Invariant: a device tensor that is being copied is held here until computing has waited for the copy.
    """

    def __init__(self, device: DeviceType, *, copier: HostCopier | None = None) -> None:
        self._device: DeviceType = device
        self._own = copier
        self._storages = weakref.WeakValueDictionary[tuple[int, int], SavedStorage]()
        self._last: weakref.ref[BlockForwardCall] | None = None
        self._leaving: list[tuple[Any, list[SavedStorage]]] = []
        self._coming: list[PendingCopyToDevice] = []

    def start_forward_call(
        self, block: nn.Module, entering: Tensor | None, *, smallest_bytes: float | None
    ) -> BlockForwardCall:
        """Starts a forward call of `block`. `entering` is its first floating-point input, if any."""
        gathered = not any(isinstance(parameter, DTensor) for parameter in block.parameters())
        held = _parameter_and_buffer_storage_keys(block) if gathered else None
        device = entering.device if entering is not None else None
        call = BlockForwardCall(block, device, smallest_bytes, before=self._last, held=held)
        self._last = weakref.ref(call)
        return call

    def pack_saved_tensor(
        self, call: BlockForwardCall, tensor: Tensor
    ) -> TensorKeptOnDevice | ViewOfOffloadedStorage:
        """Returns the object that autograd saves in place of `tensor`: the pack hook of saved tensors."""
        if call.keeps_on_device(tensor):
            # Detached: the output of an operation would form a reference cycle, which is never freed.
            return TensorKeptOnDevice(call, tensor.detach(), version(tensor))
        storage = self._get_or_make_storage_record(tensor)
        if not any(reference() is storage for reference in call.saved):
            call.saved.append(weakref.ref(storage))
        return ViewOfOffloadedStorage(
            call, storage, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def end_forward_call(self, call: BlockForwardCall) -> None:
        """Ends a forward call: frees the device storages of the previous call, starts copying this call's."""
        while self._leaving:
            ticket, storages = self._leaving.pop()
            self._get_host_copier(call).make_stream_wait(ticket)
            for storage in storages:
                _drop_device_source(storage)
        for coming in self._coming:  # left by an interrupted backward
            self._get_host_copier(call).make_stream_wait(coming.ticket)
        self._coming.clear()
        leaving = [one for one in _live_storage_records(call) if one.source is not None and one.host is None]
        if not leaving:
            return
        copier = self._get_host_copier(call)
        # If copies are not concurrent, at most one storage at a time is in memory twice.
        for storages in [leaving] if copier.is_concurrent else [[storage] for storage in leaving]:
            self._start_copy_to_host(storages, copier)

    def unpack_saved_tensor(self, saved: TensorKeptOnDevice | ViewOfOffloadedStorage) -> Tensor:
        """Returns the tensor packed as `saved`, for backward. Raises RuntimeError if it was overwritten."""
        self._copy_back_for_backward(saved.call)
        if isinstance(saved, TensorKeptOnDevice):
            if version(saved.tensor) != saved.version:
                raise _overwritten_tensor_error(saved.tensor)
            return saved.tensor
        storage = saved.storage
        storage.set_overwritten_if_changed()
        if storage.source is None and storage.copy is None:
            self._start_copy_to_device([storage], saved.call)
        self._wait_for_copy_to_device(storage)
        flat = storage.source if storage.source is not None else storage.copy
        assert flat is not None, "it was just brought"
        flat = flat if flat.dtype == saved.dtype else flat.view(saved.dtype)
        tensor = flat.as_strided(saved.size, saved.stride, saved.offset)
        if storage.overwritten:
            raise _overwritten_tensor_error(tensor)
        return tensor

    def _get_host_copier(self, call: BlockForwardCall) -> HostCopier:
        if self._own is None:
            assert call.device is not None, "nothing moves in a block that no floating-point tensor enters"
            self._own = choose_host_copier(self._device, call.device)
        return self._own

    def _get_or_make_storage_record(self, tensor: Tensor) -> SavedStorage:
        """Returns the record of `tensor`'s storage at its present version, made at the first call."""
        key = (storage_key(tensor), version(tensor))
        found, storage = self._storages.get(key), tensor.untyped_storage()
        if found is None or found.reference() is not storage:
            count = storage.nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((count,), (1,), 0)
            found = self._storages[key] = SavedStorage(weakref.ref(storage), version(tensor), flat)
        return found

    def _start_copy_to_host(self, storages: list[SavedStorage], copier: HostCopier) -> None:
        flats = [storage.source for storage in storages if storage.source is not None]
        hosts, ticket = copier.copy_to_host(flats)
        for storage, host in zip(storages, hosts, strict=True):
            storage.host = host
            if ticket is None:
                _drop_device_source(storage)
        if ticket is not None:
            self._leaving.append((ticket, storages))

    def _copy_back_for_backward(self, call: BlockForwardCall) -> None:
        """At a call's first unpack, copies its storages back, then starts copying the preceding call's."""
        if call.is_in_backward:
            return
        call.is_in_backward = True
        self._start_copy_to_device(list(_live_storage_records(call)), call)
        for storage in _live_storage_records(call):
            self._wait_for_copy_to_device(storage)
        before = call.before() if call.before is not None else None
        if before is not None:
            self._start_copy_to_device(list(_live_storage_records(before)), before)

    def _start_copy_to_device(self, storages: list[SavedStorage], call: BlockForwardCall) -> None:
        absent = [one for one in storages if one.source is None and one.copy is None]
        if not absent:
            return
        assert call.device is not None, "what was moved was on a device"
        copier = self._get_host_copier(call)
        copies, ticket = copier.copy_to_device([one.host for one in absent], device=call.device)
        coming = PendingCopyToDevice(ticket, copies) if ticket is not None else None
        for storage, copy in zip(absent, copies, strict=True):
            storage.copy, storage.host, storage.pending_fetch = copy, None, coming
        if coming is not None:
            self._coming.append(coming)

    def _wait_for_copy_to_device(self, storage: SavedStorage) -> None:
        coming, storage.pending_fetch = storage.pending_fetch, None
        if coming in self._coming and self._own is not None:
            self._own.make_stream_wait(coming.ticket)
            self._coming.remove(coming)


def _live_storage_records(call: BlockForwardCall) -> Iterator[SavedStorage]:
    return (storage for reference in call.saved if (storage := reference()) is not None)


def _drop_device_source(storage: SavedStorage) -> None:
    storage.set_overwritten_if_changed()
    storage.source = None


def _parameter_and_buffer_storage_keys(block: nn.Module) -> set[int]:
    """Returns the storage keys of a block's buffers and parameters, except those that are not gathered."""
    held = [*block.parameters(), *block.buffers()]
    return {storage_key(tensor) for tensor in held if not isinstance(tensor, DTensor)}


def _overwritten_tensor_error(tensor: Tensor) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{tensor.dtype} {tuple(tensor.shape)}, saved in a block whose activations are offloaded"
    )
