"""Adapters of parameters themselves, such as stacked experts: the forward of peft's ParamWrapper.

[Note: adapted parameters]
peft puts a wrapper around a module whose parameter W it adapts. While the module computes, W is

    W + scale · B A                for each expert, if W is (experts, rows, columns)

A has the rows of all experts, (experts · rank, in), and B their columns, (out, rank · experts), in which
neighbouring columns belong to different experts. peft registers a parametrization in every forward. That
moves W out of the module, where FSDP2 puts what it gathers. Here the sum takes the place of W in the module
during the forward, with peft's arithmetic. A, B and W are in one unit, so that all are gathered then.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import SpecError
from fullshard.torch_private.tensors import registered_parameters

READER = "_fullshard_reader"
"""Attribute of a module with packed parameters: a function that returns the matrices of one of them."""
_BASE = re.compile(r"\.base_layer(?=\.)")


def name_in_base(name: str) -> str:
    """Returns the name that a parameter of an adapted model has in its base model."""
    return _BASE.sub("", name)


def iterate_parameter_wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (full name, peft's wrapper) for every adapted parameter of `model`, sharded or not."""
    for name, module in model.named_modules():
        if hasattr(module, "parameter_name") and hasattr(module, "base_layer"):
            yield name, module


def compute_with_plain_sums(model: nn.Module) -> None:
    """Makes the wrappers in `model` compute without parametrizations. See [Note: adapted parameters].

    Raises SpecError for releases of peft that compute the sum otherwise.
    """
    for name, wrapper in iterate_parameter_wrappers(model):
        if not hasattr(wrapper, "get_delta_factors"):
            raise SpecError("this peft adapts parameters in another way.", got=name, fix="peft 0.21 or newer")
        wrapper.forward = partial(_compute_with_sum, wrapper)


@torch.compiler.disable  # the compiler does not see a tensor in the place of a parameter
def _compute_with_sum(  # signature: that of the module in the wrapper, after the wrapper
    wrapper: Any, *args: Any, **kwargs: Any
) -> Any:
    if wrapper.disable_adapters:
        return wrapper.base_layer(*args, **kwargs)
    base, key = wrapper.get_base_layer(), wrapper.parameter_name
    parameters: dict[str, Any] = registered_parameters(base)
    (adapter,), own = wrapper.active_adapters, parameters[key]
    left, right, scale = (
        wrapper.lora_B[adapter].weight,
        wrapper.lora_A[adapter].weight,
        wrapper.scaling[adapter],
    )
    try:
        if not own.is_floating_point():  # also for peft, which casts the factors to the parameter's dtype
            parameters[key] = getattr(base, READER)(key, dtype=right.dtype)
        if own.ndim == 3:
            left, right, scale = wrapper.get_delta_factors(adapter)
        parameters[key] = add_low_rank(parameters[key], left, right, scale)
        return wrapper.base_layer(*args, **kwargs)
    finally:
        parameters[key] = own


# An operation of its own: selective recompute keeps results of matmuls, and this one is as large as W.
@torch.library.custom_op("fullshard::add_low_rank", mutates_args=())
def add_low_rank(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:  # signature: torch's
    """Returns weight + scale · left @ right, computed as peft does: matrices, or stacks of them."""
    if weight.ndim == 3:
        return torch.baddbmm(weight, left, right, alpha=scale)
    return weight + (left @ right * scale).to(weight.dtype)


@add_low_rank.register_fake
def _empty_sum(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:  # signature: torch's
    return torch.empty_like(weight)


def _save_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # signature: torch's
    _, left, right, ctx.scale = inputs
    ctx.save_for_backward(left, right)


@partial(add_low_rank.register_autograd, setup_context=_save_factors)
def _factor_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
    left, right = ctx.saved_tensors
    of_left = gradient @ right.transpose(-2, -1) * ctx.scale
    of_right = left.transpose(-2, -1) @ gradient * ctx.scale
    return gradient if ctx.needs_input_grad[0] else None, of_left, of_right, None
