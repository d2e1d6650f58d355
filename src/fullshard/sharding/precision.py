"""The plan's dtypes as torch's, and as the engine's policy."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fullshard.spec.plan import Dtype, Plan, Precision
from fullshard.spec.run import UnitOverride
from fullshard.spec.unit import UnitSettings

TORCH_DTYPE: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def unit_precision(override: UnitOverride | None, plan: Plan) -> Precision:
    """The plan's precision, or the unit's own where its override names one."""
    return UnitSettings.of(plan, override, kept=False).precision


def engine_policy(precision: Precision, *, is_root: bool) -> MixedPrecisionPolicy:
    """What `fully_shard` takes. The output dtype is the root's alone: blocks hand on what they compute in."""
    output = TORCH_DTYPE[precision.output] if precision.output and is_root else None
    return MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[precision.param],
        reduce_dtype=TORCH_DTYPE[precision.reduce],
        output_dtype=output,
        cast_forward_inputs=precision.cast_inputs,
    )


def cast_buffers(model: nn.Module, precision: Precision) -> None:
    """Casts floating-point buffers to the plan's buffer dtype, which the engine has no word for.

    Complex and integer buffers keep theirs. A buffer that several modules share stays shared.
    """
    if precision.buffer is None:
        return
    dtype = TORCH_DTYPE[precision.buffer]
    cast = {id(buffer): buffer.to(dtype) for buffer in model.buffers() if buffer.is_floating_point()}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) in cast:
                module._buffers[name] = cast[id(buffer)]  # pyright: ignore[reportPrivateUsage]
