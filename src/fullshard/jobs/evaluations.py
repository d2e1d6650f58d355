"""The evaluations of a run: its validation, and those of [[evaluate]]."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.checkpoint.results import EvaluationResult
from fullshard.data.batches import TrainingData
from fullshard.data.build import build_evaluation_data
from fullshard.data.token_store import Heartbeat, no_heartbeat
from fullshard.distributed.agreement import rank
from fullshard.distributed.sequence_parts import cut_sequences
from fullshard.errors import SpecError
from fullshard.models.loss import Loss
from fullshard.quantities import count_text, format_count
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.spec.settings.evaluate_section import (
    LOWEST_VALIDATION_LOSS,
    VALIDATION,
    BestResult,
    Evaluation,
)
from fullshard.survival.phase import RunPhase
from fullshard.system.dotted import import_callable
from fullshard.training.between_steps import averaged_weights
from fullshard.training.evaluate import EvaluationFunction, mean_loss, metrics_of_function
from fullshard.training.harness import make_task_function
from fullshard.training.state import TrainState


@dataclass(frozen=True)
class RunEvaluation:
    """An evaluation of a run, ready to be called.

    data: the data whose mean loss is the result; None for a function or task
    function: the function that computes the metrics of a `call` or `task`; None for data
    """

    settings: Evaluation
    data: TrainingData | None = None
    function: EvaluationFunction | None = None

    @property
    def data_digest(self) -> str | None:
        """Text that differs if the data do; None if that is not known."""
        return getattr(self.data, "validation_digest", None) or getattr(self.data, "row_order", None)

    def compute_results(self, model: nn.Module, plan: Plan, *, loss: Loss) -> dict[str, float]:
        """Evaluates `model`. Returns the results by name (`Evaluation.result_key`). Collective."""
        key = self.settings.result_key
        if self.function is not None:
            metrics = metrics_of_function(self.function, model, plan=plan, name=self.settings.name)
            return {key(metric): value for metric, value in metrics.items()}
        return {key("loss"): mean_loss(model, self._iterate_batches(plan), loss=loss)}

    def _iterate_batches(self, plan: Plan) -> Iterator[Any]:
        assert self.data is not None, "an evaluation has data or a function"
        run = plan.run.with_settings({"train": {"validate_sequences": self.settings.sequences}})
        reading = plan.model_copy(update={"run": run})
        for batch in self.data.validation(rank=plan.data_rank(rank()), plan=reading.for_data):
            yield cut_sequences(batch, plan)


def import_functions(run: Run) -> dict[str, EvaluationFunction]:
    """Returns the functions of each `call` and `task`, by name of the evaluation.

    Raises SpecError for a function that cannot be imported; for a task, as `make_task_function` does.
    """
    return {
        one.name: make_task_function(one, run.data)
        if one.call is None
        else import_callable(one.call, key=f"evaluate.{one.name}.call")
        for one in run.evaluate
        if not one.paths
    }


def build_evaluations(
    run: Run, data: TrainingData, *, alive: Heartbeat = no_heartbeat
) -> tuple[RunEvaluation, ...]:
    """Prepares the data, and the functions and tasks, of all evaluations of `run`.

    data: the data of the run, with the rows of the validation

    Raises as `import_functions` and `build_data` do, and SpecError if `checkpoint.keep_best` names a
    validation without data.
    """
    functions = import_functions(run)
    found: list[RunEvaluation] = []
    for one in run.evaluations:
        if one.name == VALIDATION:
            found += [RunEvaluation(one, data)] if data.validation_tokens else []
            continue
        own = build_evaluation_data(run, one.paths, alive=alive) if one.paths else None
        found.append(RunEvaluation(one, own, functions.get(one.name)))
    best = run.best_result
    if best is not None and best == LOWEST_VALIDATION_LOSS and not (found and found[0].data is data):
        raise SpecError(
            "checkpoint.keep_best names the validation, which has no data.",
            got=f"checkpoint.keep_best = {run.checkpoint.keep_best!r}",
            fix="data.validation_paths, or the name of one of [[evaluate]]",
        )
    return tuple(found)


def evaluation_lines(evaluations: Sequence[RunEvaluation]) -> list[str]:
    lines: list[str] = []
    for one in evaluations:
        settings = one.settings
        if settings.name == VALIDATION:
            continue
        every = "every step" if settings.every == 1 else f"every {settings.every} steps"
        when = [every] if settings.every else []
        when += ["at the start"] if settings.at_start else []
        when += ["at the end"] if settings.at_end else []
        what = settings.call or settings.task
        if one.data is not None:
            most = f", at most {count_text(settings.sequences, 'sequence')}" if settings.sequences else ""
            tokens = format_count(one.data.validation_tokens)
            what = f"loss of {tokens} tokens in {', '.join(settings.paths)}{most}"
        weights = ", of the averages" if settings.weights == "ema" else ""
        lines.append(f"evaluation {settings.name}: {what}{weights}; {', '.join(when)}")
    return lines


def evaluate_and_note_results(
    evaluations: Sequence[RunEvaluation], state: TrainState, *, plan: Plan, loss: Loss
) -> dict[str, float]:
    """Computes the results of `evaluations`, by name. Notes the finite ones in `state.results`. Collective.

    Each forward of the model is progress for the watchdog.
    """
    found: dict[str, float] = {}
    state.wait_for_updates()
    enter = lambda *_: state.phase.enter(RunPhase.VALIDATING)  # noqa: E731
    for one in evaluations:
        enter()
        hook = state.model.register_forward_pre_hook(enter)
        try:
            averages = one.settings.weights == "ema"
            with averaged_weights(state) if averages else nullcontext():
                results = one.compute_results(state.model, plan, loss=loss)
        finally:
            hook.remove()
        found |= results
        for key, value in results.items():
            state.results.pop(key, None)
            if math.isfinite(value):
                # Results of averages and of the trained weights cannot be compared.
                data = f"{one.data_digest} by averages" if averages else one.data_digest
                state.results[key] = EvaluationResult(value, state.step, data)
    return found


def note_best_and_return_whether_new(state: TrainState, best: BestResult | None) -> bool:
    """Returns whether the last step has the best result so far, which is then noted in `state.best`."""
    now = None if best is None else state.results.get(best.key)
    if best is None or now is None or now.step != state.step:
        return False
    before = state.best.get(best.key)
    if before is not None and before.data == now.data and not best.is_better(now.value, before.value):
        return False
    state.best = {best.key: now}
    return True
