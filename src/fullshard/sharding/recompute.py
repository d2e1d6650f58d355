"""What is computed again in backward, not saved: Chen et al., arXiv:1604.06174."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
SAVED_OPERATIONS = frozenset(getattr(_ATEN, name).default for name in _SAVED_NAMES if hasattr(_ATEN, name))

Contexts = Callable[[], tuple[Any, Any]]


def apply_recompute(
    blocks: Sequence[nn.Module], section: RecomputeSection, *, compiled: bool = False
) -> None:
    """Makes the blocks compute again in backward what `section` says not to save.

    The block's `forward` is replaced, not the block: names in the state dict stay as they are. `compiled`: it
    is going to be compiled.
    """
    if section.mode == "none":
        return
    contexts: Contexts | None = None
    if section.mode == "selective":
        # The compiler reads torch's contexts, and must see all operations.
        whole = partial(create_selective_checkpoint_contexts, _save_matmuls)
        contexts = whole if compiled else _contexts_for_saved
    step = section.every if section.mode == "every" else 1
    for block in blocks[::step]:
        block.forward = _recomputed(block.forward, contexts)


def _recomputed(forward: Callable[..., Any], contexts: Contexts | None) -> Callable[..., Any]:
    if contexts is None:
        return partial(checkpoint, forward, use_reentrant=False)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


def _save_matmuls(  # signature: torch's policy of selective recompute
    _context: Any, operation: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    saved = operation in SAVED_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts_for_saved() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    saving, giving = create_selective_checkpoint_contexts(_save_matmuls)
    return _ForSaved(saving), _ForSaved(giving)


class _ForSaved(TorchDispatchMode):
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
