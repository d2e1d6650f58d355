"""Results of evaluations in checkpoints, and which checkpoint has the best one."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from fullshard.spec.settings.evaluate_section import BestResult

RESULTS = "results"
"""Name of the results in the values of a checkpoint."""
_LARGEST = 1e300


class EvaluationResult(NamedTuple):
    """A finite result of an evaluation after `step`.

    data: text that differs if the data of the evaluation do, so that results cannot be compared; or None
    """

    value: float
    step: int
    data: str | None = None


def encode_results(results: Mapping[str, EvaluationResult]) -> dict[str, JsonValue]:
    """Returns JSON values of results by name, for `read_results`."""
    return {key: dict(one._asdict()) for key, one in results.items()}


def read_results(values: JsonValue) -> dict[str, EvaluationResult]:
    """Returns the results by name. Leaves out what is not a result."""
    found: dict[str, EvaluationResult] = {}
    for key, one in (values if isinstance(values, dict) else {}).items():
        fields = one if isinstance(one, dict) else {}
        value, step, data = (fields.get(name) for name in EvaluationResult._fields)
        if isinstance(value, int | float) and abs(value) <= _LARGEST and isinstance(step, int):
            found[key] = EvaluationResult(float(value), step, data if isinstance(data, str) else None)
    return found


def find_best_step(
    saved: Iterable[tuple[int, Mapping[str, JsonValue]]], wanted: BestResult | None
) -> int | None:
    """Returns the step of the checkpoint with the best result, of equal ones the oldest; None without one.

    saved: (step, values) of checkpoints, the newest first. Only a result after the checkpoint's own step is
        one of its weights. Results on other data than that of the newest do not count.
    """
    if wanted is None:
        return None
    best: EvaluationResult | None = None
    for step, values in saved:
        one = read_results(values.get(RESULTS)).get(wanted.key)
        if one is None or one.step != step or (best is not None and one.data != best.data):
            continue
        if best is None or not wanted.is_better(best.value, one.value):
            best = one
    return None if best is None else best.step
