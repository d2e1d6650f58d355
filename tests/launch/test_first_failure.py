"""The rank to blame is the one that failed by itself, and first."""

import itertools
import signal

import pytest

from fullshard.errors import INTERRUPTED_EXIT_CODE, CheckpointError, DataError, LaunchError
from fullshard.launch.outcome import ProcessOutcome
from fullshard.launch.start import RankOutcome, find_first_failure


def ended_with(error: BaseException | None) -> ProcessOutcome:
    with ProcessOutcome() as ending:
        if error is not None:
            raise error
    return ending


def ended(rank: int, error: BaseException | None = None, *, exit_code: int = 0) -> RankOutcome:
    return RankOutcome(rank, ended_with(error), exit_code, seen_gone_at=0.0)


def killed(rank: int, number: signal.Signals, *, by_us: bool = False) -> RankOutcome:
    """Seen gone long after what the others have said."""
    return RankOutcome(rank, None, -number, seen_gone_at=4e9, killed_by_launcher=by_us)


def lost_peer() -> BaseException:
    error = CheckpointError("the checkpoint could not be written.")
    error.__cause__ = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:2345")
    return error


def test_the_earlier_of_two_errors_counts() -> None:
    first, second = ended(1, DataError("one")), ended(0, DataError("two"))
    assert find_first_failure([second, first]) == (1, first.ending and first.ending.failure)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_killed_rank_counts_before_all_that_follows_from_it(order: tuple[int, ...]) -> None:
    ranks = [
        ended(0, lost_peer()),
        killed(1, signal.SIGKILL),
        killed(2, signal.SIGTERM),
        killed(3, signal.SIGKILL, by_us=True),
    ]
    found = find_first_failure([ranks[i] for i in order])
    assert found is not None
    assert (found[0], found[1].exit_code) == (1, LaunchError.exit_code)
    assert "SIGKILL" in found[1].message


def test_an_error_counts_before_the_ranks_that_were_stopped_for_it() -> None:
    ranks = [killed(0, signal.SIGTERM), ended(1, DataError("dry")), killed(2, signal.SIGKILL, by_us=True)]
    found = find_first_failure(ranks)
    assert found is not None
    assert found[0] == 1


def test_a_lost_peer_is_shown_where_nothing_else_is_known() -> None:
    found = find_first_failure([ended(0, lost_peer()), ended(1)])
    assert found is not None
    assert (found[0], found[1].peer_lost) == (0, True)


def test_what_happens_to_a_process_after_its_work_is_done_does_not_count() -> None:
    interrupted = ended(1, SystemExit(INTERRUPTED_EXIT_CODE), exit_code=-signal.SIGTERM)
    assert find_first_failure([ended(0, exit_code=-signal.SIGABRT), interrupted]) is None


@pytest.mark.parametrize("left", [RankOutcome(0, None, 3, seen_gone_at=0.0), ended(0, SystemExit(3))])
def test_a_rank_that_leaves_early_is_a_failure(left: RankOutcome) -> None:
    found = find_first_failure([left, ended(1)])
    assert found is not None
    assert "exit code 3" in found[1].message


def test_a_killed_rank_is_told_with_the_way_to_go_on() -> None:
    found = find_first_failure([killed(0, signal.SIGKILL)])
    assert found is not None
    assert "  try: fewer ranks on this machine" in found[1].message
    assert "--resume starts at the newest whole step" in found[1].message
