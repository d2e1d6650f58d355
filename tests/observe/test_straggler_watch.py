"""A rank that holds the others up is named with its cause, by clocks that only delays advance."""

from bench.stragglers import run_windows
from fullshard.observe.stragglers import FLOOR_SECONDS, StragglerCause

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
