"""Applies activation checkpointing (recompute) and activation offload, per block.

Recompute: Chen et al., arXiv:1604.06174.

[Note: buffers of recomputed blocks]
A forward may change buffers of its block: running statistics, codebooks. The recomputed forward gets copies
of the values with which the first one began, so it computes the same, and what it changes is discarded.
Copies, since autograd saves the buffers that it reads. A graph of forward and recompute cannot have such
copies: what reads a buffer after its change would be recomputed with the later value. So a compiled block
whose first forward changes buffers, other than counts and statistics that it does not read, runs eagerly.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard.errors import ShardError
from fullshard.models.experts import Router
from fullshard.parallel.activation_offload import HostCopier, offload_activations
from fullshard.spec.plan import DeviceType
from fullshard.spec.settings.train_section import RecomputeSection
from fullshard.torch_private.fake_tensors import TorchDispatchMode
from fullshard.torch_private.tensors import version

# Matmuls and attention: most of a block's FLOPs, but less than half of the bytes that the block would save.
# By name, since a build of torch has only the kernels of its own devices, and some exist only once imported.
_MATMUL_NAMES = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"))
_ATTENTION_KINDS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_SAVED_NAMES = _MATMUL_NAMES | {
    *(f"aten::{name}" for name in ("convolution", "_grouped_mm", "_scaled_grouped_mm")),
    *(f"aten::_scaled_dot_product_{kind}" for kind in (*_ATTENTION_KINDS, "fused_attention_overrideable")),
    *(f"aten::_{kind}_attention_forward" for kind in ("flash", "efficient", "cudnn")),
    *("torch_attn::_varlen_attn", "flex_attention"),
    "fullshard::_grouped_mm",
    # Collectives, which would wait for all ranks again, and the choice of experts, on which sizes of some of
    # them depend. A gathered sequence is not saved: it takes the memory of the parts of all ranks.
    *(f"fullshard::{name}" for name in ("reduce_sequence", "reduce_over_ranks")),
    *(f"fullshard::{name}" for name in ("exchange_counts", "exchange_rows")),
    "aten::topk",
    "aten::max",  # one number per tensor, by which fp8 scales it: recomputing reads the whole tensor again
}
# Modules whose forward draws no random numbers. Around others, torch keeps the state of the generators.
_WITHOUT_RANDOMNESS = (
    "fullshard.models.",
    *(f"torch.nn.modules.{one}" for one in ("linear", "normalization")),
)
OperationPolicy = Callable[[Any], CheckpointPolicy]
LEAST_OFFLOADED = 1 / 32
"""Least size of a storage that moves to the host, as a fraction of the bytes of the block's input."""


def is_savable_operation(operation: Any) -> bool:
    """Returns whether selective recompute may save an operation's results: an OpOverload, or any callable."""
    name = getattr(operation, "name", None)
    return callable(name) and name() in _SAVED_NAMES


def apply_recompute(
    blocks: Sequence[nn.Module], section: RecomputeSection, *, compiled: Collection[nn.Module] = ()
) -> None:
    """Makes the blocks to which `section` applies recompute activations, if its mode says so.

    The block's `forward` is replaced, not the block, so that names in the state dict do not change.

    compiled: the blocks that are compiled afterwards

    Raises ShardError if there are fewer than `section.blocks`.
    """
    check_recomputed_block_count(section, len(blocks))
    for block in _chosen_blocks(blocks, section) if section.mode in ("full", "selective") else []:
        is_random = not all(type(one).__module__.startswith(_WITHOUT_RANDOMNESS) for one in block.modules())
        options = {"use_reentrant": False, "preserve_rng_state": is_random}
        recomputed = partial(_run_torch_checkpoint_keeping_buffers, block, block.forward, **options)
        # A recurrent layer writes into the results of its matmuls. Torch would save these, and not notice.
        is_recurrent = any(isinstance(one, nn.RNNBase | nn.RNNCellBase) for one in block.modules())
        if section.mode == "selective" and not is_recurrent:
            # The compiler reads torch's contexts, and must see all operations.
            own = partial(_selective_recompute_contexts, section.save_matmuls, compiled=block in compiled)
            recomputed = partial(recomputed, context_fn=own)
        block.forward = recomputed


def apply_activation_offload(
    blocks: Sequence[nn.Module],
    section: RecomputeSection,
    *,
    device: DeviceType,
    copier: HostCopier | None = None,
) -> None:
    """Makes the blocks to which `section` applies keep saved tensors on the host, if it offloads.

    Comes after `apply_recompute` and the compiler: the hooks see what a block saves when it is recomputed,
    its inputs, and what a compiled one saves, as eager code does.

    device: the device on which the blocks will run
    copier: the copier to use; None chooses the device's
    """
    if section.offloads:
        chosen = _chosen_blocks(blocks, section)
        offload_activations(chosen, smallest_fraction=LEAST_OFFLOADED, device=device, copier=copier)


def _chosen_blocks(blocks: Sequence[nn.Module], section: RecomputeSection) -> list[nn.Module]:
    return [block for position, block in enumerate(blocks) if section.applies_to(position)]


class BufferSnapshot:
    """Copies of the buffers of `block`, made before a forward to find those that it changes."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        own = _buffers(block)
        copies = {id(one): one.detach().clone() for one in own.values()}  # a shared buffer has one copy
        self._before = {slot: (one, version(one), copies[id(one)]) for slot, one in own.items()}

    def find_old_values_of_changed_buffers(
        self, *, statistics: bool
    ) -> dict[tuple[nn.Module, str], Tensor | None]:
        """Returns the copies of buffers that have changed since, by module and name; None if it is new.

        statistics: also those that no forward reads in training, all of which count as changed
        """
        found: dict[tuple[nn.Module, str], Tensor | None] = {}
        for slot, now in _buffers(self._block).items():
            one, count, copied = self._before.get(slot, (None, 0, None))
            is_statistic = _updates_running_statistics(slot[0])
            if (now is not one or version(now) != count or is_statistic) and (statistics or not is_statistic):
                found[slot] = copied
        return found

    def restore(self) -> None:
        """Gives all buffers the values that they had before the forward."""
        with torch.no_grad():
            for (module, name), (one, _version, copied) in self._before.items():
                setattr(module, name, one)
                one.copy_(copied)


def _buffers(block: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    return {(owner, key): one for owner in block.modules() for key, one in owner.named_buffers(recurse=False)}


def _updates_running_statistics(module: nn.Module) -> bool:
    """Returns whether `module` changes buffers that no forward reads in training: torch norms, our routers.

    Norms raise no version.
    """
    return module.training and (getattr(module, "track_running_stats", False) or isinstance(module, Router))


def _run_torch_checkpoint_keeping_buffers(  # signature: torch's
    block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls torch's `checkpoint`. See [Note: buffers of recomputed blocks]."""
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, **kwargs)
    return checkpoint(_RepeatableForward(block, forward), *args, **kwargs)


class _RepeatableForward:
    """One forward of `block`, each later call of which repeats the first, and changes no buffer.

    See [Note: buffers of recomputed blocks].
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._block, self._forward = block, forward
        # The buffers that the first call changed, as it found them; None: it made them
        self._found: dict[tuple[nn.Module, str], Tensor | None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # signature: the block's own
        if self._found is None:
            if not torch.is_grad_enabled():
                return self._forward(*args, **kwargs)
            found = BufferSnapshot(self._block)
            result = self._forward(*args, **kwargs)
            self._found = found.find_old_values_of_changed_buffers(statistics=True)
            return result
        later = {(module, name): getattr(module, name) for module, name in self._found}
        # Modules that share a buffer share its copy.
        copies = {id(one): one.detach().clone() for one in self._found.values() if one is not None}
        for (module, name), one in self._found.items():
            setattr(module, name, None if one is None else copies[id(one)])
        try:
            return self._forward(*args, **kwargs)
        finally:
            for (module, name), one in later.items():
                setattr(module, name, one)


def is_recomputed(block: nn.Module) -> bool:
    """Returns whether `apply_recompute` has made `block` recompute its activations."""
    return getattr(block.forward, "func", None) is _run_torch_checkpoint_keeping_buffers


def check_recomputed_block_count(section: RecomputeSection, blocks: int) -> None:
    """Raises ShardError if more blocks are to recompute than there are."""
    if section.blocks is not None and section.blocks > blocks:
        raise ShardError(
            f"only {blocks} of {section.blocks} blocks that are to recompute exist.",
            got=f"recompute.blocks = {section.blocks}",
            fix=f"recompute.blocks = {blocks} or fewer, or leave it out to recompute all" if blocks else "",
        )


def block_recompute_policy(section: RecomputeSection) -> OperationPolicy | None:
    """Returns whether a block saves or recomputes each operation; None in modes `none`, `offload`, `auto`."""
    if section.mode in ("none", "offload", "auto"):
        return None
    if section.mode != "selective":
        return lambda _operation: CheckpointPolicy.PREFER_RECOMPUTE
    policy = _SelectiveRecomputePolicy(section.save_matmuls)
    return partial(policy, SelectiveCheckpointContext(is_recompute=False))


class _SelectiveRecomputePolicy:
    """Policy function for selective recompute: saves attention and every `every`-th matmul of a block.

    Matmuls of forward and of recompute are counted separately, so that both choose the same ones.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if not is_savable_operation(operation):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation.name() in _MATMUL_NAMES:
            self._matmuls[context.is_recompute] += 1
            if (self._matmuls[context.is_recompute] - 1) % self.every:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def _selective_recompute_contexts(save_matmuls: int, *, compiled: bool) -> tuple[Any, Any]:
    """Returns the contexts for forward and for recompute. `save_matmuls`: save every n-th matmul."""
    save, reuse = create_selective_checkpoint_contexts(_SelectiveRecomputePolicy(save_matmuls))
    return (
        (save, reuse) if compiled else (_SavableOperationsOnlyMode(save), _SavableOperationsOnlyMode(reuse))
    )


class _SavableOperationsOnlyMode(TorchDispatchMode):
    """Wraps one of torch's selective-recompute contexts, and passes only savable operations to it.

    Torch's contexts count every operation, and raise if forward and recompute differ. They may differ in the
    operations that gather a unit inside the block, none of which is savable.
    """

    def __init__(self, context: TorchDispatchMode) -> None:
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_savable_operation(func):
            return self.context.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
