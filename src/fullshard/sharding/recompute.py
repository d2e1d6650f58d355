"""What is computed again in backward, or waits for it on the host, and is not saved on the device.

Recompute: Chen et al., arXiv:1604.06174.
"""

from collections.abc import Callable, Sequence
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
# Looked up by name, since a build of torch has the attention kernels of its own devices only.
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

Contexts = Callable[[], tuple[Any, Any]]


def apply_recompute(
    blocks: Sequence[nn.Module],
    section: RecomputeSection,
    *,
    compiled: bool = False,
    device: DeviceType = "cpu",
    lane: HostCopy | None = None,
) -> None:
    """Makes the blocks compute again in backward what `section` says not to save.

    The block's `forward` is replaced, not the block: names in the state dict stay as they are. `compiled`: it
    is going to be compiled. `device`: where it will run. `lane`: what copies in mode `offload`, in place of
    the device's own; that mode is applied to what is compiled already, not to what will be.
    """
    if section.mode == "none":
        return
    if section.mode == "offload":
        chosen = blocks[:: section.period]
        offload_activations(chosen, least=section.offload_min_fraction, device=device, lane=lane)
        return
    contexts: Contexts | None = None
    if section.mode == "selective":
        # The compiler reads torch's contexts, and must see all operations.
        contexts = partial(_contexts, section.save_matmuls, compiled=compiled)
    for block in blocks[:: section.period]:
        block.forward = _recomputed(block.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Contexts | None) -> Callable[..., Any]:
    if contexts is None:
        return partial(checkpoint, forward, use_reentrant=False)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


class _SavePolicy:
    """Torch's policy of selective recompute: attention and every k-th matmul of a block are saved.

    Forward and what is computed again count for themselves, so that both choose the same ones.
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
    """Shows SAVED_OPERATIONS to one of torch's contexts, and no other.

    These count every operation, and break off where forward and backward differ. But a unit inside of the
    block is gathered in one and not in the other, by operations that are none of these.
    """

    def __init__(self, context: TorchDispatchMode) -> None:
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPERATIONS:
            return self.context.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
