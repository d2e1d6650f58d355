"""Counts tensor bytes without an allocator: a storage counts from its first use until its release."""

import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fullshard.distributed.tensors import is_wrapper_class, storage_key, tensors_with_data
from fullshard.parallel.activation_offload import Way
from fullshard.planner.describe.kernels import (
    KernelLaunch,
    OpCall,
    find_kernel_launch,
    list_tensors,
    readable_tensor_bytes,
    run_on_fake_tensors,
    transient_kernel_bytes,
)
from fullshard.spec.model import Event
from fullshard.spec.plan import DeviceType
from fullshard.torch_private.fake_tensors import TorchDispatchMode

Kind = Literal["activations", "loss", "backward", "gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor


@dataclass
class PhaseRecord:
    """Record of one phase."""

    event: Event  # the FSDP2 event that opens the phase
    unit: int  # index of its unit; -1 if the event belongs to none
    # (kind, bytes) of each allocation (positive) and release (negative), in order
    changes: list[tuple[Kind, int]] = field(default_factory=list[tuple[Kind, int]])
    # number of first changes that belong to the event (gradients handed over), not the phase
    event_change_count: int = 0
    work: list[KernelLaunch] = field(default_factory=list[KernelLaunch])  # every kernel launch
    fused: list[KernelLaunch] = field(default_factory=list[KernelLaunch])  # with elementwise runs fused
    # (way, bytes) of copies to and from the host, and of waits for them (0 bytes)
    copies: list[tuple[Way, int]] = field(default_factory=list[tuple[Way, int]])


@dataclass
class _LiveStorage:
    """A live storage. `serial`: number of storages that were created before it, which identifies it."""

    size: int
    kind: Kind | None
    serial: int
    reference: "weakref.ref[torch.UntypedStorage]"


@dataclass
class _FusedElementwiseKernel:
    """Sequence of elementwise operations that a compiler fuses into one kernel."""

    born: int  # serials from this one on belong to storages that the run created
    read: dict[int, int] = field(default_factory=dict[int, int])  # bytes of older storages, by serial
    written: dict[int, int] = field(default_factory=dict[int, int])  # bytes by serial
    last: KernelLaunch | None = None  # the latest launch of the run; None if it is empty


class AllocationRecorder(TorchDispatchMode):
    """Records every storage that an operation returns, under the current `kind`, and every kernel launch.

    It must be entered inside a FakeTensorMode. Memory that kernels of `device` allocate and free within one
    operation counts too, as far as it is known (`transient_kernel_bytes`).

    A tensor that is used twice has two gradients. Autograd adds them in place, but those of fake tensors out
    of place. So a gradient that is released right after such a sum counts as released before it.
    """

    def __init__(self, device: DeviceType) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self.recorded = [PhaseRecord("start", -1)]
        self._device: DeviceType = device
        self._blocks: dict[int, _LiveStorage] = {}
        self._born = 0
        self._fusing = _FusedElementwiseKernel(0)
        self._is_compiled, self._unwritten = False, dict[int, None]()  # keys of storages not yet in memory
        self._work_factor, self._is_backward = 1.0, False
        self._has_received_rows = False  # between the exchanges to the experts and back
        self.loss_chunk = 0  # rows of logits that the loss computed at once; 0 for all
        # keys of the two gradients that the latest operation added; empty after another operation
        self._added_gradients: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # two thirds of all calls
            return args[0].device  # of a fake tensor a Python property, so no mode is called again
        if any(map(is_wrapper_class, types)):
            return NotImplemented  # the subclass calls operations on the tensors that it holds
        call = OpCall(func, args, kwargs or {})
        result = run_on_fake_tensors(call)
        self._added_gradients.clear()
        launch = find_kernel_launch(call, result)
        if self._unwritten and launch is not None and launch.kind != "elementwise":
            self.record_fused_launch()  # its inputs are in memory before its results are
        is_fused = self._is_compiled and launch is not None and launch.kind == "elementwise"
        for tensor in list_tensors(result):
            self._track_storage(tensor, self.kind, is_fused=is_fused)
        is_sum = func is _ADD and self.kind == "backward" and not torch.is_grad_enabled()
        if is_sum and not self._is_compiled:
            self._added_gradients.update(map(storage_key, list_tensors(args)))
        if size := transient_kernel_bytes(call, device=self._device):
            self._record_change(self.kind, size)
            self._record_change(self.kind, -size)
        if launch is not None:
            if self._device == "cpu":
                launches = launch.pieces * self._work_factor
                launch = launch._replace(pieces=launches)
            self._record_launch(launch, read=(call.args, call.kwargs), written=result)
        return result

    def ignore_storage(self, tensor: Tensor) -> None:
        """Excludes the storage of `tensor`, which exists outside the microbatch, from the count."""
        for one in tensors_with_data(tensor):
            self._track_storage(one, None)

    def change_storage_kind(self, tensor: Tensor, kind: Kind) -> None:
        """Counts the storage of `tensor` under `kind` from now on, if it is counted at all."""
        block = self._blocks.get(storage_key(tensor))
        if block is not None and block.kind is not None and block.kind != kind:
            self._record_change(block.kind, -block.size)
            block.kind = kind
            self._record_change(kind, block.size)

    def start_phase(self, event: Event, unit: int) -> None:
        """Closes the current phase and opens the next."""
        self.record_fused_launch()
        self.recorded.append(PhaseRecord(event, unit))

    def trace_chunk(self, rows: int, *, of: int) -> AbstractContextManager[None]:
        """While active, records FLOP and bytes moved of a chunk of rows for all, but its memory once."""
        self.loss_chunk = rows
        return _replace_between_kernels(self, "_work_factor", value=of / rows)

    def count_as_compiled(self) -> AbstractContextManager[None]:
        """While active, results of elementwise operations take memory only if they outlive their kernel."""
        return _replace_between_kernels(self, "_is_compiled", value=True)

    def mark_backward(self) -> AbstractContextManager[None]:
        """While active, records kernels as those of a backward."""
        return _replace_between_kernels(self, "_is_backward", value=True)

    def record_host_copy(self, way: Way, size: int) -> None:
        """Records a copy of `size` bytes to or from the host, or a wait for the pending copies."""
        self.recorded[-1].copies.append((way, size))

    def assign_changes_to_phase_start(self) -> None:
        """Attributes all changes since the phase opened to the event that opened it."""
        self.recorded[-1].event_change_count = len(self.recorded[-1].changes)

    def _record_launch(self, launch: KernelLaunch, *, read: Any, written: Any) -> None:
        factor = self._work_factor
        if launch.kind == "row_exchange":
            self._has_received_rows = launch.received
        launch = launch._replace(
            flops=round(factor * launch.flops),
            bytes=round(factor * launch.bytes),
            backward=self._is_backward,
            received=self._has_received_rows,
            unaligned=launch.unaligned and not self._is_compiled,  # Inductor pads such matrices
        )
        self.recorded[-1].work.append(launch)
        if launch.kind != "elementwise":
            self.record_fused_launch()
            self.recorded[-1].fused.append(launch)
            return
        run = self._fusing
        for tensor in list_tensors(read):
            if (serial := _serial_number(tensor, self._blocks)) < run.born:
                run.read[serial] = max(run.read.get(serial, 0), readable_tensor_bytes(tensor))
        for tensor in list_tensors(written):
            run.written[_serial_number(tensor, self._blocks)] = tensor.untyped_storage().nbytes()
        run.last = launch

    def record_fused_launch(self) -> None:
        """Records the current elementwise run as one kernel, and starts the next run.

        The kernel reads storages that existed before the run, and writes storages that are still alive.
        """
        run, self._fusing = self._fusing, _FusedElementwiseKernel(self._born)
        written, self._unwritten = self._unwritten, {}
        for block in (self._blocks[key] for key in written):
            self._record_change(block.kind, block.size)
        if run.last is not None:
            alive = {block.serial for block in self._blocks.values()}
            kept = sum(size for serial, size in run.written.items() if serial in alive)
            moved = round(self._work_factor * (sum(run.read.values()) + kept))
            self.recorded[-1].fused.append(run.last._replace(bytes=moved))

    def _track_storage(self, tensor: Tensor, kind: Kind | None, *, is_fused: bool = False) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._blocks:
            return
        reference = weakref.ref(storage, lambda _reference: self._record_release(key))
        self._blocks[key] = _LiveStorage(storage.nbytes(), kind, self._born, reference)
        self._born += 1
        if is_fused:
            self._unwritten[key] = None
        else:
            self._record_change(kind, storage.nbytes())

    def _record_release(self, key: int) -> None:
        block, changes = self._blocks.pop(key), self.recorded[-1].changes
        if key in self._unwritten:
            del self._unwritten[key]
        elif key in self._added_gradients and changes[-1:] == [("backward", block.size)] and block.kind:
            changes.insert(-1, (block.kind, -block.size))
            self._added_gradients.clear()
        else:
            self._record_change(block.kind, -block.size)

    def _record_change(self, kind: Kind | None, size: int) -> None:
        if kind is not None and size:
            self.recorded[-1].changes.append((kind, size))


def _serial_number(tensor: Tensor, blocks: Mapping[int, _LiveStorage]) -> int:
    """Returns the serial number of the tensor's storage; -1 if it is not tracked."""
    block = blocks.get(storage_key(tensor))
    return -1 if block is None else block.serial


@contextmanager
def _replace_between_kernels(
    recorder: AllocationRecorder, attribute: str, *, value: float | bool
) -> Generator[None]:
    """Replaces an attribute while active. No kernel is fused across its beginning or end."""
    recorder.record_fused_launch()
    before = getattr(recorder, attribute)
    setattr(recorder, attribute, value)
    yield
    recorder.record_fused_launch()
    setattr(recorder, attribute, before)
