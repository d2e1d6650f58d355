"""A rank is named if it is slower than all others in most steps, with its largest cause, and none else."""

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stragglers import run_windows
from fullshard.distributed.ranges import OwnWorkSeconds
from fullshard.observe.stragglers import (
    FLOOR_SECONDS,
    NOISE_SECONDS,
    SCORE,
    SHARE,
    Straggler,
    StragglerCause,
    data_seconds_without_lead,
    find_stragglers,
    quartiles,
)

CAUSES = list(StragglerCause)
STEP = 0.5
NOISE = st.floats(0.0, 0.004)


Figures = tuple[float, float, float]


def window(*, steps: int = 10, **own: Figures) -> list[float]:
    """A row of Windows; causes that are not given took no time."""
    return [steps, STEP, 0.1, *(one for c in CAUSES for one in own.get(c.name.lower(), (0.0, 0.0, 0.0)))]


def quiet(ranks: int) -> st.SearchStrategy[list[dict[str, Figures]]]:
    """Figures by cause of ranks that do the same, up to noise."""
    noisy = st.lists(NOISE, min_size=3, max_size=3).map(lambda noise: tuple(sorted(0.1 + n for n in noise)))
    one = st.fixed_dictionaries({cause.name.lower(): noisy for cause in CAUSES})
    return st.lists(one, min_size=ranks, max_size=ranks)


def stragglers(windows: Sequence[Mapping[str, Figures]]) -> list[Straggler]:
    return find_stragglers(np.array([window(**one) for one in windows]))


@given(st.data(), st.integers(2, 6), st.floats(0.08, 0.3))
def test_slow_rank_is_named_with_its_cause(data: st.DataObject, ranks: int, late: float):
    windows = data.draw(quiet(ranks))
    assert stragglers(windows) == []
    rank, cause = data.draw(st.integers(0, ranks - 1)), data.draw(st.sampled_from(CAUSES))
    windows[rank][cause.name.lower()] = tuple(one + late for one in windows[rank][cause.name.lower()])
    [found] = stragglers(windows)
    assert (found.rank, found.cause) == (rank, cause)
    assert found.seconds == pytest.approx(late, abs=0.01)
    assert found.share == pytest.approx(found.seconds / STEP)


def outliers_by_definition(figures: Sequence[Figures]) -> list[tuple[int, float]]:
    """[Note: the test of a straggler], rank by rank."""
    found: list[tuple[int, float]] = []
    for rank, (low, _, _) in enumerate(figures):
        others = [one for index, one in enumerate(figures) if index != rank]
        typical = median(middle for _, middle, _ in others)
        between = 1.4826 * median(abs(middle - typical) for _, middle, _ in others)
        spread = max(between, median(high - below for below, _, high in others) / 1.349)
        least = max(FLOOR_SECONDS, SHARE * STEP, SCORE * (spread + NOISE_SECONDS))
        if low > max(middle for _, middle, _ in others) and low - typical > least:
            found.append((rank, low - typical))
    return found


spread_out = st.sampled_from([0.0, 0.01, 0.012, 0.05, 0.08, 0.3])
any_figures = st.lists(spread_out, min_size=3, max_size=3).map(lambda values: tuple(sorted(values)))


@given(st.lists(st.fixed_dictionaries({"data": any_figures, "saving": any_figures}), min_size=2, max_size=9))
def test_those_named_are_those_of_the_definition(windows: list[dict[str, Figures]]):
    largest: dict[int, tuple[float, str]] = {}
    for cause in ("data", "saving"):
        for rank, excess in outliers_by_definition([one[cause] for one in windows]):
            largest[rank] = max(largest.get(rank, (0.0, "")), (excess, cause))
    named = {one.rank: (one.seconds, str(one.cause)) for one in stragglers(windows)}
    assert named == largest


def test_half_of_the_ranks_a_single_slow_step_and_a_small_excess_are_not_named():
    slow, usual = {"data": (0.2, 0.2, 0.2)}, {"data": (0.05, 0.05, 0.05)}
    assert stragglers([slow, slow, usual, usual]) == []
    assert stragglers([{"data": (0.05, 0.05, 0.3)}, usual, usual]) == []
    barely = 0.05 + FLOOR_SECONDS - 0.001
    assert stragglers([{"data": (barely, barely, barely)}, usual, usual]) == []
    assert len(stragglers([slow, usual, usual])) == 1


def test_a_window_of_few_steps_is_not_judged():
    assert find_stragglers(np.array([window(steps=2, data=(0.2, 0.2, 0.2)), window(), window()])) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_quartiles_are_in_order(values: list[float]):
    low, middle, high = quartiles(values)
    assert min(values) <= low <= middle <= high <= max(values)


SCHEDULE = [
    (2, StragglerCause.FORWARD, 0.15),
    None,
    (0, StragglerCause.DATA, 0.15),
    (1, StragglerCause.SAVING, 0.15),
]


def named() -> list[list[tuple[int, str]]]:
    return run_windows(SCHEDULE, simulated=True)


def test_the_rank_and_the_cause_of_a_delay_are_named(ranks):
    assert FLOOR_SECONDS < 0.15
    expected = [[] if one is None else [(one[0], str(one[1]))] for one in SCHEDULE]
    assert ranks(4).run(named) == [expected] * 4, "all ranks judge alike"


@pytest.mark.parametrize(
    ("data", "between", "delay"),
    [
        (0.05, 0.4, 0.0),  # the host is ahead: its device computes the step before while the data comes
        (0.5, 0.0, 0.5),
        (0.5, 0.1, 0.4),
    ],
)
def test_on_a_gpu_data_delays_by_the_time_in_which_the_host_was_not_ahead(
    data: float, between: float, delay: float
):
    own = OwnWorkSeconds({"data": data, "between steps": between, "backward": 1.0}, 0.0, 0.0)
    assert data_seconds_without_lead(own) == pytest.approx(delay)
