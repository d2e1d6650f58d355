"""Counts tensor bytes without an allocator: storages are told when they appear, and noticed when they die."""

import weakref
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.distributed.tensors import storage_key
from fullshard.sharding.host_copy import Way
from fullshard.spec.model import Event
from fullshard.tracing.kernels import (
    GROUPED,
    KernelLaunch,
    OpCall,
    grouped_shape,
    launch_of,
    readable_bytes,
    transient_bytes,
)

Kind = Literal["activations", "loss", "backward", "gradients"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DEVICE = torch.ops.prim.device.default


@dataclass
class Recorded:
    """What happened in one phase: (kind, bytes) of each change, and each launch.

    The first `given` changes are of the act that opens the phase (gradients handed over), not of the phase.
    `copies`: to and from the host, beside the launches, and waits for them.
    """

    event: Event
    unit: int
    changes: list[tuple[Kind, int]] = field(default_factory=list[tuple[Kind, int]])
    given: int = 0
    work: list[KernelLaunch] = field(default_factory=list[KernelLaunch])
    fused: list[KernelLaunch] = field(default_factory=list[KernelLaunch])
    copies: list[tuple[Way, int]] = field(default_factory=list[tuple[Way, int]])


@dataclass
class _TracedBlock:
    """`serial`: how many were born before it; keys are used again, serials are not."""

    size: int
    kind: Kind | None
    serial: int
    reference: "weakref.ref[torch.UntypedStorage]"


@dataclass
class _Fusing:
    """A run of elementwise operations that a compiler makes one kernel of.

    `born`: serials from here on belong to storages that the run made. `read`: bytes by serial of those from
    outside; `written`: bytes by serial.
    """

    born: int
    read: dict[int, int] = field(default_factory=dict[int, int])
    written: dict[int, int] = field(default_factory=dict[int, int])
    last: KernelLaunch | None = None


class Allocations(TorchDispatchMode):
    """While it is active, every storage that an operation returns is counted under `kind` until it dies.

    Enter it inside a FakeTensorMode. `transients`: whether what CUDA kernels allocate and free within one
    operation is counted too; what CPU kernels do is not seen.
    """

    def __init__(self, *, transients: bool = False) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self.recorded = [Recorded("start", -1)]
        self._transients = transients
        self._blocks: dict[int, _TracedBlock] = {}
        self._born = 0
        self._fusing = _Fusing(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # two of three calls
            return func(*args)
        call = OpCall(func, args, kwargs or {})
        # Of grouped matmuls torch knows the shapes in bf16 alone, and of some widths.
        grouped = call.name == GROUPED
        result = args[0].new_empty(grouped_shape(call)) if grouped else func(*args, **call.kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf, self.kind)
        if self._transients and (size := transient_bytes(call)):
            self._change(self.kind, size)
            self._change(self.kind, -size)
        launch = launch_of(call, result)
        if launch is not None:
            self._launched(launch, read=(call.args, call.kwargs), written=result)
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leaves the storage of `tensor` out of the count: it is there for other reasons."""
        self._track(tensor, None)

    def move(self, tensor: Tensor, kind: Kind) -> None:
        """Counts the storage of `tensor` under another kind from now on, if it counts."""
        block = self._blocks.get(storage_key(tensor))
        if block is not None and block.kind is not None and block.kind != kind:
            self._change(block.kind, -block.size)
            block.kind = kind
            self._change(kind, block.size)

    def open(self, event: Event, unit: int) -> None:
        """Closes the phase that is open, and opens the next."""
        self._end_run()
        self.recorded.append(Recorded(event, unit))

    def copied(self, way: Way, size: int) -> None:
        """A storage of `size` bytes begins to leave or to come back, or computing waits for those that do."""
        self.recorded[-1].copies.append((way, size))

    def given(self) -> None:
        """What changed since the phase opened belongs to the act that opened it."""
        self.recorded[-1].given = len(self.recorded[-1].changes)

    def _launched(self, launch: KernelLaunch, *, read: Any, written: Any) -> None:
        self.recorded[-1].work.append(launch)
        if launch.kind != "elementwise":
            self._end_run()
            self.recorded[-1].fused.append(launch)
            return
        run = self._fusing
        for leaf in tree_leaves(read):
            if isinstance(leaf, Tensor) and (serial := self._serial(leaf)) < run.born:
                run.read[serial] = max(run.read.get(serial, 0), readable_bytes(leaf))
        for leaf in tree_leaves(written):
            if isinstance(leaf, Tensor):
                run.written[self._serial(leaf)] = leaf.untyped_storage().nbytes()
        run.last = launch

    def _serial(self, tensor: Tensor) -> int:
        block = self._blocks.get(storage_key(tensor))
        return -1 if block is None else block.serial

    def _end_run(self) -> None:
        """One kernel: it reads what came from outside, and writes what outlives it."""
        run, self._fusing = self._fusing, _Fusing(self._born)
        if run.last is not None:
            alive = {block.serial for block in self._blocks.values()}
            kept = sum(size for serial, size in run.written.items() if serial in alive)
            moved = sum(run.read.values()) + kept
            self.recorded[-1].fused.append(run.last._replace(bytes=moved))

    def _track(self, tensor: Tensor, kind: Kind | None) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._blocks:
            return
        reference = weakref.ref(storage, lambda _reference: self._died(key))
        self._blocks[key] = _TracedBlock(storage.nbytes(), kind, self._born, reference)
        self._born += 1
        self._change(kind, storage.nbytes())

    def _died(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._change(block.kind, -block.size)

    def _change(self, kind: Kind | None, size: int) -> None:
        if kind is not None and size:
            self.recorded[-1].changes.append((kind, size))
