"""The plan's dtypes in torch, modules that it computes in other dtypes than transformers, and buffers."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.distributed.agreement import rank
from fullshard.spec.plan import Dtype, Precision
from fullshard.torch_private.tensors import non_persistent_buffers, registered_buffers

logger = logging.getLogger("fullshard")

TORCH_DTYPE: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def warn_of_modules_to_keep_in_fp32(model: nn.Module, precision: Precision) -> None:
    """Logs which modules transformers would compute in fp32, where FSDP2 has one dtype for each unit."""
    asked: set[Any] = set()
    for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        asked |= set(getattr(model, key, None) or ())
    kept = sorted(
        part for part in map(str, asked) if any(part in name for name, _ in model.named_parameters())
    )
    if kept and precision.param != "fp32" and rank() == 0:
        logger.warning(
            "transformers keeps %s of %s in fp32, and this run computes them in %s. For fp32: "
            'precision.mode = fp32, or units of their own with precision = "fp32" (sharding.units)',
            ", ".join(kept),
            type(model).__name__,
            precision.param,
        )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's buffers that a state dict has, by name."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in non_persistent_buffers(module)
    }


def replace_buffers_by_id(model: nn.Module, replaced: Mapping[int, Tensor]) -> None:
    """Replaces the model's buffers by other tensors. `replaced` maps the id of a buffer to its new tensor."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) in replaced:
                registered_buffers(module)[name] = replaced[id(buffer)]
