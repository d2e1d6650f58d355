"""Counts tensor bytes without an allocator: storages are told when they appear, and noticed when they die."""

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.spec.model import LiveBytes

Kind = Literal["activations", "loss", "backward", "gradients"]


@dataclass
class _Block:
    size: int
    kind: Kind | None
    reference: "weakref.ref[torch.UntypedStorage]"


def storage_key(tensor: Tensor) -> int:
    """Tells the storage of `tensor` from all others alive; a fake one has no address to tell it by."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


class Allocations(TorchDispatchMode):
    """While it is active, every storage that an operation returns is counted under `kind` until it dies.

    Enter it inside a FakeTensorMode. What a kernel allocates and frees within one operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind: Kind = "activations"
        self._blocks: dict[int, _Block] = {}
        self._live: dict[Kind, int] = {"activations": 0, "loss": 0, "backward": 0, "gradients": 0}
        self._total = self._highest = 0
        self._peak = self._live.copy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(leaf, self.kind)
        return result

    def ignore(self, tensor: Tensor) -> None:
        """Leaves the storage of `tensor` out of the count: it is there for other reasons."""
        self._track(tensor, None)

    def move(self, tensor: Tensor, kind: Kind) -> None:
        """Counts the storage of `tensor` under another kind from now on, if it counts."""
        block = self._blocks.get(storage_key(tensor))
        if block is not None and block.kind is not None:
            self._add(block.kind, -block.size)
            block.kind = kind
            self._add(kind, block.size)

    def cut(self) -> tuple[LiveBytes, LiveBytes]:
        """(highest since the last cut, now)."""
        peak, now = LiveBytes(**self._peak), LiveBytes(**self._live)
        self.restart()
        return peak, now

    def restart(self) -> None:
        """Forgets the highest so far: it is what is alive now."""
        self._highest, self._peak = self._total, self._live.copy()

    def _track(self, tensor: Tensor, kind: Kind | None) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._blocks:
            return
        self._blocks[key] = _Block(
            storage.nbytes(), kind, weakref.ref(storage, lambda _reference: self._died(key))
        )
        self._add(kind, storage.nbytes())

    def _died(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._add(block.kind, -block.size)

    def _add(self, kind: Kind | None, size: int) -> None:
        if kind is None:
            return
        self._live[kind] += size
        self._total += size
        if self._total > self._highest:
            self._highest, self._peak = self._total, self._live.copy()
