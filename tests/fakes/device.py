"""A fake device on the CPU, which notes each moment at which the host of a real one would wait."""

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or the shape of whose result, the host reads.
_READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
    "repeat_interleave",
}
_INDEXED = {"index", "index_put", "index_put_", "_unsafe_index"}  # with a mask: like nonzero
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
_DATA_TO_TENSOR = {torch.tensor, torch.as_tensor, torch.from_numpy}


class FakeDevice(TorchDispatchMode):
    """Context in which CPU tensors pretend to be on a device, except those that a GPU run has on the host.

    On the host are tensors made without `device=`, and results of operations on only such tensors. A copy to
    or from the device that may block counts as a wait, and so does reading a tensor of the device. A copy to
    the host that does not block is read without a wait once another such copy was made after it, because
    then the device has the work of another step to do.

    waits: for each wait, the operation and the line of the package that caused it
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._on_host: dict[int, Tensor] = {}  # id -> the tensor, which keeps the id from being reused
        self._last_copy: Tensor | None = None
        self._calls = _Calls(self)

    def __enter__(self) -> "FakeDevice":
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = list(_tensors((args, kwargs)))
        on_host = [self.is_on_host(tensor) for tensor in given]
        if name in _READS and not all(on_host):
            self.note(name)
        elif name in _INDEXED and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
            self.note(f"{name} with a mask")
        elif name == "copy_" and on_host[0] != on_host[1]:
            self._note_copy(given[0], to_host=on_host[0], blocks=not (len(args) > 2 and args[2]))
        elif any(on_host) and not all(on_host):
            # A GPU takes only single numbers from the host. `fill_` makes a tensor of its number.
            mixed = [t for t, host in zip(given, on_host, strict=True) if host and t.ndim]
            if mixed and name != "fill_":
                self.note(f"{name} of tensors of the host and of the device")
        result = func(*args, **kwargs)
        if given and all(on_host):
            for tensor in _tensors(result):
                self.put_on_host(tensor)
        return result

    def is_on_host(self, tensor: Tensor) -> bool:
        return id(tensor) in self._on_host

    def put_on_host(self, tensor: Tensor) -> None:
        self._on_host[id(tensor)] = tensor

    def put_on_device(self, tensor: Tensor) -> None:
        self._on_host.pop(id(tensor), None)

    def note(self, what: str) -> None:
        own = [f for f in traceback.extract_stack(sys._getframe()) if "/fullshard/" in f.filename]
        place = (
            f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} in {own[-1].name}" if own else "a test"
        )
        self.waits.append(f"{what} in {place}")

    def read(self, tensor: Tensor, what: str) -> None:
        """Notes that the host reads `tensor`, if it has to wait for it."""
        if not self.is_on_host(tensor):
            self.note(what)
        elif tensor is self._last_copy:
            self.note(f"{what} of the last copy")

    def _note_copy(self, target: Tensor, *, to_host: bool, blocks: bool) -> None:
        if blocks:
            self.note(f"blocking copy to the {'host' if to_host else 'device'}")
        elif to_host:
            self._last_copy = target


class _Calls(TorchFunctionMode):
    """Sees the calls of Python that do not reach the dispatcher, or no longer as what they were."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, fake = kwargs or {}, self._device
        if func == Tensor.is_cpu.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return fake.is_on_host(args[0])
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            fake.read(args[0], func.__name__)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if func in _MOVES and (func is not Tensor.to or _names_device(args[1:], kwargs)):
            if fake.is_on_host(args[0]) and not kwargs.get("non_blocking"):
                fake.note("blocking copy to the device")
            fake.put_on_device(result)
        elif not any(True for _ in _tensors((args, kwargs))):  # it makes a tensor
            if kwargs.get("device") is None:
                fake.put_on_host(result)
            elif func in _DATA_TO_TENSOR:
                fake.note("blocking copy to the device")
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _names_device(args: Any, kwargs: Any) -> bool:
    return "device" in kwargs or any(isinstance(one, torch.device | str) for one in args)
