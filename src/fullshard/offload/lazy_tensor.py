"""A tensor whose elements are on a drive, and are read at each use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.torch_private.fake_tensors import make_wrapper_subclass, schema
from fullshard.torch_private.tensors import tree_leaves, tree_map_only

_STILL_ON_DRIVE = frozenset(
    {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default}
)
_OF_A_MOVE = {"device", "dtype", "layout", "non_blocking"}


class RereadingTensor(torch.Tensor):
    """Tensor on the meta device whose elements `read` returns, on the CPU, at each use.

    It cannot be changed in place. `make_lazy_tensor` makes it.
    """

    read: Callable[[], Tensor]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDrive({tuple(self.shape)}, {self.dtype})"

    # Torch would neither copy nor save the elements of a tensor on the meta device.

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.cpu()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # signature: torch's
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _STILL_ON_DRIVE:
            one = cast(RereadingTensor, args[0])
            shape = torch.empty(one.shape, device="meta").view(*args[1:] or (one.shape,)).shape
            return make_lazy_tensor(shape, one.dtype, read=lambda: one.read().view(shape))
        kwargs = kwargs or {}
        written = tree_leaves(_written_arguments(func, args, kwargs=kwargs))
        if any(isinstance(leaf, RereadingTensor) for leaf in written):
            raise TypeError(f"{func} would change a tensor that is on a drive")
        if func is torch.ops.aten._to_copy.default and kwargs.keys() <= _OF_A_MOVE:
            # The tensor just read has no other owner, so it is not copied again if nothing changes.
            return args[0].read().to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
        read = tree_map_only(RereadingTensor, lambda one: one.read(), (args, kwargs))
        return func(*read[0], **read[1])


def _written_arguments(func: Any, args: Sequence[Any], *, kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments that the torch operation `func` writes to."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def make_lazy_tensor(shape: torch.Size, dtype: torch.dtype, *, read: Callable[[], Tensor]) -> RereadingTensor:
    """Returns a tensor on the meta device whose elements `read` returns, for example in `.cpu()`."""
    one: RereadingTensor = make_wrapper_subclass(
        RereadingTensor, shape, dtype=dtype, device="meta", requires_grad=False
    )
    one.read = read
    return one
