"""The decision after the ranks of an attempt have ended: the first failure, and an exit code or a restart."""

import signal
from dataclasses import dataclass, replace
from enum import IntEnum

from fullshard.errors import (
    INTERRUPTED_EXIT_CODE,
    CheckpointError,
    DamagedOffloadError,
    DataError,
    LaunchError,
    OffloadError,
    PlanError,
    ShardError,
    SpecError,
)
from fullshard.launch.outcome import CTRL_C_EXIT_CODE, FailureReport, ProcessOutcome

# Errors that would recur with the same run, plan, data, checkpoints and drive.
_WRONG = (SpecError, PlanError, ShardError, DataError, CheckpointError, OffloadError)
_SAME_AGAIN = {error.exit_code for error in _WRONG}
# An exception to these: the next attempt drops a damaged generation.
_MENDED = {DamagedOffloadError.__name__}


@dataclass(frozen=True)
class RankOutcome:
    """Everything known about a rank that has ended.

    ending: the outcome that it wrote itself; None if it could not
    exit_code: exit code of its process, -n for signal n; None if nobody saw it
    seen_at: when it was first seen gone, in seconds since the epoch
    by_us: the launcher ended it, because of another rank
    """

    rank: int
    ending: ProcessOutcome | None
    exit_code: int | None
    seen_at: float
    by_us: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """Messages for standard error, and the exit code of the launch; None if there is another attempt."""

    said: tuple[str, ...]
    exit_code: int | None


@dataclass
class Attempts:
    """The number of restarts that a launch may make, and how many it has `done`."""

    restarts: int
    done: int = 0

    def conclude(
        self, ended: list[RankOutcome], *, interrupted_by: signal.Signals | None = None, at_once: bool = False
    ) -> RestartDecision:
        """Decides what follows an attempt.

        interrupted_by: the first signal, if any
        at_once: the ranks had no time to save
        """
        found = first_failure(ended)
        if at_once:
            return RestartDecision(("ended at once; what was not saved is lost",), CTRL_C_EXIT_CODE)
        if found is None:
            codes = {one.ending.exit_code for one in ended if one.ending}
            return RestartDecision((), INTERRUPTED_EXIT_CODE if INTERRUPTED_EXIT_CODE in codes else 0)
        rank, failure = found
        outcome, text = ended[rank], failure.text(rank)
        if interrupted_by is not None and outcome.ending is None and outcome.exit_code == -signal.SIGTERM:
            said = "interrupted outside of training; nothing was saved that the last checkpoint does not hold"
            # A restarted run has trained before, so a scheduler should requeue it.
            return RestartDecision((said,), INTERRUPTED_EXIT_CODE if self.done else 128 + interrupted_by)
        exit_code: int | None = failure.exit_code
        if not self.restarts:
            return RestartDecision((text,), exit_code)
        if self.done == self.restarts:
            said = f"not restarted: it was already, {self.restarts} times (run.restarts)"
        elif not restart_helps(failure):
            said = "not restarted: it would fail again"
        elif interrupted_by is not None:
            said = f"{interrupted_by.name}: not restarted; the next start resumes from the newest checkpoint"
            exit_code = INTERRUPTED_EXIT_CODE
        else:
            self.done += 1
            said = f"restart {self.done} of {self.restarts}, from the newest whole checkpoint of this run"
            exit_code = None
        return RestartDecision((text, said), exit_code)


def restart_helps(failure: FailureReport) -> bool:
    """Returns whether another attempt may succeed.

    This is False if the run, the plan, the data or the checkpoints are wrong, or if a drive is full or fails
    to write; True if only a peer was lost, whatever this rank was doing, and for damaged state, of which
    there is an older generation or a checkpoint.
    """
    return failure.peer_lost or failure.name in _MENDED or failure.exit_code not in _SAME_AGAIN


class _Cause(IntEnum):
    """The distance of a failure from the cause. Among equals, the earliest failure counts."""

    OWN = 0
    STOPPED = 1  # SIGTERM or SIGABRT, sent by the agent or a watchdog because of another rank
    PEER_LOST = 2


def first_failure(ranks: list[RankOutcome]) -> tuple[int, FailureReport] | None:
    """Returns the rank that failed first and its failure, or None if all ended well.

    Messages that only report a lost peer come last, whatever their time: a killed rank writes none, and is
    seen gone later than its peers fail.
    """
    failures = [(rank, *found) for rank in ranks if (found := _failure(rank)) is not None]
    if not failures:
        return None
    rank, _, failure = min(failures, key=lambda one: (one[1], one[2].at))
    return rank.rank, failure


def _failure(rank: RankOutcome) -> tuple[_Cause, FailureReport] | None:
    ending, code = rank.ending, rank.exit_code
    if ending is not None and ending.failure is not None:
        return _Cause.PEER_LOST if ending.failure.peer_lost else _Cause.OWN, ending.failure
    if ending is not None and ending.exit_code in (0, INTERRUPTED_EXIT_CODE):
        return None  # errors during teardown no longer matter
    if rank.by_us:
        return None
    if ending is None and code is not None and code < 0:
        cause = _Cause.STOPPED if -code in (signal.SIGTERM, signal.SIGABRT) else _Cause.OWN
        return cause, _at(_killed(rank.rank, -code), rank.seen_at)
    error = LaunchError(
        f"rank {rank.rank} left early.",
        got=f"exit code {code if ending is None else ending.exit_code}",
        why="something in it called sys.exit or os._exit, or a signal came to it alone",
    )
    return _Cause.OWN, _at(error, rank.seen_at)


def _at(error: LaunchError, seen_at: float) -> FailureReport:
    return replace(FailureReport.of(error), at=seen_at, traceback="")


def _killed(rank: int, number: int) -> LaunchError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return LaunchError(
            f"rank {rank} was killed by {name}.",
            why="mostly the kernel, or a container's limit, because memory ran out (dmesg says so)",
            fix='fewer ranks on this machine, a smaller train.microbatch, or recompute.mode = "full"; '
            "--resume starts at the newest whole step (of a checkpoint, or on the drive of an nvme tier)",
        )
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        return LaunchError(
            f"rank {rank} was killed by {name}.",
            why="native code crashed (torch, NCCL, a driver or an extension)",
            fix="PYTHONFAULTHANDLER=1 shows where",
        )
    return LaunchError(f"rank {rank} was killed by {name}.", why="it came from outside of fullshard")
