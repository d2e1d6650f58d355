"""Guards for loops of one's own: an optimizer from before `shard`, and a state dict of one rank's shards.

Both mistakes are silent in torch: an optimizer of parameters that the model no longer has updates nothing,
and `torch.save` of a state dict on rank 0 keeps only that rank's shards.
"""

import inspect
import logging
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.distributed.agreement import rank, world_size
from fullshard.errors import ShardError

logger = logging.getLogger("fullshard")

_SAVERS = ("fullshard.", "torch.distributed.")  # whose code puts the ranks' shards together
_MARK = "_fullshard_was_replaced"


def guard_sharded_model(model: nn.Module, *, before: Iterable[weakref.ref[nn.Parameter]]) -> None:
    """Registers two guards: against optimizers of replaced parameters, and for the first state dict.

    An optimizer's first step raises ShardError if it holds parameters that the model had `before` it was
    sharded, and has no more. (Weak references keep none of them alive.) The first state dict logs a warning.
    """
    now = {id(one) for one in model.parameters()}
    for parameter in (one() for one in before):
        if parameter is not None and id(parameter) not in now:
            setattr(parameter, _MARK, True)
    _check_optimizers_at_their_first_step()
    if world_size() > 1 and rank() == 0:
        model.register_state_dict_post_hook(_ShardsNote())


@cache  # one hook in a process, for all optimizers
def _check_optimizers_at_their_first_step() -> None:
    checked = weakref.WeakSet[Optimizer]()

    def check(optimizer: Optimizer, _args: Any, _options: Any) -> None:  # signature: torch's hook
        if optimizer in checked:
            return
        checked.add(optimizer)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if replaced := sum(hasattr(one, _MARK) for one in held):
            raise ShardError(
                "the optimizer holds parameters that the model no longer has.",
                got=f"{replaced} of {len(held)} parameters",
                why="fullshard.shard replaced them by shards, so the model would never change",
                fix="build the optimizer after fullshard.shard(model, plan)",
            )

    register_optimizer_step_pre_hook(check)


class _ShardsNote:
    """Hook that prints, for the first state dict of a sharded model, which part of the model it holds."""

    def __init__(self) -> None:
        self._is_printed = False

    def __call__(self, _model: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        held = [one for one in state.values() if isinstance(one, DTensor)]
        is_sharded = any(not one.is_replicate() for tensor in held for one in tensor.placements)
        if self._is_printed or not is_sharded or _is_called_by_a_saver():
            return
        self._is_printed = True
        logger.warning(
            "model.state_dict() holds this rank's shards: torch.save on one rank loses those of the others. "
            "fullshard.save or torch.distributed.checkpoint.save, on every rank, save all; "
            "fullshard.full_state gathers whole tensors"
        )


def _is_called_by_a_saver() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        name = f"{frame.f_globals.get('__name__', '')}."
        if name.startswith(_SAVERS) and not name.startswith(f"{__name__}."):
            return True
        frame = frame.f_back
    return False
