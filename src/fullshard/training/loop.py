"""The training loop `train`, a generator that yields each step."""

import gc
import itertools
import logging
import math
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from fullshard.data.batches import MicrobatchSource, RowSource, microbatch_sample_numbers
from fullshard.distributed.agreement import all_gather_object, all_ranks_have, rank
from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.distributed.unit_order import find_unit_order_recorder
from fullshard.errors import TrainError
from fullshard.models.loss import Loss, next_token_loss
from fullshard.quantities import count_text
from fullshard.spec.plan import Plan
from fullshard.survival.fingerprint import ReplicaCheck
from fullshard.survival.phase import RunPhase
from fullshard.torch_private.tensors import tree_leaves
from fullshard.training.between_steps import ModelBetweenSteps
from fullshard.training.ema import check_average_is_planned
from fullshard.training.figures import PendingResult, StepResult, StepTimer
from fullshard.training.gradients import refuse_parameters_outside_model
from fullshard.training.learning_rates import (
    is_built_by_fullshard,
    warn_of_unused_settings,
    warn_that_schedule_multiplies_rates,
)
from fullshard.training.resume import set_next_row_and_describe_changes
from fullshard.training.state import LossScale, TrainState
from fullshard.training.step import count_computed_tokens, run_step

logger = logging.getLogger("fullshard")

_DATA = "fullshard::data"  # a range of a profiler's trace: see `fullshard.report.profiled_step`


@dataclass(frozen=True, kw_only=True, repr=False)
class Step:
    """A step, with its figures over all ranks.

    On a GPU, the step may still be running when it is yielded. The properties wait for it: `seconds`, and
    `loss`, `grad_norm`, `tokens`, `trained_tokens`, `skipped` and `spike`, which are explained in
    `StepResult`. To keep the device busy, read them a step later.

    index: number of the step, from 1
    learning_rate: that of the optimizer's first group; NaN if the group has none
    data_seconds: time spent waiting for data
    stopping: whether this is the last step because a rank was asked to stop, before it or the step before
    rollback: whether the caller should call `roll_back` and then `train` again: with
        `fault_tolerance.on_spike` "rollback", after a spike or `train.max_skipped_steps` skipped steps in a
        row. Without these calls, a spike is only skipped, and too many skipped steps raise TrainError.
    result: the figures; `read` waits for them
    timer: measures `seconds`
    """

    index: int
    learning_rate: float
    data_seconds: float
    stopping: bool = False
    rollback: bool = False
    result: PendingResult
    timer: StepTimer

    @property
    def loss(self) -> float:
        return self.result.read().loss

    @property
    def grad_norm(self) -> float:
        return self.result.read().grad_norm

    @property
    def tokens(self) -> int:
        return self.result.read().tokens

    @property
    def trained_tokens(self) -> int | None:
        return self.result.read().trained_tokens

    @property
    def skipped(self) -> bool:
        return self.result.read().skipped

    @property
    def spike(self) -> bool:
        return self.result.read().spike

    @property
    def seconds(self) -> float:
        """Duration of the whole step on this rank."""
        return self.timer.seconds

    def __repr__(self) -> str:
        figures = f"loss={self.loss}, grad_norm={self.grad_norm}, tokens={self.tokens}"
        return f"Step(index={self.index}, {figures}, skipped={self.skipped}, seconds={self.seconds})"


def train(
    state: TrainState,
    plan: Plan,
    *,
    loss: Loss = next_token_loss,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Trains `state` from its current step to the last step of the run, and yields each step. Collective.

    loss: `loss(model, microbatch)`, see `models.loss.Loss`. If the plan divides sequences over ranks, it
        gets this rank's part of each microbatch, as `cut_sequences` returns it.
    should_stop: called before each step; if True on any rank, all stop after that step (on GPUs, the next)

    Learning rates: see [Note: whose rates] in `learning_rates.py`. Modules keep the modes that the user gave
    them (`ModelBetweenSteps`). Python's garbage collector runs between steps alone.
    On a GPU, the host launches a step before the one before has ended, except in the strict order
    (`host_waits_before_each_update`), so what follows from a step's figures happens one step later.

    After a `break`, another `train` of the same state continues where it stopped. A plain iterable as
    `state.data` ends training on all ranks as soon as it ends on any, which is logged; the next `train`
    begins it anew. Only `data.batches.MicrobatchSource` resumes exactly. Changed settings are logged.

    Raises TrainError without data for one step, for different batches on ranks that share sequences, a loss
    that depends on trained parameters outside the model, gradients that the loop leaves, after
    `train.max_skipped_steps` skipped steps in a row, and for ranks in different steps or different replicas.

    >>> [step.index for step in fs.train(state, plan)]  # each step also has its loss, norm and seconds
    [1, 2, 3]
    """
    check_average_is_planned(state.average, plan.run.ema)
    _log_settings_and_set_loss_scale(state, plan)
    source = _make_microbatch_source(state, plan)
    skips = _SkipsInARow(plan.run.train.max_skipped_steps, begun_after=state.step)
    replicas = ReplicaCheck(plan)
    between = ModelBetweenSteps(state)
    loss = refuse_parameters_outside_model(loss, state.model)
    with collect_garbage_between_steps() as collect_garbage:
        while state.step < plan.run.train.step_count:
            between.prepare_step()
            launched = _launch_step_or_end(state, plan, source=source, loss=loss, should_stop=should_stop)
            if launched is None:
                break
            replicas.compare_if_due(state.model, state.tensors, step=state.step, where=state.phase)
            collect_garbage(state.step)
            launched.timer.stop()
            state.phase.finish_step(state.step)
            own = launched.result
            late, state.not_acted_on = (own, None) if own.is_read else (state.not_acted_on, own)
            known = late.read() if late is not None else _NOTHING_KNOWN
            skips.count_step(known, own_loss=None if late is None else late.own_loss)
            can_roll_back = plan.run.fault_tolerance.on_spike == "rollback"
            stopping, rollback = known.stop_requested, can_roll_back and (known.spike or skips.are_too_many)
            yield replace(launched, stopping=stopping, rollback=rollback)
            skips.withdraw_and_raise_if_too_many(state, plan)
            if stopping:
                break
        if (last := state.not_acted_on) is not None:
            state.not_acted_on = None
            skips.count_step(last.read(), own_loss=last.own_loss)
            skips.withdraw_and_raise_if_too_many(state, plan)


_NOTHING_KNOWN = StepResult(loss=math.nan, grad_norm=math.nan, tokens=0, trained_tokens=0, skipped=False)


def _log_settings_and_set_loss_scale(state: TrainState, plan: Plan) -> None:
    """Logs settings that changed or have no effect. Sets the precision's loss scale, and `state.phase`."""
    for message in set_next_row_and_describe_changes(state, plan):
        if rank() == 0:
            logger.warning("%s", message)
    warn_of_unused_settings(state.optimizer, plan.run.optimizer)
    if plan.precision.stochastic_rounding and not is_built_by_fullshard(state.optimizer) and rank() == 0:
        logger.warning(
            'precision.mode = "bf16_pure": %s loses small updates, unless it rounds stochastically itself, '
            "as the optimizer of fs.build_optimizer does",
            type(state.optimizer).__name__,
        )
    warn_that_schedule_multiplies_rates(state.optimizer, plan.run)
    if not plan.precision.loss_scaling:
        state.loss_scale = LossScale()
    elif state.loss_scale.window == 0:  # else a checkpoint of the same precision brought a scale
        state.loss_scale = LossScale(2.0**16, window=2000)
    state.phase.step = state.step
    if (order := find_unit_order_recorder(state.model)) is not None:
        state.phase.last_unit_name = order.last_unit_name


def _launch_step_or_end(
    state: TrainState,
    plan: Plan,
    *,
    source: Callable[[int], Iterable[Any] | None],
    loss: Loss,
    should_stop: Callable[[], bool],
) -> Step | None:
    """Launches the next step, and counts it, after waiting for the step before. Returns None without data."""
    timer, started = StepTimer(next(state.model.parameters()).device), time.perf_counter()
    state.phase.enter(RunPhase.DATA)
    with record_function(_DATA):
        batches = source(state.rows or 0)
    if batches is None:
        return None
    timed = _TimedMicrobatches(batches, seconds=time.perf_counter() - started)
    result = run_step(state, plan, microbatches=timed, loss=loss, stop=should_stop())
    state.phase.enter(RunPhase.REDUCE)
    state.rows = (state.rows or 0) + plan.run.train.global_batch
    state.count_step_and_commit(result)
    first = state.optimizer.param_groups[0].get("lr")
    rate = math.nan if first is None else float(first)
    return Step(index=state.step, learning_rate=rate, data_seconds=timed.seconds, result=result, timer=timer)


@dataclass
class _SkipsInARow:
    """Number of skipped steps in a row, of which `most` end the run.

    begun_after: number of steps of the state when counting began; 0 for a new run
    total: number of steps counted
    without_labels: number of skipped steps in a row without a label that counts, up to the last
    own_loss: the sum of this rank's losses in the last step
    """

    most: int
    begun_after: int
    total: int = 0
    count: int = 0
    without_labels: int = 0
    last: StepResult = _NOTHING_KNOWN
    own_loss: Tensor | None = None

    def count_step(self, result: StepResult, *, own_loss: Tensor | None) -> None:
        self.own_loss = own_loss
        self.total += result is not _NOTHING_KNOWN
        self.count, self.last = self.count + 1 if result.skipped else 0, result
        self.without_labels = self.without_labels + 1 if result.trained_tokens == 0 and result.skipped else 0

    @property
    def are_too_many(self) -> bool:
        return self.count >= self.most

    def withdraw_and_raise_if_too_many(self, state: TrainState, plan: Plan) -> None:
        """Raises TrainError after `most` skipped steps in a row. Withdraws the offloaded generation first.

        All ranks decide alike, and gather which ranks had a loss that is not finite.
        """
        if self.are_too_many:
            if state.offloaded:
                state.offloaded.withdraw_generation()
            is_own_finite = self.own_loss is None or math.isfinite(self.own_loss.item())
            by_rank: list[bool] = all_gather_object(is_own_finite)
            behind = 1 if state.not_acted_on is None else 2  # a host ahead of its device launched one more
            row = (state.rows or 0) - behind * plan.run.train.global_batch
            raise _too_many_skipped_error(self, losses=_finite_losses_text(by_rank, plan, row=row))


def _make_microbatch_source(state: TrainState, plan: Plan) -> Callable[[int], Iterable[Any] | None]:
    """Returns a function that maps the first row of a step to this rank's microbatches.

    It returns None if any rank has no more. See [Note: place in the data] in `resume.py`.
    """

    is_checked = False

    def iterate_sequence_parts(given: Iterable[Any]) -> Iterable[Any]:
        nonlocal is_checked
        for batch in given:
            if not is_checked:
                _warn_if_tokens_differ(batch, plan)
                _check_batches_of_ranks(batch, plan)
            is_checked = True
            yield cut_sequences(batch, plan)

    if hasattr(state.data, "microbatches"):
        batches = cast(MicrobatchSource, state.data)
        own, batch, seen = plan.data_rank(rank()), plan.run.train.global_batch, plan.for_data
        if (state.rows or 0) % batch:
            at_row = cast(RowSource, state.data).microbatches_at_row
            return lambda row: iterate_sequence_parts(at_row(row, rank=own, plan=seen))
        return lambda row: iterate_sequence_parts(batches.microbatches(row // batch, rank=own, plan=seen))
    if not isinstance(state.data, Iterable):
        raise TrainError(
            "there is no data to train on.",
            got=type(state.data).__name__,
            fix="TrainState(model, optimizer, data=data): an iterable of microbatches, or a source of them",
        )
    begun_at = state.step if state.iterator is None else None
    if state.iterator is None:
        state.iterator = iter(cast(Iterable[Any], state.data))

    def next_microbatches(_row: int) -> Iterable[Any] | None:
        own = _take_microbatches(state, plan, begun_at=begun_at)
        return None if own is None else iterate_sequence_parts(own)

    return next_microbatches


def _take_microbatches(state: TrainState, plan: Plan, *, begun_at: int | None) -> list[Any] | None:
    """Returns the next microbatches of a plain iterable; None if any rank has no more. Collective.

    begun_at: number of steps before the iterable's first one; None if an earlier `train` took its first ones

    Raises TrainError if the iterable is not enough for one step.
    """
    own = list(itertools.islice(cast(Iterator[Any], state.iterator), plan.accumulation))
    # Ranks whose iterables differ in length would wait for each other forever, so they agree first.
    if all_ranks_have(len(own) == plan.accumulation):
        return own
    state.iterator = None
    left = all_gather_object(len(own))
    ended = [number for number, count in enumerate(left) if count < plan.accumulation]
    whose = f"rank {', '.join(map(str, ended[:8]))}{', …' if ended[8:] else ''}"
    if state.step == begun_at:
        raise TrainError(
            "the data is not enough for one step.",
            got=f"{min(left)} microbatches on {whose}, of {plan.accumulation} in a step",
            why="the iterable is empty, too short, or an iterator that was used up before",
            fix="a list or a DataLoader, which can be iterated again, with as many microbatches on each rank",
        )
    if rank() == 0:
        logger.warning(
            "the data ended after step %d of %d, first on %s. %d microbatches of an incomplete step are not "
            "used. The next `train` begins the data anew.",
            state.step,
            plan.run.train.step_count,
            whose if len(ended) < len(left) else "all ranks",
            sum(left),
        )
    return None


def _check_batches_of_ranks(batch: Any, plan: Plan) -> None:
    """Compares the first microbatches of all ranks. Collective.

    Raises TrainError if ranks that share sequences have different ones. Logs a warning if ranks that train on
    different rows have equal ones. A batch that is on a device already is not compared, since the host would
    wait for it.
    """
    checksum: int | None = None
    for tensor in (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_cpu):
        values = tensor.detach().contiguous().flatten().view(torch.uint8)
        checksum = zlib.crc32(values.numpy().tobytes(), checksum or 0)
    by_data_rank: dict[int, int | None] = {}
    for number, own in enumerate(all_gather_object(checksum)):
        if by_data_rank.setdefault(plan.data_rank(number), own) != own:
            raise TrainError(
                "ranks that share each sequence have different batches.",
                got=f"ranks {number - 1} and {number}",
                why="tensor_parallel and context_parallel divide the work on one batch over adjacent ranks",
                fix="DistributedSampler(…, plan.data_parallel_degree, plan.data_rank(rank)); or in your own "
                "source, rows that depend on nothing except its arguments",
            )
    is_same = checksum is not None and len(set(by_data_rank.values())) == 1
    if len(by_data_rank) > 1 and is_same and rank() == 0:
        logger.warning(
            "the first microbatch is the same on all %d ranks: each row would be trained on %d times. Give "
            "each rank its own rows: those of `rank` in `microbatches`, or those of a DistributedSampler.",
            len(by_data_rank),
            len(by_data_rank),
        )


def _warn_if_tokens_differ(batch: Any, plan: Plan) -> None:
    """Logs a warning if `batch` has another number of tokens than the plan's microbatch."""
    length, tokens = plan.run.data.sequence_length, count_computed_tokens(batch, plan)
    if tokens != plan.microbatch * length:
        logger.warning(
            "the first microbatch of the data has %d tokens (%g rows of %d), and the plan is for %d rows "
            "(× %d accumulated): its predictions of memory and time, and train.global_batch, assume the "
            "latter. Set data.sequence_length to the length of the rows, and pin train.microbatch or ask "
            "plan.microbatch before the data is made.",
            tokens,
            tokens / length,
            length,
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


def _finite_losses_text(by_rank: Sequence[bool], plan: Plan, *, row: int) -> str:
    """Returns which ranks had a loss that is not finite in the step from sample `row` on, and the samples."""
    wrong = [rank for rank, is_finite in enumerate(by_rank) if not is_finite]
    if not wrong:
        return "the loss was finite on each rank"
    if len(wrong) == len(by_rank):
        return "the loss was finite on no rank"
    turns = (0, plan.accumulation - 1)
    own = (microbatch_sample_numbers(turn, data_rank=plan.data_rank(wrong[0]), plan=plan) for turn in turns)
    first, last = next(own)[0], next(own)[-1]
    some = "" if plan.accumulation == 1 else f"{plan.accumulation * plan.microbatch:,} of the "
    samples = f"in {some}samples {row + first:,} to {row + last:,} of the run's order"
    if len(wrong) == 1:
        return f"the loss was not finite on rank {wrong[0]} alone of {len(by_rank)}, {samples}"
    return f"the loss was not finite on {len(wrong)} of {len(by_rank)} ranks; on rank {wrong[0]}, {samples}"


def _too_many_skipped_error(skips: _SkipsInARow, *, losses: str) -> TrainError:
    count, last = skips.count, skips.last
    if skips.without_labels == count:
        return TrainError(
            f"{count_text(count, 'step')} in a row had nothing to train on.",
            got="no label that counts on any rank",
            why="a step without such a label updates nothing",
            fix="data.train_on = all, or a longer data.sequence_length (answers beyond are cut off); "
            "of your own data and loss, labels other than -100, and counts above 0",
        )
    loaded = skips.begun_after if count == skips.total else 0  # step of a checkpoint right before them, or 0
    stands_out = ", or stood out" if last.spike else ""
    return TrainError(
        f"{count_text(count, 'step')} in a row had a loss or gradient norm that is not finite{stands_out}.",
        got=f"loss {last.loss}, gradient norm {last.grad_norm}; in the last of them, {losses}",
        why="nothing was updated in them, and nothing suggests that the next one would differ",
        fix=f"an older checkpoint, if that of step {loaded} is what is wrong (move it away), "
        "or a look at the data"
        if loaded
        else "a lower optimizer.learning_rate, longer schedule.warmup_steps, or a look at the data",
    )


# Steps between collections of each generation of objects.
_EVERY = {0: 1, 1: 50, 2: 1000}


@contextmanager
def collect_garbage_between_steps() -> Generator[Callable[[int], object]]:
    """Context without automatic garbage collection. Yields a function to call with each step's number.

    Python's collector runs when enough objects have been created. That happens at another moment on each
    rank, and all others wait for the rank that collects. So all ranks collect between the same steps.
    Does nothing if the program has disabled the collector itself.
    """
    if not gc.isenabled():
        yield lambda step: None
        return
    gc.disable()
    enable = gc.enable  # modules may be gone when the interpreter ends within the context
    try:
        yield lambda step: gc.collect(max(one for one, every in _EVERY.items() if step % every == 0))
    finally:
        enable()
