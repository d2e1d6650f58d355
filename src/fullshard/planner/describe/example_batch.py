"""The batch of a trace: fake tensors, and integers with their values where a model's flow depends on them."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.planner.describe.kernels import list_tensors
from fullshard.spec.plan import Plan
from fullshard.torch_private.fake_tensors import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    unset_fake_temporarily,
)
from fullshard.torch_private.tensors import tree_map_only

_ATEN = torch.ops.aten
_INDEXING = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)
# Floating point results with more elements become fake: such masks take gigabytes.
_MOST_KEPT = 1 << 20
_ARANGES = (_ATEN.arange.default, _ATEN.arange.start, _ATEN.arange.start_step)


def has_microbatch_dim(batch: Any, microbatch: int) -> bool:
    """Returns whether dim 0 of every tensor in the batch is the microbatch."""
    tensors = list_tensors(batch)
    return bool(tensors) and all(tensor.ndim and tensor.shape[0] == microbatch for tensor in tensors)


def has_integer_values(batch: Any) -> bool:
    """Returns whether the batch has integers or booleans with values, not on the meta device."""
    return any(_is_integer_with_values(tensor) for tensor in list_tensors(batch))


def make_fake_batch(
    batch: Any, plan: Plan, *, microbatch: int, fakes: FakeTensorMode, keep_integers: bool = False
) -> Any:
    """Returns `batch` as fake tensors, with `microbatch` rows; None stands for tokens and labels.

    keep_integers: whether integers keep their values. Further rows then repeat the first ones.
    """
    if batch is None:
        shape = (plan.microbatch, plan.run.data.sequence_length)
        batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("tokens", "labels")}
    grown = microbatch != plan.microbatch

    def make_fake_tensor(tensor: Tensor) -> Tensor:
        if keep_integers and _is_integer_with_values(tensor):
            with unset_fake_temporarily():
                rows = torch.arange(microbatch) % tensor.shape[0] if grown else slice(None)
                return tensor.cpu()[rows].clone() if tensor.ndim else tensor.cpu().clone()
        shape = (microbatch, *tensor.shape[1:]) if grown else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="cpu")

    with fakes:
        return tree_map_only(Tensor, make_fake_tensor, cast(object, batch))


@contextmanager
def disable_packing_detection() -> Generator[None]:
    """Makes transformers models treat each row as one document while active, as they do on real batches.

    These models check whether positions restart within a row, to separate packed documents. On fake tensors
    they cannot know, and build a mask, so that attention does not use its causal kernel (torch 2.13,
    transformers 5). A batch that separates documents has its own mask, and the check does not run.
    """
    masks, check = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    own = getattr(masks, check, None)
    if masks is None or own is None:
        yield
        return
    setattr(masks, check, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masks, check, own)


class ComputeIntegerValues(TorchDispatchMode):
    """Dispatch mode that computes operations on integers with values, within a FakeTensorMode.

    Models branch on, and take sizes from, the sizes of images and the places of their tokens. What depends on
    a fake tensor (activations, parameters) is fake.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        tensors = list_tensors((args, given))
        has_values = all(map(_has_values, tensors)) if tensors else _makes_integers(func, args, given=given)
        if not has_values:
            return func(*(_with_indices_for_masks(args) if func in _INDEXING else args), **given)
        with unset_fake_temporarily():
            result = func(*args, **given)
        return tree_map_only(Tensor, self._fake_if_large, result)

    def _fake_if_large(self, tensor: Tensor) -> Tensor:
        is_large = tensor.is_floating_point() and tensor.numel() > _MOST_KEPT
        return self.fakes.from_tensor(tensor) if is_large else tensor


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _is_integer_with_values(tensor: Tensor) -> bool:
    return _has_values(tensor) and not (tensor.is_floating_point() or tensor.is_complex())


def _makes_integers(func: Any, args: tuple[Any, ...], *, given: dict[str, Any]) -> bool:
    """Returns whether a function without tensor arguments makes a tensor of integers or booleans."""
    dtype = given.get("dtype")
    if given.get("device", "cpu") not in (None, "cpu", torch.device("cpu")):
        return False
    if dtype is None:
        numbers = args if func in _ARANGES else args[1:2] if func is _ATEN.full.default else ()
        return bool(numbers) and all(isinstance(number, int) for number in numbers)
    return not (dtype.is_floating_point or dtype.is_complex)


def _with_indices_for_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of an indexing of fake tensors, with masks of known values as indices."""
    indices: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype is torch.bool and _is_integer_with_values(index):
            with unset_fake_temporarily():
                indices += index.nonzero(as_tuple=True)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])
