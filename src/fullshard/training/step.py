"""One training step: forward and backward of the microbatches, the global norm, and the update or a skip.

[Note: one denominator]
A mean of means is wrong when microbatches hold different numbers of valid tokens. So each microbatch's loss
is a sum, divided before backward by a nominal count (the tokens of a rank's step, which keeps fp16 in range).
The gradient is multiplied after backward by nominal / actual. The actual count is summed over ranks and
microbatches in the only all-reduce that a step makes besides FSDP2's. The nominal count is rounded up to a
power of two: dividing by it is exact, so the rounding of half precision in backward does not depend on the
number of ranks.

[Note: one all-reduce]
That all-reduce carries the loss sum, the count, the squared norm, whether a rank was asked to stop, and each
rank's fingerprint (see `survival/fingerprint.py`), in fp64. So all ranks decide alike whether to update, to
skip, to stop, or to raise because they are not in the same step. With the optimizer in backward there are two
all-reduces: see [Note: what comes before backward] in `optimizer_in_backward.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from torch.utils._pytree import tree_map_only

from fullshard.errors import TrainError
from fullshard.offload.adamw import StreamingAdamW
from fullshard.sharding.fp8 import reuse_weight_scales
from fullshard.spec.plan import Plan
from fullshard.survival.fingerprint import (
    WIDTH,
    StepFingerprint,
    check_same_fingerprints,
    count_issued_collectives,
    step_settings_checksum,
)
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.training.gradients import (
    average_scalar_gradients,
    clear_gradients,
    list_gradients,
    local_gradient_norms,
    local_share_of_squared_norm,
    scale_gradients,
)
from fullshard.training.loss import Loss
from fullshard.training.optimizer import set_learning_rate
from fullshard.training.state import TrainState

# Takes the nominal count, and returns the context that a backward runs in.
_Updates = Callable[[int], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures of one step over all ranks, equal on all ranks.

    loss: mean over valid tokens, in nats for the default loss
    grad_norm: norm of the gradient before clipping
    tokens: number of valid tokens of the step (of microbatches, if the loss function returns a mean)
    skipped: whether nothing was updated, because the loss or norm was not finite, or was a spike
    spike: whether the step was skipped because its loss or norm was a spike
    stopping: whether this is the last step because a rank was asked to stop
    """

    loss: float
    grad_norm: float
    tokens: int
    skipped: bool
    spike: bool = False
    stopping: bool


def run_step(
    state: TrainState,
    plan: Plan,
    *,
    microbatches: Iterable[Any],
    loss: Loss,
    learning_rate: float,
    stop: bool = False,
) -> StepResult:
    """Trains `state` on `microbatches`, exactly `plan.accumulation` of this rank. Collective.

    stop: whether this rank was asked to stop

    The step is skipped on all ranks if the loss or norm is not finite, if it is a spike while
    `fault_tolerance.on_spike` is set, or if no rank has a valid token.

    Raises TrainError for another number of microbatches, an invalid loss (see `loss.Loss`), ranks that are in
    different steps, and with the optimizer in backward, a norm that is not finite.
    """
    where, survival, device = state.phase, plan.run.fault_tolerance, next(state.model.parameters()).device
    in_backward = state.in_backward if plan.run.optimizer.in_backward else None
    issued = count_issued_collectives(device)
    sums = torch.zeros(4 + WIDTH, dtype=torch.float64, device=device)  # loss, count, squared norm, stop, …
    sums[3] = float(stop)
    agree = partial(
        _all_reduce_and_check_ranks, sums, state=state, plan=plan, learning_rate=learning_rate, issued=issued
    )
    updates = partial(_backward_context, state=state, plan=plan, learning_rate=learning_rate, agree=agree)
    run = partial(_run_microbatches, state, plan, microbatches=microbatches, loss=loss, sums=sums)
    with reuse_weight_scales(state.model):
        nominal = run(updates=updates)
    where.enter(RunPhase.REDUCE)
    gradients = list_gradients(state.model, state.optimizer)
    average_scalar_gradients(gradients)
    with record_function("fullshard::optimizer"):  # see `fullshard.profiler.trace`
        norms = in_backward.update_remaining_parameters() if in_backward else local_gradient_norms(gradients)
        sums[2] = local_share_of_squared_norm(norms)
    state.wait_for_updates()  # before the all-reduce: after it, no update is running on any rank
    loss_sum, count, squared, stops = agree()
    where.enter(RunPhase.OPTIMIZER)
    mean = loss_sum / count if count > 0 else math.nan
    # FSDP2 averages over ranks, but a sum is needed; see [Note: one denominator].
    unscale = nominal * plan.world_size / (count * state.loss_scale.scale) if count > 0 else math.nan
    norm = math.sqrt(squared) * unscale if squared >= 0 else math.nan
    finite = math.isfinite(mean) and math.isfinite(norm)
    spike = finite and state.recent.is_spike(mean, norm, section=survival)
    if in_backward is not None and not finite and math.isfinite(mean):
        raise _nonfinite_update_error(norm, step=state.step + 1)
    if in_backward is None and finite and not spike:
        state.recent.add_step(mean, norm, section=survival)
        limit = plan.run.optimizer.clip_norm
        factor = unscale * (min(1.0, limit / (norm + 1e-6)) if limit else 1.0)
        _scale_gradients_and_step(state.optimizer, gradients, factor=factor, learning_rate=learning_rate)
    clear_gradients(state.model, state.optimizer)
    if count > 0:
        state.loss_scale.update(finite=finite)
    skipped = not finite or spike
    return StepResult(
        loss=mean, grad_norm=norm, tokens=int(count), skipped=skipped, spike=spike, stopping=stops > 0
    )


def _nonfinite_update_error(norm: float, *, step: int) -> TrainError:
    return TrainError(
        f"the gradient of step {step} is not finite, and the parameters were updated with it.",
        got=f"gradient norm {norm}, optimizer.in_backward = true",
        why="each unit is updated before the next one's gradient is there, so the step cannot be left out",
        fix="resume from the last checkpoint (--resume) with optimizer.in_backward = false, which skips such "
        "steps, or with a lower optimizer.learning_rate",
    )


def _backward_context(
    nominal: int, *, state: TrainState, plan: Plan, learning_rate: float, agree: Callable[[], list[float]]
) -> AbstractContextManager[None]:
    """Returns the context in which a backward runs, which updates if the run has the optimizer in backward.

    See [Note: what comes before backward] in `optimizer_in_backward.py`.
    """
    if not plan.run.optimizer.in_backward:
        return nullcontext()
    state.phase.enter(RunPhase.REDUCE)
    loss_sum, count, *_ = agree()
    factor = None
    if math.isfinite(loss_sum) and count != 0:
        state.run_before_update_callbacks()
        factor = nominal * plan.world_size / count
    return state.in_backward.update_during_backward(factor=factor, learning_rate=learning_rate)


def _all_reduce_and_check_ranks(
    sums: Tensor, *, state: TrainState, plan: Plan, learning_rate: float, issued: int
) -> list[float]:
    """Returns the loss, token count, squared norm and stop requests of `sums`, summed over all ranks.

    Collective. Raises TrainError if the ranks' fingerprints (step, settings, collectives) differ.

    issued: number of collectives that this rank had issued before the step; see [Note: one all-reduce]
    """
    totals, kind, own = sums.clone(), plan.run.fault_tolerance.fingerprint, None
    if plan.world_size == 1:
        return cast(list[float], totals.tolist())[:4]
    if kind != "none":
        own = StepFingerprint(
            step=state.step + 1,
            collectives=count_issued_collectives(sums.device) - issued if kind == "all" else 0,
            settings=step_settings_checksum(plan, learning_rate=learning_rate, data_offset=state.data_offset),
        )
        totals[4:] = torch.tensor(own.summable_numbers(plan.world_size), dtype=torch.float64)
    dist.all_reduce(totals)
    values = cast(list[float], totals.tolist())
    if own is not None:
        check_same_fingerprints(own, values[4:], world_size=plan.world_size)
    return values[:4]


def _run_microbatches(
    state: TrainState, plan: Plan, *, microbatches: Iterable[Any], loss: Loss, sums: Tensor, updates: _Updates
) -> int:
    """Runs forward and backward of every microbatch, and returns the nominal count.

    sums: receives the loss sum and the count
    """
    engine = state.model if isinstance(state.model, FSDPModule) else None
    nominal = 1
    expected = _iterate_expected_batches(microbatches, plan.accumulation, where=state.phase)
    for index, batch in enumerate(expected):
        if engine is not None and plan.accumulation > 1:
            _set_gradient_sync(engine, plan, last=index == plan.accumulation - 1)
        with record_function("fullshard::compute"):
            state.phase.enter(RunPhase.FORWARD)
            value = loss(state.model, move_batch_to_device(batch, sums.device))
            total, count = _parse_loss_result(value)
        # A sum is over the tokens of the batch. A mean counts as one item.
        tokens = plan.run.tokens_per_step // plan.world_size
        nominal = 1 << ((tokens if isinstance(value, tuple) else plan.accumulation) - 1).bit_length()
        sums[0] += total.detach()
        sums[1] += count
        with updates(nominal), record_function("fullshard::compute"):
            state.phase.enter(RunPhase.BACKWARD)
            (total * (state.loss_scale.scale / nominal)).backward()
    return nominal


def _iterate_expected_batches(batches: Iterable[Any], expected: int, *, where: PhaseTracker) -> Iterator[Any]:
    """Yields the microbatches. Raises TrainError unless there are `expected`: ranks would wait forever."""
    count = 0
    where.enter(RunPhase.DATA)
    for batch in batches:
        if count == expected:
            raise _microbatch_count_error(f"more than {expected}", expected)
        yield batch
        count += 1
        where.enter(RunPhase.DATA)
    if count < expected:
        raise _microbatch_count_error(str(count), expected)


def _microbatch_count_error(got: str, expected: int) -> TrainError:
    return TrainError(
        f"a step takes {expected} microbatches of each rank.",
        got=got,
        why="gradients are reduced after the last one, on all ranks together",
        fix="data whose microbatches(step, rank=..., plan=plan) yields plan.accumulation of them",
    )


def _parse_loss_result(value: Any) -> tuple[Tensor, Any]:
    """Returns (sum, count) from the loss function's result, with count 1 for a mean. Raises TrainError."""
    is_pair = isinstance(value, tuple) and len(cast(tuple[Any, ...], value)) == 2
    total, count = cast(tuple[Any, Any], value) if is_pair else (value, 1)
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
        raise TrainError(
            "the loss function gave no loss to train on.",
            got=f"a tensor of shape {list(total.shape)}, requires_grad={total.requires_grad}"
            if isinstance(total, Tensor)
            else type(total).__name__,
            fix="a mean, or (sum, count): a scalar tensor that depends on the model's parameters",
        )
    return total.reshape(()), count


def _set_gradient_sync(engine: FSDPModule, plan: Plan, *, last: bool) -> None:
    """Sets whether FSDP2 reduces gradients over shards and replicas and reshards after the next backward.

    FSDP2's `set_is_last_backward(False)` would avoid waiting for the last reduction of each microbatch, but
    would keep its buffers through the next forward, and prefetch units of the previous microbatch.
    """
    engine.set_requires_gradient_sync(last or plan.sync_each_microbatch)
    engine.set_requires_all_reduce(last)
    engine.set_reshard_after_backward(last or plan.reshard_after_forward is not False)


@torch.no_grad()
def _scale_gradients_and_step(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], *, factor: float, learning_rate: float
) -> None:
    set_learning_rate(optimizer, learning_rate)
    with record_function("fullshard::optimizer"):
        if isinstance(optimizer, StreamingAdamW):
            optimizer.gradient_factor = factor
        else:
            scale_gradients(gradients, factor)
        optimizer.step()


def move_batch_to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with all tensors in it on `device`, copied without blocking from pinned memory."""
    if device.type == "cpu":
        return batch
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)
