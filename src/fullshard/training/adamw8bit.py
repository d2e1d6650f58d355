"""torchao's AdamW with 8-bit moments, in blocks of 256 values with one scale each (arXiv:2110.02861).

[Note: moments in a checkpoint]
Blocks are counted from the start of each rank's shard. A shard whose size is not a multiple of 256, or less
than 4096, keeps its moments in fp32. Which moments are quantised thus depends on the number of ranks.
Therefore checkpoints hold the moments in fp32 (8 bytes per parameter), and each load quantises them again. A
block with the same boundaries gets the same codes, and the same scale up to the last bit: the scale follows
from the block's largest value, whose code is the last (the first for a negative value).
"""

import importlib
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import dtensor_from_local_part, local_tensor
from fullshard.errors import MissingExtraError
from fullshard.system.dotted import import_quietly


@cache
def import_adamw8bit_class() -> type[torch.optim.Optimizer]:
    """Imports torchao's AdamW8bit, with a step that is not compiled on the CPU. Raises MissingExtraError."""
    try:
        base: Any = import_quietly("torchao.optim").AdamW8bit
    except ImportError as error:
        needed_for = 'optimizer.name = "adamw8bit"'
        raise MissingExtraError("lowbit", package="torchao", needed_for=needed_for) from error

    class AdamW8bit(base):
        def step(self, closure: Any = None) -> Any:
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                return super().step(closure)

    return cast(type[torch.optim.Optimizer], AdamW8bit)


def dequantize(value: Tensor) -> Tensor:
    """Returns `value` in fp32 if it is a quantised moment, and unchanged otherwise."""
    local = local_tensor(value)
    if not hasattr(local, "dequantize") or not hasattr(local, "codes"):
        return value
    full = cast(Any, local).dequantize()
    return full if local is value else dtensor_from_local_part(cast(DTensor, value), full)


def quantize_state_for_optimizer(
    optimizer: torch.optim.Optimizer, parameter: Tensor, *, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns a copy of `state` with its moments quantised, if `optimizer` keeps 8-bit moments.

    state: optimizer state of `parameter`, with moments in fp32
    """
    kept, new_buffer = dict(state), getattr(optimizer, "_new_buffer", None)
    for key, value in state.items():
        if new_buffer is not None and key != "step":
            kept[key] = new_buffer(parameter, key == "exp_avg")
            _quantize_into(local_tensor(kept[key]), local_tensor(value))
    return kept


@torch.no_grad()
def _quantize_into(kept: Any, full: Tensor) -> None:
    """Copies `full` into `kept`, quantised if `kept` is. See [Note: moments in a checkpoint]."""
    if type(kept).__name__ != "OptimState8bit":
        kept.copy_(full)
        return
    blocks = full.float().reshape(-1, kept.block_size)
    largest, smallest = blocks.amax(-1), blocks.amin(-1)
    if kept.signed:
        # The last of the 8-bit codes is 1. The first is slightly more than -1.
        largest = torch.where(largest > -smallest, largest, smallest / kept.qmap[0])
    scale = largest.clip(1e-12)
    quantised = importlib.import_module("torchao.optim.quant_utils").quantize_8bit_with_qmap
    kept.codes.copy_(quantised((blocks / scale.unsqueeze(-1)).view(full.shape), kept.qmap))
    kept.scale.copy_(scale)
