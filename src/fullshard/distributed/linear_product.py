"""The function by which a linear module multiplies: fp8 replaces it, and tensor parallelism calls it."""

from typing import Protocol, cast

from torch import Tensor, nn

_ATTRIBUTE = "_fullshard_product"


class LinearProduct(Protocol):
    """A function that returns x @ weight.T + bias, for x (..., in features), weight (out, in), bias (out)."""

    def __call__(self, x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor: ...


def set_product(linear: nn.Module, product: LinearProduct) -> None:
    setattr(linear, _ATTRIBUTE, product)


def find_product(linear: nn.Module) -> LinearProduct | None:
    """Returns the product that `set_product` gave `linear`; None if it was given no product."""
    return cast(LinearProduct | None, vars(linear).get(_ATTRIBUTE))
