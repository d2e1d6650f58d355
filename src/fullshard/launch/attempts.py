"""The decision after the ranks of an attempt have ended: an exit code, or another attempt."""

import signal
from dataclasses import dataclass

from fullshard.errors import (
    INTERRUPTED_EXIT_CODE,
    CheckpointError,
    DamagedOffloadError,
    DataError,
    OffloadError,
    PlanError,
    ShardError,
    SpecError,
)
from fullshard.launch.first_failure import RankOutcome, first_failure
from fullshard.launch.outcome import CTRL_C_EXIT_CODE, FailureReport

# Errors that would recur with the same run, plan, data, checkpoints and drive.
_WRONG = (SpecError, PlanError, ShardError, DataError, CheckpointError, OffloadError)
_SAME_AGAIN = {error.exit_code for error in _WRONG}
# An exception to these: the next attempt drops a damaged generation.
_MENDED = {DamagedOffloadError.__name__}


@dataclass(frozen=True)
class RestartDecision:
    """The outcome of an attempt.

    said: messages for standard error
    exit_code: exit code of the launch, or None if there is another attempt
    """

    said: tuple[str, ...]
    exit_code: int | None


@dataclass
class Attempts:
    """The restarts of a launch.

    restarts: how many restarts are allowed
    done: how many have happened
    """

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
        if interrupted_by is not None and ended[rank].died_of(signal.SIGTERM):
            return self._interrupted_too_early(interrupted_by)
        text = failure.text(rank)
        if self.done == self.restarts or not restart_helps(failure):
            return RestartDecision((text, *self._no_restart()), failure.exit_code)
        if interrupted_by is not None:
            said = f"{interrupted_by.name}: not restarted; the next start resumes from the newest checkpoint"
            return RestartDecision((text, said), INTERRUPTED_EXIT_CODE)
        self.done += 1
        said = f"restart {self.done} of {self.restarts}, from the newest whole checkpoint of this run"
        return RestartDecision((text, said), None)

    def _interrupted_too_early(self, number: signal.Signals) -> RestartDecision:
        said = "interrupted outside of training; nothing was saved that the last checkpoint does not hold"
        # A restarted run has trained before, so a scheduler should requeue it.
        return RestartDecision((said,), INTERRUPTED_EXIT_CODE if self.done else 128 + number)

    def _no_restart(self) -> tuple[str, ...]:
        if not self.restarts:
            return ()
        if self.done == self.restarts:
            return (f"not restarted: it was already, {self.restarts} times (run.restarts)",)
        return ("not restarted: it would fail again",)


def restart_helps(failure: FailureReport) -> bool:
    """Returns whether another attempt may succeed.

    This is False if the run, the plan, the data or the checkpoints are wrong, or if a drive is full or fails
    to write; True if only a peer was lost, whatever this rank was doing, and for damaged state, of which
    there is an older generation or a checkpoint.
    """
    return failure.peer_lost or failure.name in _MENDED or failure.exit_code not in _SAME_AGAIN
