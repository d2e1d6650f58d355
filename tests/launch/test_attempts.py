"""The first failure is named. Another attempt is made where it may help, and never against a signal."""

import itertools
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import (
    INTERRUPTED_EXIT_CODE,
    CheckpointError,
    DamagedOffloadError,
    DataError,
    ForeignOffloadError,
    LaunchError,
    OffloadError,
    PlanError,
    ShardError,
    SpecError,
    TrainError,
)
from fullshard.launch.outcome import ProcessOutcome
from fullshard.launch.start import (
    RankOutcome,
    RestartBudget,
    find_root_cause_failure,
    wait_before_restart,
)
from fullshard.system.process import RecordedSignals


def ending_with(error: BaseException | None) -> ProcessOutcome:
    with ProcessOutcome() as ending:
        if error is not None:
            raise error
    return ending


def ended(rank: int, error: BaseException | None = None, *, exit_code: int = 0) -> RankOutcome:
    return RankOutcome(rank, ending_with(error), exit_code, seen_gone_at=0.0)


def killed(rank: int, number: signal.Signals, *, by_us: bool = False) -> RankOutcome:
    """Detected long after the messages of the others."""
    return RankOutcome(rank, None, -number, seen_gone_at=4e9, killed_by_launcher=by_us)


def lost_peer() -> BaseException:
    error = CheckpointError("the checkpoint could not be written.")
    error.__cause__ = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:2345")
    return error


def ranks_with(error: BaseException | None) -> list[RankOutcome]:
    """Rank 1 ends with `error`, rank 0 well."""
    ending = ending_with(error)
    return [ended(0), RankOutcome(1, ending, ending.exit_code, seen_gone_at=0.0)]


def ranks_with_a_kill(number: signal.Signals) -> list[RankOutcome]:
    """Rank 1 is killed; rank 0 reports that it lost its peer while it was saving."""
    return [ended(0, lost_peer(), exit_code=6), killed(1, number)]


def test_the_earlier_of_two_errors_counts() -> None:
    first, second = ended(1, DataError("one")), ended(0, DataError("two"))
    assert find_root_cause_failure([second, first]) == (1, first.ending and first.ending.failure)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_killed_rank_counts_before_all_that_follows_from_it(order: tuple[int, ...]) -> None:
    ranks = [
        ended(0, lost_peer()),
        killed(1, signal.SIGKILL),
        killed(2, signal.SIGTERM),
        killed(3, signal.SIGKILL, by_us=True),
    ]
    found = find_root_cause_failure([ranks[i] for i in order])
    assert found is not None
    assert (found[0], found[1].exit_code) == (1, LaunchError.exit_code)
    assert "SIGKILL" in found[1].message


def test_an_error_counts_before_the_ranks_that_were_stopped_for_it() -> None:
    ranks = [killed(0, signal.SIGTERM), ended(1, DataError("dry")), killed(2, signal.SIGKILL, by_us=True)]
    found = find_root_cause_failure(ranks)
    assert found is not None
    assert found[0] == 1


def test_a_lost_peer_is_shown_without_another_failure() -> None:
    found = find_root_cause_failure([ended(0, lost_peer()), ended(1)])
    assert found is not None
    assert (found[0], found[1].peer_lost) == (0, True)


def test_an_exit_after_the_work_is_done_is_no_failure() -> None:
    interrupted = ended(1, SystemExit(INTERRUPTED_EXIT_CODE), exit_code=-signal.SIGTERM)
    assert find_root_cause_failure([ended(0, exit_code=-signal.SIGABRT), interrupted]) is None


@pytest.mark.parametrize("left", [RankOutcome(0, None, 3, seen_gone_at=0.0), ended(0, SystemExit(3))])
def test_a_rank_that_leaves_early_is_a_failure(left: RankOutcome) -> None:
    found = find_root_cause_failure([left, ended(1)])
    assert found is not None
    assert "exit code 3" in found[1].message


@pytest.mark.parametrize(
    ("oom_kills", "cause", "advice"),
    [
        (None, "dmesg may say so", "fewer ranks on this machine"),
        (0, "it came from outside of fullshard; not from the kernel", "--resume"),
        (2, "ran out (oom_kill in /proc/vmstat: +2)", "fewer ranks on this machine"),
    ],
)
def test_a_killed_rank_is_reported_with_the_cause_and_the_way_to_resume(
    oom_kills: int | None, cause: str, advice: str
) -> None:
    """Says that memory ran out only where the kernel has said so."""
    found = find_root_cause_failure([replace(killed(0, signal.SIGKILL), oom_kills=oom_kills)])
    assert found is not None
    assert cause in found[1].message
    assert f"  try: {advice}" in found[1].message
    assert "--resume starts at the newest whole step" in found[1].message


@pytest.mark.parametrize(
    "ranks",
    [
        ranks_with_a_kill(signal.SIGKILL),
        ranks_with_a_kill(signal.SIGKILL)[:1],  # the killed rank is unknown: only its peer reports
        ranks_with(ZeroDivisionError("by zero")),
        ranks_with(TrainError("not finite.")),
        ranks_with(DamagedOffloadError("it is truncated.")),  # the next start does without it
        ranks_with(SystemExit(86)),
    ],
)
def test_ranks_that_died_are_started_again_as_often_as_asked(ranks: list[RankOutcome]) -> None:
    attempts = RestartBudget(restarts=2)
    first, second, third = (attempts.decide_restart_or_end(ranks, step=step) for step in (5, 6, 7))
    assert (first.exit_code, second.exit_code) == (None, None)
    assert "restart 1 of 2" in first.messages[-1]
    assert "rank " in first.messages[0]
    assert third.exit_code not in (None, 0)
    assert "2 times" in third.messages[-1]


def fail(kind: int, attempt: int) -> BaseException:
    """Errors of one kind differ in their numbers and their advice."""
    if kind == 0:
        return ZeroDivisionError(f"by zero, in process {attempt} at 0x7f{attempt}a")
    error = TrainError if kind == 1 else DamagedOffloadError
    return error("it is broken.", got=f"on port {attempt}", why="-", fix=f"another {'x' * attempt}")


@given(attempts=st.lists(st.tuples(st.integers(0, 2), st.none() | st.integers(1, 5)), min_size=1))
def test_restarts_end_if_one_gained_nothing_and_pause_while_no_step_is_new(
    attempts: list[tuple[int, int | None]],
) -> None:
    budget, newest, pause = RestartBudget(restarts=100), -1, 0.0
    for number, (kind, step) in enumerate(attempts):
        conclusion = budget.decide_restart_or_end(ranks_with(fail(kind, number)), step=step)
        # A damaged generation is gone in the next attempt.
        if number and attempts[number - 1] == (kind, step) and kind != 2:
            assert conclusion.exit_code not in (None, 0)
            assert f"after {number} of 100 restarts" in conclusion.messages[-1]
            assert "no new step" in conclusion.messages[-1]
            return
        assert conclusion.exit_code is None
        expected = 0 if (step or 0) > newest else min(max(1.0, 2 * pause), 300)
        assert conclusion.pause_seconds == expected
        assert (f"in {expected:.0f} s" in conclusion.messages[-1]) is (expected > 0)
        newest, pause = max(newest, step or 0), expected


@pytest.mark.parametrize("signal_after", [None, 7])
def test_a_pause_takes_its_seconds_and_ends_at_a_signal(signal_after: int | None) -> None:
    signals, slept = RecordedSignals(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == signal_after:
            signals.arrivals.append((signal.SIGTERM, 0.0))

    wait_before_restart(4.0, signals=signals, sleep=sleep)
    assert len(slept) == signal_after if signal_after else sum(slept) == pytest.approx(4.0)
    assert max(slept) <= 0.1


@pytest.mark.parametrize(
    "error", [SpecError, PlanError, ShardError, DataError, CheckpointError, OffloadError, ForeignOffloadError]
)
def test_an_error_that_would_come_again_is_not_started_again(error: type[SpecError]) -> None:
    conclusion = RestartBudget(restarts=3).decide_restart_or_end(ranks_with(error("no.")))
    assert conclusion.exit_code == error.exit_code
    assert conclusion.messages[-1] == "not restarted: it would fail again"


@pytest.mark.parametrize("error", [None, SystemExit(INTERRUPTED_EXIT_CODE)])
def test_a_finished_or_interrupted_run_is_not_restarted(error: BaseException | None) -> None:
    expected = 0 if error is None else INTERRUPTED_EXIT_CODE
    assert RestartBudget(restarts=3).decide_restart_or_end(ranks_with(error)).exit_code == expected


def test_without_restarts_the_message_is_the_failure_alone() -> None:
    conclusion = RestartBudget(restarts=0).decide_restart_or_end(ranks_with_a_kill(signal.SIGKILL))
    assert conclusion.exit_code == LaunchError.exit_code
    assert len(conclusion.messages) == 1


def test_a_signal_ends_the_run_without_a_restart() -> None:
    conclusion = RestartBudget(restarts=3).decide_restart_or_end(
        ranks_with_a_kill(signal.SIGKILL), interrupted_by=signal.SIGTERM
    )
    assert conclusion.exit_code == INTERRUPTED_EXIT_CODE
    assert "SIGTERM: not restarted" in conclusion.messages[-1]


@pytest.mark.parametrize(("done", "exit_code"), [(0, 128 + signal.SIGTERM), (1, INTERRUPTED_EXIT_CODE)])
def test_a_signal_outside_training_asks_for_a_requeue_only_after_a_restart(done: int, exit_code: int) -> None:
    attempts = RestartBudget(restarts=3, done=done)
    conclusion = attempts.decide_restart_or_end(
        ranks_with_a_kill(signal.SIGTERM)[1:] * 2, interrupted_by=signal.SIGTERM
    )
    assert conclusion.exit_code == exit_code
