"""Applies the plan's precision: torch dtypes, FSDP2's mixed-precision policy, and dtypes of buffers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fullshard.spec.plan import Dtype, Precision
from fullshard.torch_private.tensors import registered_buffers

TORCH_DTYPE: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fsdp_mixed_precision_policy(precision: Precision, *, is_root: bool) -> MixedPrecisionPolicy:
    """Returns FSDP2's mixed-precision policy for one unit. Only the root unit casts its outputs."""
    output = TORCH_DTYPE[precision.output] if precision.output and is_root else None
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[precision.param],
        reduce_dtype=TORCH_DTYPE[precision.reduce],
        output_dtype=output,
        cast_forward_inputs=precision.cast_inputs,
    )


def cast_buffers(model: nn.Module, precision: Precision) -> None:
    """Casts the model's floating-point buffers to the plan's buffer dtype; does nothing if that is unset."""
    if precision.buffer is None:
        return
    dtype = TORCH_DTYPE[precision.buffer]
    floating = (buffer for buffer in model.buffers() if buffer.is_floating_point())
    replace_buffers_by_id(model, {id(buffer): buffer.to(dtype) for buffer in floating})


def replace_buffers_by_id(model: nn.Module, replaced: Mapping[int, Tensor]) -> None:
    """Replaces the model's buffers by other tensors. `replaced` maps the id of a buffer to its new tensor."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) in replaced:
                registered_buffers(module)[name] = replaced[id(buffer)]
