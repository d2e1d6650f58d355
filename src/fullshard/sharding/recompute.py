"""Activation checkpointing (recompute) and activation offload, applied per block.

Recompute: Chen et al., arXiv:1604.06174.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullshard.sharding.activation_offload import offload_activations
from fullshard.sharding.host_copy import HostCopy
from fullshard.spec.plan import DeviceType
from fullshard.spec.run import RecomputeSection

_ATEN = torch.ops.aten
# Matmuls and attention: most of a block's FLOPs, but less than half of the bytes that it would save.
# Looked up by name, since a build of torch has only the attention kernels of its own devices.
_SAVED_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_MATMULS = frozenset(
    getattr(_ATEN, name).default for name in ("mm", "addmm", "bmm", "baddbmm") if hasattr(_ATEN, name)
)
SAVED_OPERATIONS = frozenset(getattr(_ATEN, name).default for name in _SAVED_NAMES if hasattr(_ATEN, name))


def apply_recompute(
    blocks: Sequence[nn.Module],
    section: RecomputeSection,
    *,
    compiled: bool = False,
    device: DeviceType = "cpu",
    copier: HostCopy | None = None,
) -> None:
    """Makes the blocks recompute or offload the activations that `section` says not to save on the device.

    The block's `forward` is replaced, not the block, so that names in the state dict do not change.

    compiled: whether the blocks are going to be compiled; mode `offload` is applied after compilation instead
    device: the device on which the blocks will run
    copier: copier of mode `offload`, in place of the device's own
    """
    if section.mode == "none":
        return
    if section.mode == "offload":
        chosen = blocks[:: section.period]
        offload_activations(chosen, least=section.offload_min_fraction, device=device, copier=copier)
        return
    recomputed = partial(checkpoint, use_reentrant=False)
    if section.mode == "selective":
        # The compiler reads torch's contexts, and must see all operations.
        contexts = partial(_contexts, section.save_matmuls, compiled=compiled)
        recomputed = partial(recomputed, context_fn=contexts)
    for block in blocks[:: section.period]:
        block.forward = partial(recomputed, block.forward)


class _SavePolicy:
    """Torch's policy for selective recompute: saves attention and every k-th matmul of a block.

    Forward and recompute count apart, and so choose the same matmuls.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation not in SAVED_OPERATIONS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation in _MATMULS:
            self._matmuls[context.is_recompute] += 1
            if (self._matmuls[context.is_recompute] - 1) % self.every:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def _contexts(save_matmuls: int, *, compiled: bool) -> tuple[Any, Any]:
    saving, giving = create_selective_checkpoint_contexts(_SavePolicy(save_matmuls))
    return (saving, giving) if compiled else (_SavePolicyForSaved(saving), _SavePolicyForSaved(giving))


class _SavePolicyForSaved(TorchDispatchMode):
    """Passes SAVED_OPERATIONS, and no others, to one of torch's contexts.

    Torch's contexts count every operation, and raise if forward and recompute differ. A unit inside the block
    is gathered in only one of them, by operations that are not in SAVED_OPERATIONS.
    """

    def __init__(self, context: TorchDispatchMode) -> None:
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPERATIONS:
            return self.context.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
