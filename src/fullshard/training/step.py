"""One step: microbatches forward and backward, the true norm, the update or its refusal.

[Note: one denominator]
The mean of means is wrong when microbatches hold different numbers of valid tokens. So each microbatch's
loss is a sum, divided before backward by a nominal count (the tokens of a rank's step, which keeps fp16 in
range), and the gradient is multiplied after it by nominal / actual, where the actual count is summed over
ranks and microbatches in the one all-reduce that a step makes besides the engine's. The nominal count is
rounded up to a power of two: dividing by it rounds nothing, so what half precision rounds in backward does
not depend on the number of ranks.

[Note: one all-reduce]
That all-reduce carries the loss sum, the count, the squared norm and whether a rank was asked to stop, in
fp64. All ranks so come to the same decision: to update, to skip, to stop.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from fullshard.errors import TrainError
from fullshard.profiler.memory import local_tensor
from fullshard.spec.plan import Plan
from fullshard.training.loss import Loss
from fullshard.training.state import TrainState, shard_replicas


@dataclass(frozen=True)
class StepResult:
    """Global figures of one step, the same on all ranks. `loss`: mean over valid tokens. `grad_norm`: before
    clipping. `count`: valid tokens (or microbatches, for a loss that is a mean). `stop`: a rank asked for it.
    """

    loss: float
    grad_norm: float
    count: int
    skipped: bool
    stop: bool


def run_step(
    state: TrainState,
    plan: Plan,
    *,
    microbatches: Iterable[Any],
    loss: Loss,
    learning_rate: float,
    stop: bool = False,
) -> StepResult:
    """Trains `state` on exactly `plan.accumulation` microbatches of this rank. Collective.

    A loss or norm that is not finite on any rank, or a step without a valid token on any, leaves parameters
    and optimizer as they are on all ranks.

    Raises TrainError for another number of microbatches, and for a loss that is none (see `loss.Loss`).
    """
    device = _device(state.model)
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, count, squared norm, stop
    sums[3] = float(stop)
    nominal = _accumulate(state, plan, microbatches=microbatches, loss=loss, sums=sums)
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    _reduce_unsharded(gradients)
    # Ranges of a profiler's trace: see `fullshard.profiler.trace`.
    with record_function("fullshard::optimizer"):
        sums[2] = _squared_norm(gradients, plan.world_size)
    if plan.world_size > 1:
        dist.all_reduce(sums)
    loss_sum, count, squared_norm, stops = cast(list[float], sums.tolist())
    # The engine averages over ranks what is to be summed; see [Note: one denominator].
    unscale = nominal * plan.world_size / (count * state.loss_scale.scale) if count > 0 else math.nan
    norm = math.sqrt(squared_norm) * unscale if squared_norm >= 0 else math.nan
    finite = math.isfinite(loss_sum) and math.isfinite(norm)
    if finite:
        factor = unscale * _clip(norm, plan)
        with record_function("fullshard::optimizer"):
            _update(state.optimizer, gradients, factor=factor, learning_rate=learning_rate)
    # The model's, not the optimizer's: it may hold fewer, and the others' would add up.
    state.model.zero_grad(set_to_none=True)
    if count > 0:
        state.loss_scale.update(finite=finite)
    mean = loss_sum / count if count > 0 else math.nan
    return StepResult(mean, norm, int(count), skipped=not finite, stop=stops > 0)


def _accumulate(
    state: TrainState, plan: Plan, *, microbatches: Iterable[Any], loss: Loss, sums: Tensor
) -> int:
    """Forward and backward of every microbatch; adds up loss and count. Returns the nominal count."""
    engine = state.model if isinstance(state.model, FSDPModule) else None
    nominal = 1
    for index, batch in enumerate(_exactly(microbatches, plan.accumulation)):
        if engine is not None and plan.accumulation > 1:
            _set_sync(engine, plan, last=index == plan.accumulation - 1)
        with record_function("fullshard::compute"):
            value = loss(state.model, to_device(batch, sums.device))
            total, count = _sum_and_count(value)
            # A sum is over the tokens of the batch; a mean counts as one thing.
            is_sum = isinstance(value, tuple)
            own = plan.run.tokens_per_step // plan.world_size if is_sum else plan.accumulation
            nominal = 1 << (own - 1).bit_length()
            (total * (state.loss_scale.scale / nominal)).backward()
        sums[0] += total.detach()
        sums[1] += count
    return nominal


def _exactly(microbatches: Iterable[Any], expected: int) -> Iterator[Any]:
    """Raises TrainError for more or fewer: ranks that differ would wait for each other forever."""
    count = 0
    for batch in microbatches:
        if count == expected:
            raise _wrong_number(f"more than {expected}", expected)
        yield batch
        count += 1
    if count < expected:
        raise _wrong_number(str(count), expected)


def _wrong_number(got: str, expected: int) -> TrainError:
    return TrainError(
        f"a step takes {expected} microbatches of each rank.",
        got=got,
        why="gradients are reduced after the last one, on all ranks together",
        fix="data whose microbatches(step, rank=..., plan=plan) yields plan.accumulation of them",
    )


def _sum_and_count(value: Any) -> tuple[Tensor, Any]:
    """(sum, count) of what the user's loss gave; a mean counts as one thing. Raises TrainError for others."""
    is_pair = isinstance(value, tuple) and len(cast(tuple[Any, ...], value)) == 2
    total, count = cast(tuple[Any, Any], value) if is_pair else (value, 1)
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
        raise TrainError(
            "the loss function gave no loss to train on.",
            got=_described(total),
            fix="a mean, or (sum, count): a scalar tensor that depends on the model's parameters",
        )
    return total.reshape(()), count


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor of shape {list(value.shape)}, requires_grad={value.requires_grad}"


def _set_sync(engine: FSDPModule, plan: Plan, *, last: bool) -> None:
    """What the engine does after the backward of a microbatch. Between microbatches nothing is all-reduced
    over replicas, and parameters stay gathered where forward left them so.

    The engine's `set_is_last_backward(False)` would spare the wait for the last reduction of each microbatch,
    but hold its buffers through the next forward, and prefetch units of the microbatch before.
    """
    engine.set_requires_gradient_sync(last or plan.sync_each_microbatch)
    engine.set_requires_all_reduce(last)
    engine.set_reshard_after_backward(last or plan.reshard_after_forward is not False)


@torch.no_grad()
def _reduce_unsharded(gradients: Sequence[Tensor]) -> None:
    """Averages the gradients of scalars, which the engine cannot shard and leaves alone."""
    scalars = [g for g in gradients if g.ndim == 0]
    if not scalars or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.stack(scalars)
    dist.all_reduce(flat)
    for scalar, total in zip(scalars, flat.unbind(), strict=True):
        scalar.copy_(total / dist.get_world_size())


@torch.no_grad()
def _squared_norm(gradients: Sequence[Tensor], world_size: int) -> Tensor:
    """This rank's share of the squared global norm: summed over all ranks it counts every element once."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # In fp32 also for bf16 gradients, whose norms would else be rounded to 8 bits each.
    norms = torch.stack(
        torch._foreach_norm(  # pyright: ignore[reportPrivateUsage]
            [local_tensor(g) for g in gradients], 2, torch.float32
        )
    )
    replicas = [shard_replicas(g, world_size) for g in gradients]
    squares = norms.double().square()
    if len(set(replicas)) == 1:
        return squares.sum() / replicas[0]
    return (squares / torch.tensor(replicas, device=squares.device)).sum()


def _clip(norm: float, plan: Plan) -> float:
    limit = plan.run.optimizer.clip_norm
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


@torch.no_grad()
def _update(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], *, factor: float, learning_rate: float
) -> None:
    if gradients and factor != 1.0:
        torch._foreach_mul_(  # pyright: ignore[reportPrivateUsage]
            [local_tensor(g) for g in gradients], factor
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors anywhere in `batch`, copied without waiting if they lie in pinned memory."""
    if device.type == "cpu":
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
