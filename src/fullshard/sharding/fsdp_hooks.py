"""FSDP2's hooks in less processor time.

FSDP2 keeps its hooks from torch's compiler by `torch._dynamo.disable(hook)(...)`. That makes a wrapper each
time that a hook runs, which is five times for each unit and microbatch. It notices the end of a unit's
backward by an autograd function over all tensors in the unit's inputs, for which torch inspects a signature
each time.

Names with a leading underscore are private ones of FSDP2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def lighten_hooks(unit: FSDPModule) -> None:
    """Replaces the hooks of `unit`, which `fully_shard` has just registered, by ones that take less time."""
    state: Any = unit._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for one in getattr(handle, "handles", (handle,)):
            registered: dict[int, Callable[..., Any]] = one.hooks_dict_ref()
            registered[one.id] = _disable_compiler(registered[one.id])
    state._pre_backward = _disable_compiler(state._pre_backward)
    if (group := state._fsdp_param_group) is not None:
        group.pre_backward = _disable_compiler(group.pre_backward)
        group.post_backward = _disable_compiler(group.post_backward)
        group._register_post_backward_hook = partial(
            _notice_end_of_backward, group, group._register_post_backward_hook
        )


def _disable_compiler(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `hook`, which FSDP2 has decorated, with one wrapper instead of the decorator."""
    decorated: Any = getattr(hook, "__func__", hook)
    if not hasattr(decorated, "__wrapped__"):  # another release of torch
        return hook
    function = decorated.__wrapped__
    bound = function.__get__(hook.__self__) if decorated is not hook else function  # type: ignore[attr-defined]
    return torch.compiler.disable(bound, recursive=True)


def _notice_end_of_backward(  # signature: FSDP2's, after the first two
    group: Any, for_any_inputs: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a unit's inputs such that the end of its backward calls FSDP2's `post_backward`."""
    first, *others = args or (None,)
    is_trained = isinstance(first, Tensor) and first.requires_grad and torch.is_grad_enabled()
    if is_trained and all(map(_needs_no_gradient, (*others, *kwargs.values()))):
        return (_EndOfBackward.apply(first, group), *others), kwargs
    return for_any_inputs(args, kwargs)


def _needs_no_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad
    return value is None or isinstance(value, (nn.Module, int, float, str))


class _EndOfBackward(torch.autograd.Function):
    """FSDP2's function for the end of a unit's backward, with a single input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:  # signature: torch's
        ctx.group = group
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # signature: torch's
        ctx.group.post_backward()
        return *grad_outputs, None
