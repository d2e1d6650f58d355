"""Two ranks of which one fails at a collective, two faults at once, and many kills of one run."""

import itertools

import pytest

from tests.faults.collectives import fail_at_each_collective
from tests.faults.pairs import CLOCK, DAMAGE, FULL, KILLED, PAIRS, two_faults
from tests.faults.soak import kill_one_run

CASES = list(itertools.product((False, True), (0, 1), ("sync", "async")))
HERE = {(False, 0, "sync"), (True, 1, "sync")}
PAIRS_HERE = {(FULL, CLOCK), (KILLED, DAMAGE)}


@pytest.mark.parametrize(
    ("kills", "victim", "mode"),
    [pytest.param(*one, marks=() if one in HERE else pytest.mark.long) for one in CASES],
)
def test_no_collective_that_is_the_last_of_a_rank_loses_a_save_or_stops_the_other(
    ranks, tmp_path, kills, victim, mode
):
    """At a few of some hundred and thirty; `make torture` fails at each."""
    failed = fail_at_each_collective(
        ranks, tmp_path, mode=mode, victim=victim, kills=kills, begin=5 + 20 * kills, stride=50
    )
    assert failed >= 2


@pytest.mark.parametrize(
    "faults", [pytest.param(one, marks=() if one in PAIRS_HERE else pytest.mark.long) for one in PAIRS]
)
def test_no_two_faults_lose_a_save_or_change_a_loss(ranks, tmp_path, faults):
    two_faults(ranks, tmp_path, faults=faults, mode="async", seed=0)


@pytest.mark.long
def test_kills_of_one_run_leave_what_a_run_without_them_leaves(ranks, tmp_path):
    kill_one_run(ranks, tmp_path, times=5, mode="async")
