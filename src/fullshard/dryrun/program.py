"""Program of a dry run, as names that another process can import."""

import importlib
from typing import Any

from fullshard.errors import SpecError
from fullshard.spec.value import FrozenModel


class Program(FrozenModel):
    """Names (`module:function`) of the functions of a dry run; the defaults train the reference decoder.

    model       model(plan) -> nn.Module; called with the meta device as the default device
    loss        loss(model, microbatch) -> a scalar, or (sum, count)
    optimizer   optimizer(model, plan) -> torch.optim.Optimizer
    batch       batch(plan) -> one microbatch: any nest of tensors
    """

    model: str = "fullshard.dryrun.decoder:decoder"
    loss: str = "fullshard.training.loss:next_token_loss"
    optimizer: str = "fullshard.training.optimizer:build_optimizer"
    batch: str = "fullshard.dryrun.decoder:token_batch"


def look_up(name: str) -> Any:
    """Returns the function with this name. Raises SpecError if there is none."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        raise SpecError(f"{name!r} cannot be imported.", got=str(error), fix="module:function") from error
    if not callable(found):
        raise SpecError(f"{name!r} is no function.", fix="module:function")
    return found
