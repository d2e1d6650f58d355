"""The first rank that failed, once all have ended: its message is the one worth reading."""

import signal
from dataclasses import dataclass, replace
from enum import IntEnum

from fullshard.errors import INTERRUPTED_EXIT_CODE, LaunchError
from fullshard.launch.outcome import FailureReport, ProcessOutcome


@dataclass(frozen=True)
class RankOutcome:
    """Everything known about a rank that has ended.

    rank: its number
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

    def died_of(self, number: signal.Signals) -> bool:
        return self.ending is None and self.exit_code == -number


class _Cause(IntEnum):
    """The distance of a failure from the cause. Among equals, the earliest failure counts."""

    OWN = 0
    STOPPED = 1  # SIGTERM or SIGABRT, sent by the agent or a watchdog because of another rank
    PEER_LOST = 2


def first_failure(ranks: list[RankOutcome]) -> tuple[int, FailureReport] | None:
    """Returns the rank that failed first and its failure, or None if all ended well.

    Messages that only report a lost peer come last, whatever their time: a killed rank writes none, and is
    seen
    gone later than its peers fail.
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
