"""Gathers a unit of several modules before the backward of any of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.torch_private.fsdp import gather_before_backward, parameter_groups
from fullshard.torch_private.tensors import tree_leaves


def gather_before_backward_of_each_module(modules: Sequence[nn.Module]) -> None:
    """Makes one FSDP2 unit of several modules gather before the backward of whichever comes first.

    FSDP2 watches only the outputs of the module that ran last. If these need no gradient (a frozen embedding
    of positions), or the loss does not depend on them (a pooler), the other modules would run their backward
    on parameters that were freed after forward.
    """
    unit = cast(FSDPModule, modules[0])
    if len(modules) == 1 or not parameter_groups(unit):
        return
    gather_if_freed = partial(gather_before_backward, unit)

    def watch_outputs(_module: nn.Module, _args: Any, output: Any) -> None:  # signature: torch's forward hook
        if not torch.is_grad_enabled():
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(gather_if_freed)

    for module in modules:
        module.register_forward_hook(watch_outputs)
