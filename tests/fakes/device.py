"""A device whose figures are read later, on CPU ranks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class FakeDevice(TorchFunctionMode):
    """Context in which CPU tensors say in `is_cpu` that they are on a device: steps are launched ahead.

    On the host are tensors made without `device=`, and results of operations on only such tensors. Everything
    else is as on the CPU. `tests.fakes.cuda.FakeCuda` runs plans for GPUs, and finds waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, Tensor] = {}  # id -> the tensor, which keeps the id from being reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.is_cpu.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return id(args[0]) in self._on_host
        given = [*_tensors((args, kwargs))]
        result = func(*args, **kwargs)
        if kwargs.get("device") is None and all(id(one) in self._on_host for one in given):
            self._on_host |= {id(one): one for one in _tensors(result)}
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
