"""One training step: forward and backward of the microbatches, the global norm, and the update or a skip.

[Note: one denominator]
A mean of means is wrong when microbatches hold different numbers of valid tokens. So each microbatch's loss
is a sum, divided before backward by a nominal count (the tokens of a rank's step, which keeps fp16 in range).
The gradient is multiplied after backward by nominal / actual. The actual count is summed over ranks and
microbatches in the only all-reduce that a step makes besides FSDP2's. The nominal count is rounded up to a
power of two: dividing by it is exact, so the rounding of half precision in backward does not depend on the
number of ranks.

[Note: one all-reduce]
That all-reduce carries the loss sum, the count, the squared norm, the tokens, whether a rank was asked to
stop, and each rank's fingerprint (see `survival/fingerprint.py`), in fp64. The units that a rank ran are part
of it. So all ranks decide alike whether to update, to skip, to stop, or to raise because they are not in the
same step.

[Note: no wait between steps]
The device decides (`decide_and_record_step`), so the host launches the update, and then the next step,
without reading anything. What it reads later are figures (`figures.py`). In the strict order, the host
reads the decision before it launches the update. On the CPU, where nothing is ahead of the
host, this is the only order. Both compute the same numbers in the same way, so they give the same
parameters, bit for bit.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from fullshard.distributed.agreement import rank, world_size
from fullshard.distributed.ranges import TimedRange
from fullshard.distributed.unit_order import UnitEvents, find_unit_order_recorder, take_unit_events
from fullshard.errors import TrainError
from fullshard.models.experts import Router
from fullshard.models.loss import Loss, loss_sum_and_count
from fullshard.offload.adamw import StreamingAdamW
from fullshard.parallel.apply import explain_ungathered_parameters
from fullshard.parallel.fp8 import make_scale_reuse_context
from fullshard.spec.plan import Plan
from fullshard.spec.settings.model_section import DecoderConfig
from fullshard.survival import fingerprint
from fullshard.survival.phase import PhaseTracker, RunPhase
from fullshard.torch_private.groups import count_issued_collectives
from fullshard.torch_private.tensors import tree_leaves, tree_map_only
from fullshard.training import figures
from fullshard.training.gradients import (
    average_scalar_gradients,
    host_waits_before_each_update,
    list_gradients,
    local_gradient_norms,
    local_share_of_squared_norm,
    select_tensors_counted_on_this_rank,
    sum_gradients_over_tensor_axis,
    update_as_device_decides,
    update_parameters,
)
from fullshard.training.learning_rates import set_learning_rates
from fullshard.training.state import TrainState

_SUMS = 6  # loss sum, count, squared norm, tokens, trained tokens, stop requests


@dataclass(frozen=True)
class _Totals:
    """Sums over all ranks on the device: those of the step (`_SUMS`), and those of the fingerprints.

    own: this rank's fingerprint, or None if there is nothing to compare
    events: the units that this rank has gathered and reduced since the last step
    are_ranks_equal: whether all ranks have the same fingerprint, as a tensor on the device
    """

    numbers: Tensor
    are_ranks_equal: Tensor
    own: fingerprint.StepFingerprint | None
    events: UnitEvents
    world_size: int


def run_step(
    state: TrainState, plan: Plan, *, microbatches: Iterable[Any], loss: Loss, stop: bool = False
) -> figures.PendingResult:
    """Trains `state` on `microbatches`, exactly `plan.accumulation` of this rank. Collective.

    stop: whether this rank was asked to stop

    The step is skipped on all ranks if the loss or norm is not finite, if it is a spike while
    `fault_tolerance.on_spike` is set, or if no rank has a valid token. On a GPU, the step may still run when
    this returns: see [Note: no wait between steps].

    Raises TrainError for another number of microbatches, and an invalid loss (see `loss.Loss`). Ranks that
    are in different steps raise when the result is read.
    """
    where, device = state.phase, next(state.model.parameters()).device
    issued = count_issued_collectives(device)
    sums = torch.zeros(_SUMS - 1, dtype=torch.float64, device=device)  # without the stop requests
    rates = set_learning_rates(state.optimizer, plan.run, step=state.step)
    with make_scale_reuse_context(state.model):
        nominal = _run_microbatches(state, plan, microbatches=microbatches, loss=loss, sums=sums)
    where.enter(RunPhase.REDUCE)
    gradients = list_gradients(parameters := list(state.model.parameters()), state.optimizer)
    average_scalar_gradients(state.model)
    sum_gradients_over_tensor_axis(gradients)
    with TimedRange("norm"):
        norms = local_gradient_norms(select_tensors_counted_on_this_rank(gradients))
        sums[2] = local_share_of_squared_norm(norms, device)
    state.wait_for_updates()  # before the all-reduce: after it, no update is running on any rank
    totals = _all_reduce(sums, nominal, state=state, plan=plan, rates=rates, issued=issued, stop=stop)
    where.enter(RunPhase.OPTIMIZER)
    decision = figures.decide_and_record_step(
        totals.numbers[:_SUMS],
        # FSDP2 averages over ranks, but a sum is needed; see [Note: one denominator].
        nominal=nominal * plan.averaging_ranks / state.loss_scale.scale,
        are_ranks_equal=totals.are_ranks_equal,
        recent=state.recent,
        run=plan.run,
    )
    result = _copy_result_to_host(decision, totals, own_loss=sums[0])
    if host_waits_before_each_update(state.optimizer, plan) or not result.must_wait:
        result.read()
    with TimedRange("update"):
        if not result.is_read:
            update_as_device_decides(state.optimizer, decision)
        elif not result.read().skipped:
            update_parameters(state.optimizer, gradients, factor=result.read().gradient_factor)
    _clear_gradients_and_balance_experts(state, plan, parameters=parameters, decision=decision)
    if state.average is not None and not (result.is_read and result.read().skipped):
        with TimedRange("update"):
            unknown = None if result.is_read else decision.found_inf
            state.average.update(plan.run.ema, step=state.step + 1, skipped=unknown)
    if plan.precision.loss_scaling and result.read().trained_tokens != 0:
        state.loss_scale.update(finite=not result.read().skipped or result.read().spike)
    return result


def _clear_gradients_and_balance_experts(
    state: TrainState, plan: Plan, *, parameters: Sequence[nn.Parameter], decision: figures.StepDecision
) -> None:
    """Clears the gradients of `parameters`. Changes the biases of experts unless the step is skipped."""
    for parameter in parameters:
        parameter.grad = None
    if isinstance(state.optimizer, StreamingAdamW) and state.optimizer.gradients is not None:
        state.optimizer.gradients.clear()
    torch.clear_autocast_cache()
    section = plan.run.model
    if isinstance(section, DecoderConfig) and section.balance_bias_rate:
        balance_experts(state.model, rate=section.balance_bias_rate * (1 - decision.found_inf))


def _copy_result_to_host(
    decision: figures.StepDecision, totals: _Totals, *, own_loss: Tensor
) -> figures.PendingResult:
    """Returns the result, whose `read` raises TrainError if the ranks were not in the same step."""
    count = len(decision.figures)
    copy = figures.HostCopy(torch.cat([decision.figures, totals.numbers[_SUMS:]]))

    def read_result() -> figures.StepResult:
        numbers = copy.read()
        if (own := totals.own) is not None:
            size, events = totals.world_size, totals.events
            fingerprint.check_same_fingerprints(own, numbers[count:], world_size=size, events=events)
        return figures.step_result(numbers[:count])

    return figures.PendingResult(read_result, must_wait=not copy.is_ready, own_loss=own_loss)


def _all_reduce(
    sums: Tensor,
    nominal: int,
    *,
    state: TrainState,
    plan: Plan,
    rates: Sequence[float],
    issued: int,
    stop: bool,
) -> _Totals:
    """Sums `sums`, stop requests and fingerprints over ranks. Collective.

    sums: those of `_SUMS` except the stop requests
    issued: number of collectives that this rank had issued before the step; see [Note: one all-reduce]
    """
    kind, own, numbers = plan.run.fault_tolerance.fingerprint, None, [0.0] * fingerprint.WIDTH
    events = take_unit_events(state.model)
    if plan.world_size > 1 and kind != "none":
        own = fingerprint.StepFingerprint(
            step=state.step + 1,
            collectives=count_issued_collectives(sums.device) - issued if kind == "all" else 0,
            settings=fingerprint.step_settings_checksum(
                plan, learning_rates=rates, row=state.rows or 0, nominal=nominal
            ),
            units=events.checksum,
        )
        numbers = own.summable_numbers(plan.world_size)
    signals = figures.copy_to_device(torch.tensor([float(stop), *numbers], dtype=torch.float64), sums.device)
    totals = torch.cat([sums, signals])
    if plan.world_size > 1:
        with TimedRange("all_reduce"):
            dist.all_reduce(totals)
    are_equal = (totals[_SUMS:] == plan.world_size * signals[1:]).all()
    return _Totals(totals, are_equal, own, events, plan.world_size)


def _run_microbatches(
    state: TrainState, plan: Plan, *, microbatches: Iterable[Any], loss: Loss, sums: Tensor
) -> int:
    """Runs forward and backward of every microbatch, and returns the nominal count.

    sums: receives the loss sum, the count, the tokens, and those trained on, if this rank's tokens count
    """
    engine = state.model if isinstance(state.model, FSDPModule) else None
    nominal, kinds = 1, set[bool]()
    counts = rank() % plan.tensor_parallel == 0  # one of the ranks that share matmuls counts for all
    expected = _iterate_expected_batches(microbatches, plan.accumulation, where=state.phase)
    for index, batch in enumerate(expected):
        if engine is not None and plan.accumulation > 1:
            _set_gradient_sync_and_resharding(engine, plan, last=index == plan.accumulation - 1)
        with record_function("fullshard::forward"):  # see `fullshard.report.profiled_step`
            state.phase.enter(RunPhase.FORWARD)
            torch.clear_autocast_cache()  # else autocast around the loop has casts of earlier weights
            tokens = count_computed_tokens(batch, plan)
            with _refuse_backward(state.model):
                value = loss(state.model, move_batch_to_device(batch, sums.device))
            total, count = loss_sum_and_count(value)
        kinds.add(isinstance(value, tuple))
        if len(kinds) > 1:
            raise TrainError(
                "the loss function gives a mean for some microbatches, and a sum with its count for others.",
                why="a mean counts as one item, and a sum as many: their gradients cannot be added",
                fix="(sum, count) for all of them, with a count of 0 if nothing counts",
            )
        # A sum is over the tokens of the batch. A mean counts as one item.
        is_sum, planned = isinstance(value, tuple), plan.run.tokens_per_step // plan.averaging_ranks
        nominal = 1 << ((planned if is_sum else plan.accumulation) - 1).bit_length()
        if counts:
            sums[0] += total.detach()
            sums[1] += count
            sums[3] += tokens
            sums[4] += count if is_sum else math.nan  # a mean does not say over how many
        with record_function("fullshard::backward"), _explain_freed_parameters():
            state.phase.enter(RunPhase.BACKWARD)
            (_require_gradient(total) * (state.loss_scale.scale / nominal)).backward()
    return nominal


@contextmanager
def _refuse_backward(model: nn.Module) -> Generator[None]:
    """Context in which the backward of a unit of `model` raises TrainError."""
    order = find_unit_order_recorder(model)
    if order is None:
        yield
        return
    order.is_in_loss = True
    try:
        yield
    finally:
        order.is_in_loss = False


def _explain_freed_parameters() -> AbstractContextManager[None]:
    """Context in which a backward that reaches parameters that are not gathered raises ShardError."""
    return explain_ungathered_parameters(
        "backward reached a unit whose parameters are not gathered.",
        why="FSDP2 gathers a unit again when a gradient comes to a tensor that its forward returned. "
        "It sees no tensors in objects of other classes than tuples, dicts and dataclasses, none that a "
        "module kept as an attribute, and none that was changed in place (y = block(x); y += x)",
        fix="y = y + x; return tensors in a tuple, dict or dataclass, also those that a module keeps; or "
        "sharding.strategy = shard_grad_op, which keeps parameters gathered until backward",
    )


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
        f"a step takes {expected} microbatch{'' if expected == 1 else 'es'} of each rank.",
        got=got,
        why="gradients are reduced after the last one, on all ranks together",
        fix="data whose microbatches(step, rank=..., plan=plan) yields plan.accumulation of them",
    )


def _require_gradient(total: Tensor) -> Tensor:
    """Returns `total`, a loss. Raises TrainError if backward cannot start from it."""
    if not total.requires_grad:
        raise TrainError(
            "the loss function gave no loss to train on.",
            got="a loss without a gradient (requires_grad=False)",
            why=None
            if torch.is_grad_enabled()
            else "torch.no_grad or inference_mode is active around the step",
            fix="a loss that depends on the model's parameters, undetached, computed while gradients are on",
        )
    return total


def _set_gradient_sync_and_resharding(engine: FSDPModule, plan: Plan, *, last: bool) -> None:
    """Sets whether FSDP2 reduces gradients over shards and replicas and reshards after the next backward.

    FSDP2's `set_is_last_backward(False)` would avoid waiting for the last reduction of each microbatch, but
    would keep its buffers through the next forward, and prefetch units of the previous microbatch.
    """
    engine.set_requires_gradient_sync(last or plan.sync_each_microbatch)
    engine.set_requires_all_reduce(last)
    engine.set_reshard_after_backward(last or plan.reshard_after_forward)


def move_batch_to_device(batch: Any, device: torch.device) -> Any:
    """Returns `batch` with all tensors in it on `device`, copied without waiting for the device."""
    return tree_map_only(Tensor, lambda tensor: figures.copy_to_device(tensor, device), batch)


@torch.no_grad()
def balance_experts(model: nn.Module, *, rate: float | Tensor) -> None:
    """Raises the bias of experts with fewer tokens than the mean by `rate`, and lowers it if they have more.

    Auxiliary-loss-free load balancing: arXiv:2408.15664, and arXiv:2412.19437, section 2.1.2. Tokens are
    those of all ranks since the last call. Collective. Does nothing for a model without biases.
    """
    routers = [one for one in model.modules() if isinstance(one, Router) and one.has_bias]
    if not routers:
        return
    tokens = torch.stack([router.tokens for router in routers])  # (layers, experts)
    if world_size() > 1:
        dist.all_reduce(tokens)
    change = rate * (tokens.mean(dim=1, keepdim=True) - tokens).sign()
    for router, own in zip(routers, change, strict=True):
        router.balance_bias.add_(own)
        router.tokens.zero_()


def count_computed_tokens(batch: Any, plan: Plan) -> int:
    """Returns the tokens of a microbatch, including padding and those whose label does not count.

    These are the elements of `tokens` or `input_ids`, or of the first tensor of a tuple if it is (rows,
    length) integers. Each row of any other batch counts as `data.sequence_length` tokens, as in the plan. If
    that is 1 (samples that are not sequences), each row counts as one token, whatever the tensors.

    The number of rows is the plan's if a tensor has as many, or else that of the first tensor. A batch
    without tensors counts as one of the plan.
    """
    length, values = plan.run.data.sequence_length, dict(batch) if isinstance(batch, Mapping) else batch
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.ndim]
    if isinstance(values, dict):
        ids = values.get("tokens", values.get("input_ids"))
    else:
        ids = next((one for one in tensors[:1] if one.ndim == 2 and not one.is_floating_point()), None)
    if isinstance(ids, Tensor) and length > 1:
        return ids.numel()
    rows = [one.shape[0] for one in tensors]
    return length * (plan.microbatch if plan.microbatch in rows or not rows else rows[0])
