"""Evaluation of a sharded model between two steps: the mean loss of batches, and metrics of a function.

[Note: an evaluation leaves no trace] Modes, units and random number generators are afterwards as before
(`evaluation_mode`), and nothing has a gradient.

[Note: equally many batches] A rank that has no batch left would not gather units with the others, which would
wait forever. So the ranks agree on how many batches follow, and a rank that has fewer repeats its last one,
which counts for nothing.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.distributed.agreement import (
    ErrorCapture,
    all_gather_object,
    all_ranks_have,
    largest_over_ranks,
    rank,
    world_size,
)
from fullshard.errors import TrainError
from fullshard.models.loss import Loss, loss_sum_and_count
from fullshard.parallel.fp8 import make_scale_reuse_context
from fullshard.spec.plan import Plan
from fullshard.spec.settings.data_section import IGNORED_LABEL
from fullshard.spec.settings.evaluate_section import METRIC
from fullshard.training.between_steps import evaluation_mode
from fullshard.training.step import move_batch_to_device

EvaluationFunction = Callable[[nn.Module, Plan], Mapping[str, Any]]
"""Function of a `call` or `task`: the sharded model and the plan -> metrics, see `metrics_of_function`."""

_AGREED_BATCHES = 8  # batches on which ranks agree at once, and which they hold until then
_Figure = tuple[float, float | None]  # a number and None, or a sum and its count


@torch.no_grad()
def mean_loss(model: nn.Module, microbatches: Iterable[Any], *, loss: Loss) -> float:
    """Returns the mean loss over the microbatches of all ranks, equal on every rank. Collective.

    Ranks may have different numbers of microbatches. Sums are in fp64.

    A mean counts as often as its microbatch has labels other than -100, since the last microbatches are
    filled up with rows that have none; without labels, once. The result is NaN if nothing counts. Raises
    TrainError if some ranks have microbatches and others none, and as a step does for what is not a loss.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluation_mode(model), make_scale_reuse_context(model):
        for batch, counts in _iterate_equally_many(microbatches):
            batch = move_batch_to_device(batch, device)
            value = loss(model, batch)
            total, count = loss_sum_and_count(value)
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if not isinstance(value, tuple) and isinstance(labels, Tensor):
                count = (labels != IGNORED_LABEL).sum()
                total = torch.where(count > 0, total * count, 0.0)  # a mean over no labels is NaN
            if counts:
                sums[0] += total
                sums[1] += count
    if world_size() > 1:
        dist.all_reduce(sums)
    total_loss, total_count = cast(list[float], sums.tolist())
    return total_loss / total_count if total_count else math.nan


@torch.no_grad()
def metrics_of_function(
    function: EvaluationFunction, model: nn.Module, *, plan: Plan, name: str
) -> dict[str, float]:
    """Returns the metrics that `function(model, plan)` returns on all ranks. Collective.

    name: name of the evaluation, for errors

    A metric is a number, equal on all ranks, or a pair (sum, count): the result is then the sum of the sums
    over all ranks, divided by that of the counts, and NaN if nothing counts. An error of the function gets a
    note with the name of the evaluation and the rank. Raises TrainError on all ranks for other results.
    """
    attempt, metrics = ErrorCapture(), dict[str, Any]()
    with evaluation_mode(model), make_scale_reuse_context(model), attempt:
        metrics = function(model, plan)
    if attempt.error is not None:
        # No collective here: the other ranks may wait in one of the model. The launcher ends them.
        attempt.error.add_note(f"in the evaluation {name!r} on rank {rank()}")
    attempt.raise_captured()
    checked = ErrorCapture()
    own: dict[str, _Figure] = {}
    with checked:
        own = _check_metrics(metrics, name)
    by_rank = all_gather_object((own, cast(TrainError | None, checked.error)))
    if failed := next((error for _, error in by_rank if error is not None), None):
        raise failed
    return _merge_metrics([figures for figures, _ in by_rank], name)


def _iterate_equally_many(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields (batch, whether it counts), equally often on all ranks. See [Note: equally many batches]."""
    own, last = iter(batches), list[Any]()
    for turn in itertools.count():
        held = list(itertools.islice(own, _AGREED_BATCHES))
        last = held[-1:] or last
        most = int(largest_over_ranks([len(held)])[0])
        if not most:
            return
        if turn == 0 and not all_ranks_have(bool(held)):
            first = all_gather_object(bool(held)).index(False)
            raise TrainError(
                "a rank has no batch to evaluate on, and others have some.",
                got=f"none on rank {first}, {most} or more on another rank",
                why="a rank that does not compute with the others would let them wait forever",
                fix="at least one batch for each rank; its labels may all be -100",
            )
        for index in range(most):
            yield (held[index], True) if index < len(held) else (last[0], False)


def _check_metrics(metrics: object, name: str) -> dict[str, _Figure]:
    """Returns the metrics of this rank. Raises TrainError unless it is a dict of numbers and pairs."""
    if not isinstance(metrics, Mapping) or not metrics:
        raise _metrics_error(name, got=type(metrics).__name__ if metrics else "nothing")
    found: dict[str, _Figure] = {}
    for key, value in cast(Mapping[Any, Any], metrics).items():
        if not isinstance(key, str) or not re.fullmatch(METRIC, key):
            raise _metrics_error(name, got=f"the name {key!r}"[:200])
        pair = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
        numbers = [_float_or_none(one) for one in pair]
        if len(numbers) not in (1, 2) or None in numbers:
            raise _metrics_error(name, got=f"{key} = {value!r}"[:200])
        first, *rest = cast(list[float], numbers)
        found[key] = (first, rest[0] if rest else None)
    return found


def _float_or_none(value: Any) -> float | None:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    item = getattr(value, "item", None)  # of numpy's numbers
    value = item() if callable(item) else value
    return float(value) if isinstance(value, int | float) else None


def _metrics_error(name: str, *, got: str) -> TrainError:
    return TrainError(
        f"the function of the evaluation {name!r} returned no metrics.",
        got=got,
        fix='a dict such as {"accuracy": (right, asked)}: names of letters, digits, _ . / @ -, and numbers',
    )


def _merge_metrics(by_rank: list[dict[str, _Figure]], name: str) -> dict[str, float]:
    """Returns the metrics over all ranks. Raises TrainError if ranks have other names or numbers."""
    kinds = [{key: count is None for key, (_, count) in figures.items()} for figures in by_rank]
    if any(one != kinds[0] for one in kinds):
        raise _differing_metrics_error(name, [sorted(figures) for figures in by_rank])
    merged: dict[str, float] = {}
    for key, (first, count) in by_rank[0].items():
        numbers = [figures[key][0] for figures in by_rank]
        if count is not None:
            counted = math.fsum(figures[key][1] or 0.0 for figures in by_rank)
            merged[key] = math.fsum(numbers) / counted if counted else math.nan
            continue
        if any(one != first and not (math.isnan(one) and math.isnan(first)) for one in numbers):
            raise _differing_metrics_error(name, [f"{key} = {one}" for one in numbers])
        merged[key] = first
    return merged


def _differing_metrics_error(name: str, by_rank: list[Any]) -> TrainError:
    other = next(
        number for number, one in enumerate(by_rank) if one != by_rank[0] or number + 1 == len(by_rank)
    )
    return TrainError(
        f"the function of the evaluation {name!r} returned different metrics on different ranks.",
        got=f"{by_rank[0]} on rank 0, {by_rank[other]} on rank {other}",
        why="a number is the result of all ranks",
        fix="(sum, count) for a mean over the examples of all ranks",
    )
