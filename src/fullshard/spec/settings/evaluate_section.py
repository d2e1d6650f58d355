"""[[evaluate]]: evaluations of a run beside its validation, and the result by which a checkpoint is kept."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Self

from pydantic import model_validator

from fullshard.spec import value

VALIDATION = "validation"
"""Name of the evaluation that `train.validate_every` and [data] describe."""

_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
METRIC = r"[A-Za-z0-9][A-Za-z0-9_./@-]{0,119}"
RESULT = re.compile(rf"{_NAME}\.{METRIC}")
"""Name of a result of [[evaluate]], see `Evaluation.result_key`."""
_KEPT = re.compile(rf"(?:(highest|lowest) +)?({_NAME})(?:\.({METRIC}))?")
_TASKS = re.compile(r"lm_eval:([^\s,]+(?:,[^\s,]+)*)")


class Evaluation(value.FrozenModel):
    """Settings of an evaluation of the model while it trains, in evaluation mode and without gradients.

    It leaves no trace: the run trains as it would without it, bit for bit.

    `name`: its results are `name.loss`, or `name.metric` for each metric of a `call`
    `every`: steps between evaluations, or a fraction of the steps; 0: only those of `at_start` and `at_end`
    `at_start`, `at_end`: also before the first step of a new run, and after the last step
    `paths`: files or directories as in `data.paths`, prepared as [data] says. The result is the mean loss.
    `call`: `package.module:function`, called on all ranks with the sharded model and the plan. It returns a
        dict of metrics: numbers, equal on all ranks, or (sum, count), which are summed over ranks and divided
    `task`: `lm_eval:NAME`, or several names with commas between them: tasks or groups of
        lm-evaluation-harness (the extra `lm_eval`), or YAML files of tasks. The metrics are `task.metric`, or
        `task.metric@filter` if the task filters answers.
    `weights`: `ema` computes with the averages that [ema] keeps, in place of the trained parameters
    `sequences`: the most sequences of `paths`, evenly spread, or the most documents of each task, from its
        first; 0 is all
    """

    name: str
    every: value.Steps = 0
    at_start: bool = False
    at_end: bool = True
    paths: tuple[value.PathText, ...] = ()
    call: str | None = None
    task: str | None = None
    weights: Literal["model", "ema"] = "model"
    sequences: value.Count = 0

    @model_validator(mode="after")
    def _check_name_and_kind(self) -> Self:
        if not re.fullmatch(_NAME, self.name):
            raise ValueError(f"name = {self.name!r} is not a letter, then letters, digits, _ or -")
        if sum(map(bool, (self.paths, self.call, self.task))) != 1:
            raise ValueError(
                f'{self.name}: either paths = ["data/*.jsonl"], call = "package.module:function" '
                'or task = "lm_eval:NAME"'
            )
        if self.sequences and self.call:
            raise ValueError(f"{self.name}: sequences = {self.sequences} is for paths and task, not for call")
        if self.task and not _TASKS.fullmatch(self.task):
            raise ValueError(
                f'{self.name}: task = {self.task!r} is not "lm_eval:NAME" or "lm_eval:NAME,NAME"'
            )
        if not (self.every or self.at_start or self.at_end):
            raise ValueError(f"{self.name} is never evaluated: set every, at_start or at_end")
        return self

    def result_key(self, metric: str) -> str:
        """Returns the name of a result: `name.metric`; `validation_loss` of the validation."""
        return f"{self.name}_{metric}" if self.name == VALIDATION else f"{self.name}.{metric}"

    def is_due(self, step: int, *, last_step: int) -> bool:
        return (self.at_end and step == last_step) or bool(self.every and step % self.every == 0)


class BestResult(NamedTuple):
    """The result by which the best checkpoint is kept.

    key: name of the result, see `Evaluation.result_key`
    is_highest: whether the highest value is the best, not the lowest
    """

    key: str
    is_highest: bool

    def is_better(self, one: float, other: float) -> bool:
        """Returns whether `one` is better than `other`. NaN is better than nothing."""
        return one > other if self.is_highest else one < other


LOWEST_VALIDATION_LOSS = BestResult(f"{VALIDATION}_loss", False)


def parse_kept_result(text: str, evaluations: Sequence[Evaluation]) -> BestResult:
    """Returns the result that `checkpoint.keep_best` names.

    evaluations: those of the run, with its validation if it has one

    Raises ValueError for a name without an evaluation, a loss with `highest`, and a metric of a `call` or
    `task` without `highest` or `lowest`.
    """
    match, names = _KEPT.fullmatch(text.strip()), ", ".join(one.name for one in evaluations)
    found = next((one for one in evaluations if match and one.name == match[2]), None)
    if match is None or found is None:
        raise ValueError(f"keep_best = {text!r} names no evaluation: {names or 'the run has none'}")
    order, name, metric = match.groups()
    if not (found.call or found.task):
        if order == "highest" or metric not in (None, "loss"):
            raise ValueError(
                f'keep_best = {text!r}: the result of {name} is a loss, of which the lowest is best: "{name}"'
            )
        return BestResult(found.result_key("loss"), False)
    if order is None or metric is None:
        metric = metric or "accuracy"
        raise ValueError(f'keep_best = {text!r}: "highest {name}.{metric}" or "lowest {name}.{metric}"')
    return BestResult(found.result_key(metric), order == "highest")


def results_text(results: Mapping[str, float]) -> list[str]:
    """Returns a line for the results of each evaluation: `validation loss 1.2345`, `quiz accuracy 0.5`."""
    by_name: dict[str, list[str]] = {}
    for key, figure in results.items():
        is_validation = key == LOWEST_VALIDATION_LOSS.key
        name, _, metric = (f"{VALIDATION}.loss" if is_validation else key).partition(".")
        by_name.setdefault(name, []).append(f"{metric} {figure:.4f}")
    return [f"{name} {', '.join(figures)}" for name, figures in by_name.items()]
