"""A rank is named if it is slower than all others in most steps, with its largest cause, and none else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.stragglers import run_windows
from fullshard.distributed.ranges import OwnWorkSeconds
from fullshard.observe.stragglers import (
    FLOOR_SECONDS,
    RankWindow,
    StragglerCause,
    data_seconds_without_lead,
    find_stragglers,
    quartiles,
)

STEP = 0.5
NOISE = st.floats(0.0, 0.004)


def window(**own: tuple[float, float, float]) -> RankWindow:
    figures = {cause: own.get(cause.name.lower(), (0.0, 0.0, 0.0)) for cause in StragglerCause}
    return RankWindow(10, STEP, 0.1, figures)


@st.composite
def quiet(draw: st.DrawFn, ranks: int) -> list[RankWindow]:
    """Windows of ranks that do the same, up to noise."""
    return [
        RankWindow(
            10,
            STEP,
            0.1,
            {cause: tuple(sorted(0.1 + draw(NOISE) for _ in range(3))) for cause in StragglerCause},
        )
        for _ in range(ranks)
    ]


@given(st.data(), st.integers(2, 6), st.floats(0.08, 0.3))
def test_slow_rank_is_named_with_its_cause(data: st.DataObject, ranks: int, late: float):
    windows = data.draw(quiet(ranks))
    assert find_stragglers(windows) == []
    rank, cause = data.draw(st.integers(0, ranks - 1)), data.draw(st.sampled_from(StragglerCause))
    own = {**windows[rank].own, cause: tuple(one + late for one in windows[rank].own[cause])}
    windows[rank] = RankWindow(10, STEP, 0.1, own)
    [found] = find_stragglers(windows)
    assert (found.rank, found.cause) == (rank, cause)
    assert found.seconds == pytest.approx(late, abs=0.01)
    assert found.share == pytest.approx(found.seconds / STEP)


def test_half_of_the_ranks_a_single_slow_step_and_a_small_excess_are_not_named():
    slow, usual = window(data=(0.2, 0.2, 0.2)), window(data=(0.05, 0.05, 0.05))
    assert find_stragglers([slow, slow, usual, usual]) == []
    assert find_stragglers([window(data=(0.05, 0.05, 0.3)), usual, usual]) == []
    barely = 0.05 + FLOOR_SECONDS - 0.001
    assert find_stragglers([window(data=(barely, barely, barely)), usual, usual]) == []
    assert len(find_stragglers([slow, usual, usual])) == 1


def test_a_window_of_few_steps_is_not_judged():
    few = RankWindow(2, STEP, 0.1, window(data=(0.2, 0.2, 0.2)).own)
    assert find_stragglers([few, window(), window()]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_figures_are_in_order_and_survive_the_exchange(values: list[float]):
    low, middle, high = quartiles(values)
    assert min(values) <= low <= middle <= high <= max(values)
    one = window(forward=(low, middle, high))
    assert RankWindow.from_figures(one.to_figures()) == one


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
