"""FSDP2's hooks without a new wrapper in each call.

FSDP2 keeps its hooks from torch's compiler by `torch._dynamo.disable(hook)(...)`. That makes a wrapper each
time that a hook runs, which is five times for each unit and microbatch.

Names with a leading underscore are private ones of FSDP2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def wrap_hooks_once(unit: FSDPModule) -> None:
    """Replaces the hooks of `unit`, which `fully_shard` has just registered, by ones that are wrapped now."""
    state: Any = unit._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for one in getattr(handle, "handles", (handle,)):
            registered: dict[int, Callable[..., Any]] = one.hooks_dict_ref()
            registered[one.id] = _disable_compiler(registered[one.id])
    state._pre_backward = _disable_compiler(state._pre_backward)
    if (group := state._fsdp_param_group) is not None:
        group.pre_backward = _disable_compiler(group.pre_backward)
        group.post_backward = _disable_compiler(group.post_backward)


def _disable_compiler(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `hook`, which FSDP2 has decorated, with one wrapper instead of the decorator."""
    decorated: Any = getattr(hook, "__func__", hook)
    if not hasattr(decorated, "__wrapped__"):  # another release of torch
        return hook
    function = decorated.__wrapped__
    bound = function.__get__(hook.__self__) if decorated is not hook else function  # type: ignore[attr-defined]
    return torch.compiler.disable(bound, recursive=True)
