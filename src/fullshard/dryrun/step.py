"""Step of a dry run: the same calls to FSDP2, in the same order, as in `training.step`.

The gradient norm is left out; it takes one scalar per gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.dryrun.recorder import Recorder
from fullshard.spec.plan import Plan

Loss = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Any]]
MakeOptimizer = Callable[[nn.Module, Plan], torch.optim.Optimizer]
MakeBatch = Callable[[Plan], Any]

OPTIMIZER_STEP = "optimizer step"


def dry_step(
    model: nn.Module,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: MakeBatch,
    recorder: Recorder,
) -> None:
    """Runs `plan.accumulation` microbatches and the update. Reports each phase to `recorder`."""
    sums = torch.zeros(4, dtype=torch.float64)  # ranks add up: loss, count, squared norm, stop
    for index in range(plan.accumulation):
        recorder.enter(f"microbatch {index + 1}")
        if isinstance(model, FSDPModule) and plan.accumulation > 1:
            _set_sync(model, plan, last=index == plan.accumulation - 1)
        given = batch(plan)  # kept until the next batch is created, as in training
        value = loss(model, given)
        total = value[0] if isinstance(value, tuple) else value
        (total * 1.0).backward()
        sums[0] += total.detach()
    recorder.enter(OPTIMIZER_STEP)
    optimizer.step()
    model.zero_grad(set_to_none=True)


def _set_sync(model: FSDPModule, plan: Plan, *, last: bool) -> None:
    model.set_requires_gradient_sync(last or plan.sync_each_microbatch)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last or plan.reshard_after_forward is not False)
