"""The first failure of an attempt, and the decision to restart the ranks or to end the launch."""

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
# An exception to these: the next attempt discards a damaged generation.
_MENDED = {DamagedOffloadError.__name__}


@dataclass(frozen=True)
class RankOutcome:
    """Everything known about the end of one rank.

    ending: the outcome that the rank wrote; None if it wrote none
    exit_code: exit code of its process, -n for signal n; None if unknown
    seen_gone_at: time at which the launcher first saw that its process is gone, in seconds since the epoch
    killed_by_launcher: True if the launcher killed it, because of another rank or a second Ctrl-C
    """

    rank: int
    ending: ProcessOutcome | None
    exit_code: int | None
    seen_gone_at: float
    killed_by_launcher: bool = False


@dataclass(frozen=True)
class RestartOrEnd:
    """The decision after an attempt.

    messages: messages for standard error
    exit_code: exit code of the launch; None to restart the ranks
    fault: number of the rank that failed first, and its failure; None if none failed of itself
    """

    messages: tuple[str, ...]
    exit_code: int | None
    fault: tuple[int, FailureReport] | None = None


@dataclass
class RestartBudget:
    """Decides whether a launch restarts its ranks: at most `restarts` times, of which `done` are used."""

    restarts: int
    done: int = 0

    def decide_restart_or_end(
        self, ended: list[RankOutcome], *, interrupted_by: signal.Signals | None = None, at_once: bool = False
    ) -> RestartOrEnd:
        """Decides to restart the ranks after an attempt, and counts the restart, or to end the launch.

        ended: outcomes of all ranks, in the order of ranks
        interrupted_by: the first signal that the launcher received
        at_once: the ranks were killed without time to save
        """
        found = find_first_failure(ended)
        if at_once:
            return RestartOrEnd(("ended at once; unsaved steps are lost",), CTRL_C_EXIT_CODE)
        if found is None:
            codes = {one.ending.exit_code for one in ended if one.ending}
            return RestartOrEnd((), INTERRUPTED_EXIT_CODE if INTERRUPTED_EXIT_CODE in codes else 0)
        rank, failure = found
        outcome, text = ended[rank], failure.user_message(rank)
        if interrupted_by is not None and outcome.ending is None and outcome.exit_code == -signal.SIGTERM:
            said = "interrupted outside of training; nothing was saved that the last checkpoint does not hold"
            # A restarted run has trained before, so a scheduler should requeue it.
            return RestartOrEnd((said,), INTERRUPTED_EXIT_CODE if self.done else 128 + interrupted_by)
        exit_code: int | None = failure.exit_code
        if not self.restarts:
            return RestartOrEnd((text,), exit_code, found)
        if self.done == self.restarts:
            said = f"not restarted: it was already, {self.restarts} times (run.restarts)"
        elif not can_restart_help(failure):
            said = "not restarted: it would fail again"
        elif interrupted_by is not None:
            said = f"{interrupted_by.name}: not restarted; the next start resumes from the newest checkpoint"
            exit_code = INTERRUPTED_EXIT_CODE
        else:
            self.done += 1
            said = f"restart {self.done} of {self.restarts}, from the newest whole checkpoint of this run"
            exit_code = None
        return RestartOrEnd((text, said), exit_code, found)


def can_restart_help(failure: FailureReport) -> bool:
    """Returns True if another attempt may succeed.

    This is False if the run, the plan, the data or the checkpoints are wrong, or if a drive is full or cannot
    be written. It is True if only a peer was lost, and for damaged offloaded state, which an older generation
    or a checkpoint replaces.
    """
    return failure.peer_lost or failure.name in _MENDED or failure.exit_code not in _SAME_AGAIN


class _RootCauseOrder(IntEnum):
    """The origin of a rank's failure. Lower values are nearer to the cause of all failures."""

    OWN = 0
    STOPPED = 1  # SIGTERM or SIGABRT, sent by a launcher or a watchdog because of another rank
    PEER_LOST = 2


def find_first_failure(ranks: list[RankOutcome]) -> tuple[int, FailureReport] | None:
    """Returns the number of the rank that failed first and its failure, or None if no rank failed.

    Failures that only report a lost peer count last, whatever their time: a killed rank writes no report, and
    the launcher sees that it is gone only after its peers have failed.
    """
    failures = [(rank, *found) for rank in ranks if (found := _failure_of_rank(rank)) is not None]
    if not failures:
        return None
    rank, _, failure = min(failures, key=lambda one: (one[1], one[2].at))
    return rank.rank, failure


def _failure_of_rank(rank: RankOutcome) -> tuple[_RootCauseOrder, FailureReport] | None:
    ending, code = rank.ending, rank.exit_code
    if ending is not None and ending.failure is not None:
        return _RootCauseOrder.PEER_LOST if ending.failure.peer_lost else _RootCauseOrder.OWN, ending.failure
    if ending is not None and ending.exit_code in (0, INTERRUPTED_EXIT_CODE):
        return None  # errors during teardown no longer matter
    if rank.killed_by_launcher:
        return None
    if ending is None and code is not None and code < 0:
        cause = _RootCauseOrder.STOPPED if -code in (signal.SIGTERM, signal.SIGABRT) else _RootCauseOrder.OWN
        error = _killed_by_signal_error(rank.rank, -code)
    else:
        cause = _RootCauseOrder.OWN
        error = LaunchError(
            f"rank {rank.rank} left early.",
            got=f"exit code {code if ending is None else ending.exit_code}",
            why="something in it called sys.exit or os._exit, or a signal came to it alone",
        )
    return cause, replace(FailureReport.from_exception(error), at=rank.seen_gone_at, traceback="")


def _killed_by_signal_error(rank: int, number: int) -> LaunchError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    why, fix = "it came from outside of fullshard", None
    if number == signal.SIGKILL:
        why = "mostly the kernel, or a container's limit, because memory ran out (dmesg says so)"
        fix = (
            'fewer ranks on this machine, a smaller train.microbatch, or recompute.mode = "full"; '
            "--resume starts at the newest whole step (of a checkpoint, or on the drive of an nvme tier)"
        )
    elif number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        why = "native code crashed (torch, NCCL, a driver or an extension)"
        fix = "PYTHONFAULTHANDLER=1 shows where"
    return LaunchError(f"rank {rank} was killed by {name}.", why=why, fix=fix)
