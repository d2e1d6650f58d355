"""Results of evaluations in checkpoints: the best one, and results of unknown origin."""

from collections.abc import Mapping
from typing import Any

import pytest

from fullshard.checkpoint.results import RESULTS, EvaluationResult, find_best_step, read_results
from fullshard.spec.settings.evaluate_section import BestResult

LOWEST, HIGHEST = BestResult("a.loss", False), BestResult("a.loss", True)


def saved(*results: tuple[float, int, str | None]) -> list[tuple[int, Mapping[str, Any]]]:
    """Checkpoints of the steps 1, 2, …, the newest first, each with (value, step, data)."""
    encoded = [{"value": value, "step": step, "data": data} for value, step, data in results]
    return [(number, {RESULTS: {"a.loss": one}}) for number, one in enumerate(encoded, start=1)][::-1]


@pytest.mark.parametrize(
    ("checkpoints", "wanted", "step"),
    [
        (saved((2.0, 1, None), (1.0, 2, None), (3.0, 3, None)), LOWEST, 2),
        (saved((2.0, 1, None), (1.0, 2, None), (3.0, 3, None)), HIGHEST, 3),
        (saved((1.0, 1, None), (1.0, 2, None)), LOWEST, 1),  # of equal ones the older
        (saved((2.0, 1, None), (1.0, 1, None)), LOWEST, 1),  # the second has a result of other weights
        (saved((1.0, 1, "old"), (3.0, 2, "new"), (2.0, 3, "new")), LOWEST, 3),
        (saved((1.0, 1, None)), BestResult("b.loss", False), None),
        (saved((1.0, 1, None)), None, None),
        ([(1, {})], LOWEST, None),
    ],
)
def test_the_best_checkpoint_is_found(checkpoints: Any, wanted: BestResult | None, step: int | None) -> None:
    assert find_best_step(checkpoints, wanted) == step


def test_values_that_are_no_results_are_left_out() -> None:
    good = {"value": 1, "step": 2, "data": None}
    others = (
        None,
        3,
        "x",
        [1],
        {},
        {**good, "value": 10**400},
        {**good, "value": "1"},
        {**good, "step": None},
    )
    assert read_results({"good": good, **{str(i): one for i, one in enumerate(others)}}) == {
        "good": EvaluationResult(1.0, 2)
    }
    assert read_results(["good"]) == {}
