"""Another attempt is made where it may help, as often as asked, and never against a signal."""

import signal

import pytest

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
from fullshard.launch.start import RankOutcome, RestartBudget


def ended(error: BaseException | None) -> list[RankOutcome]:
    """Rank 1 ends with `error`, rank 0 well."""
    with ProcessOutcome() as ending:
        if error is not None:
            raise error
    return [
        RankOutcome(0, ProcessOutcome(), 0, seen_gone_at=0.0),
        RankOutcome(1, ending, ending.exit_code, seen_gone_at=0.0),
    ]


def killed(number: signal.Signals) -> list[RankOutcome]:
    """Rank 1 is killed; rank 0 says that it lost its peer while it was saving."""
    lost = CheckpointError("the checkpoint could not be written.")
    lost.__cause__ = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:2345")
    with ProcessOutcome() as ending:
        raise lost
    return [RankOutcome(0, ending, 6, seen_gone_at=0.0), RankOutcome(1, None, -number, seen_gone_at=1.0)]


@pytest.mark.parametrize(
    "ranks",
    [
        killed(signal.SIGKILL),
        killed(signal.SIGKILL)[:1],  # nobody saw the rank that was killed: the peer's word alone
        ended(ZeroDivisionError("by zero")),
        ended(TrainError("not finite.")),
        ended(DamagedOffloadError("it is truncated.")),  # the next start does without it
        ended(SystemExit(86)),
    ],
)
def test_ranks_that_died_are_started_again_as_often_as_asked(ranks: list[RankOutcome]) -> None:
    attempts = RestartBudget(restarts=2)
    first, second, third = (attempts.decide_restart_or_end(ranks) for _ in range(3))
    assert (first.exit_code, second.exit_code) == (None, None)
    assert "restart 1 of 2" in first.messages[-1]
    assert "rank " in first.messages[0]
    assert third.exit_code not in (None, 0)
    assert "2 times" in third.messages[-1]


@pytest.mark.parametrize(
    "error",
    [SpecError, PlanError, ShardError, DataError, CheckpointError, OffloadError, ForeignOffloadError],
)
def test_what_would_fail_again_is_not_started_again(error: type[SpecError]) -> None:
    conclusion = RestartBudget(restarts=3).decide_restart_or_end(ended(error("no.")))
    assert conclusion.exit_code == error.exit_code
    assert conclusion.messages[-1] == "not restarted: it would fail again"


@pytest.mark.parametrize("error", [None, SystemExit(INTERRUPTED_EXIT_CODE)])
def test_a_run_that_is_through_or_interrupted_is_not_started_again(error: BaseException | None) -> None:
    expected = 0 if error is None else INTERRUPTED_EXIT_CODE
    assert RestartBudget(restarts=3).decide_restart_or_end(ended(error)).exit_code == expected


def test_without_restarts_nothing_is_said_of_them() -> None:
    conclusion = RestartBudget(restarts=0).decide_restart_or_end(killed(signal.SIGKILL))
    assert conclusion.exit_code == LaunchError.exit_code
    assert len(conclusion.messages) == 1


def test_a_signal_leaves_the_restart_to_whoever_sent_it() -> None:
    conclusion = RestartBudget(restarts=3).decide_restart_or_end(
        killed(signal.SIGKILL), interrupted_by=signal.SIGTERM
    )
    assert conclusion.exit_code == INTERRUPTED_EXIT_CODE
    assert "SIGTERM: not restarted" in conclusion.messages[-1]


@pytest.mark.parametrize(("done", "exit_code"), [(0, 128 + signal.SIGTERM), (1, INTERRUPTED_EXIT_CODE)])
def test_a_signal_before_training_asks_to_be_requeued_only_where_there_was_an_attempt(
    done: int, exit_code: int
) -> None:
    attempts = RestartBudget(restarts=3, done=done)
    conclusion = attempts.decide_restart_or_end(killed(signal.SIGTERM)[1:] * 2, interrupted_by=signal.SIGTERM)
    assert conclusion.exit_code == exit_code
