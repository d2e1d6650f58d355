"""The training loop `train`, a generator that yields each finished step."""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from fullshard.data.batches import MicrobatchSource
from fullshard.distributed.agreement import rank
from fullshard.errors import TrainError
from fullshard.spec.plan import Plan
from fullshard.survival.phase import RunPhase
from fullshard.survival.replicas import ReplicaCheck
from fullshard.training.loss import Loss, next_token_loss
from fullshard.training.loss_scale import LossScale
from fullshard.training.schedule import learning_rate_factor
from fullshard.training.state import TrainState
from fullshard.training.step import StepResult, run_step

logger = logging.getLogger("fullshard")

_DATA = "fullshard::data"  # a range of a profiler's trace: see `fullshard.profiler.trace`


@dataclass(frozen=True, kw_only=True)
class Step(StepResult):
    """A finished step, with its figures over all ranks (see `StepResult`).

    index: number of the step, from 1
    seconds: duration of the whole step on this rank
    data_seconds: the part of `seconds` spent waiting for data
    rollback: whether the caller should call `roll_back` and then `train` again, because
        `fault_tolerance.on_spike` is "rollback"; without these calls, the step is only skipped
    """

    index: int
    learning_rate: float
    seconds: float
    data_seconds: float
    rollback: bool = False


def train(
    state: TrainState,
    plan: Plan,
    *,
    loss: Loss = next_token_loss,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Trains `state` from its current step to the last step of the run, and yields each step. Collective.

    loss: `loss(model, microbatch)`, see `training.loss.Loss`
    should_stop: called before each step; if it returns True on any rank, that step is the last on all ranks

    After a `break`, another `train` of the same state continues where it stopped. If `state.data` is a plain
    iterable, training ends on all ranks as soon as the iterable ends on any rank; another `train`, and a
    resumed run, start the iterable from the beginning. Only `data.MicrobatchSource` resumes exactly.

    Raises TrainError if there is no data, after `train.max_skipped_steps` skipped steps in a row, if the
    ranks are not in the same step, and if replicas compared by `fault_tolerance.check_replicas_every` differ.
    """
    source = _make_microbatch_source(state, plan)
    _set_or_keep_loss_scale(state, plan)
    on_spike, in_a_row = plan.run.fault_tolerance.on_spike, 0
    replicas = ReplicaCheck(plan)
    state.model.train()
    state.phase.step = state.step
    while state.step < plan.run.train.steps:
        started = time.perf_counter()
        state.phase.enter(RunPhase.DATA)
        with record_function(_DATA):
            batches = source(state.step + state.data_offset)
        if batches is None:
            return
        timed = _TimedMicrobatches(batches, seconds=time.perf_counter() - started)
        factor = learning_rate_factor(plan.run.schedule, step=state.step, steps=plan.run.train.steps)
        rate = plan.run.optimizer.learning_rate * factor
        result = run_step(state, plan, microbatches=timed, loss=loss, learning_rate=rate, stop=should_stop())
        state.count_step_and_commit(tokens=result.tokens, skipped=result.skipped)
        replicas.compare_if_due(state.model, state.tensors, step=state.step, where=state.phase)
        state.phase.finish_step(state.step)
        in_a_row = in_a_row + 1 if result.skipped else 0
        too_many = in_a_row >= plan.run.train.max_skipped_steps
        yield Step(
            **vars(result),
            index=state.step,
            learning_rate=rate,
            seconds=time.perf_counter() - started,
            data_seconds=timed.seconds,
            rollback=on_spike == "rollback" and (result.spike or too_many),
        )
        if too_many:
            raise _too_many_skipped_error(in_a_row, result)
        if result.stopping:
            return


def _set_or_keep_loss_scale(state: TrainState, plan: Plan) -> None:
    """Initialises the loss scale, or keeps the scale that a checkpoint of the same precision brought."""
    section = plan.run.precision
    if not plan.precision.loss_scaling:
        state.loss_scale = LossScale()
    elif state.loss_scale.window == 0:
        state.loss_scale = LossScale(section.initial_loss_scale, section.loss_scale_window)
    else:
        state.loss_scale.window = section.loss_scale_window


def _make_microbatch_source(state: TrainState, plan: Plan) -> Callable[[int], Iterable[Any] | None]:
    """Returns a function that maps a step to this rank's microbatches, or to None if any rank has no more."""
    if hasattr(state.data, "microbatches"):
        batches = cast(MicrobatchSource, state.data)
        return lambda step: batches.microbatches(step, rank=rank(), plan=plan)
    if not isinstance(state.data, Iterable):
        raise TrainError(
            "there is no data to train on.",
            got=type(state.data).__name__,
            fix="TrainState(model, optimizer, data=data): an iterable of microbatches, or a source of them",
        )
    if state.iterator is None:
        state.iterator = iter(cast(Iterable[Any], state.data))

    warned = False

    def next_microbatches(_step: int) -> list[Any] | None:
        nonlocal warned
        own = list(itertools.islice(cast(Iterator[Any], state.iterator), plan.accumulation))
        if own and not warned:
            warned = True
            _warn_if_batch_size_differs(own[0], plan)
        # Ranks whose iterables differ in length would wait for each other forever, so they agree first.
        full = torch.tensor([len(own) == plan.accumulation], dtype=torch.uint8, device=plan.device)
        if plan.world_size > 1:
            dist.all_reduce(full, op=dist.ReduceOp.MIN)
        if bool(full.item()):
            return own
        state.iterator = None
        return None

    return next_microbatches


def _warn_if_batch_size_differs(batch: Any, plan: Plan) -> None:
    """Logs a warning if the rows of `batch` differ from the plan's microbatch, as packed rows may."""
    rows = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if rows and plan.microbatch not in rows:
        logger.warning(
            "the data gives microbatches of %s rows, and the plan is for %d (× %d accumulated): what it says "
            "of memory and time, and train.global_batch, are for those. Pin train.microbatch, or ask "
            "plan.microbatch before the data is made.",
            " or ".join(map(str, sorted(rows))),
            plan.microbatch,
            plan.accumulation,
        )


class _TimedMicrobatches:
    """An iterable of `batches` that adds the time spent waiting for them to `seconds`."""

    def __init__(self, batches: Iterable[Any], *, seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.batches)
        while True:
            started = time.perf_counter()
            try:
                with record_function(_DATA):
                    batch = next(iterator)
            except StopIteration:
                return
            self.seconds += time.perf_counter() - started
            yield batch


def _too_many_skipped_error(count: int, last: StepResult) -> TrainError:
    or_stands_out = ", or stood out" if last.spike else ""
    return TrainError(
        f"{count} steps in a row had a loss or gradient norm that is not finite{or_stands_out}.",
        got=f"loss {last.loss}, gradient norm {last.grad_norm}",
        why="nothing was updated in them, and nothing suggests that the next one would differ",
        fix="a lower optimizer.learning_rate, longer schedule.warmup_steps, or a look at the data",
    )
