"""Measurements with fake ranks run, and their extrapolation finds how counts grow."""

import math

import pytest

from bench.scale.checkpoints import CHECKPOINT_CASES
from bench.scale.control import CONTROL_CASES, count_requests_of_ranks
from bench.scale.measure import Case, fit_growth, in_child

ISOLATED = [case for case in (*CONTROL_CASES, *CHECKPOINT_CASES) if case.is_isolated]


@pytest.mark.parametrize("case", ISOLATED, ids=lambda case: case.name)
def test_every_case_is_measured(case: Case) -> None:
    rows, _ = in_child(case.measure, 64, case.least)
    assert rows
    assert [row.problem for row in rows if row.problem] == []


def test_every_rank_asks_the_store_at_its_start() -> None:
    assert all(count > 2 for count in count_requests_of_ranks(2))


@pytest.mark.parametrize(
    "grows",
    [lambda n: 3 * n, lambda n: n * math.log2(n), lambda n: 4 * n * n, lambda n: 2 * n * n + 30 * n],
    ids=["N", "N log N", "N²", "N² + N"],
)
def test_growth_is_found_from_few_ranks(grows) -> None:
    fitted = fit_growth({n: grows(n) * (1.01 if n == 8 else 1) for n in (4, 8, 16, 24)})
    assert fitted(16384) == pytest.approx(grows(16384), rel=0.1)
