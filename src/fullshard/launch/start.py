"""Running a job on ranks that torchrun or srun started, or on ranks that fullshard starts and restarts."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from fullshard import errors
from fullshard.launch.detect import may_have_gpus
from fullshard.launch.environment import prepare_environment_if_started_as_rank, set_default_log_levels
from fullshard.launch.gc import disable_gc
from fullshard.launch.outcome import CTRL_C_EXIT_CODE, FailureReport, LaunchEventLog, ProcessOutcome
from fullshard.launch.rank import perform_as_torchrun_rank
from fullshard.launch.request import LaunchRequest
from fullshard.quantities import count_text
from fullshard.spec.plan import DeviceType, too_few_gpus_error
from fullshard.system.process import RecordedSignals, count_oom_kills, raise_open_file_limit, record_signals
from fullshard.system.terminal import print_to_stderr

# See `RunSetupSection.ranks`. Two show that sharding works; more only compete for the cores.
CPU_RANKS = 2
_POLL_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 300.0
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
# After the first failure the others mostly fail at once, because their connections break. Ranks blocked in a
# collective do not react to SIGTERM, and are killed.
_GRACE_SECONDS = 3.0
# Errors that would recur with the same run, plan, data, checkpoints and drive.
_WRONG = (
    errors.SpecError,
    errors.PlanError,
    errors.ShardError,
    errors.DataError,
    errors.CheckpointError,
    errors.OffloadError,
)
_SAME_AGAIN = {error.exit_code for error in _WRONG}
# An exception to these: the next attempt discards a damaged generation.
_MENDED = {errors.DamagedOffloadError.__name__}


@dataclass(frozen=True)
class RankOutcome:
    """Everything known about the end of one rank.

    ending: the outcome that the rank wrote; None if it wrote none
    exit_code: exit code of its process, -n for signal n; None if unknown
    seen_gone_at: time at which the launcher first saw that its process is gone, in seconds since the epoch
    killed_by_launcher: True if the launcher killed it, because of another rank or a second Ctrl-C
    oom_kills: number of processes of this machine that the kernel has killed since the rank was started,
        because memory ran out; None if unknown
    """

    rank: int
    ending: ProcessOutcome | None
    exit_code: int | None
    seen_gone_at: float
    killed_by_launcher: bool = False
    oom_kills: int | None = None


@dataclass(frozen=True)
class RestartOrEnd:
    """The decision after an attempt.

    messages: messages for standard error
    exit_code: exit code of the launch; None to restart the ranks
    fault: number of the rank that failed first, and its failure; None if none failed of itself
    pause_seconds: time to wait before a restart
    """

    messages: tuple[str, ...]
    exit_code: int | None
    fault: tuple[int, FailureReport] | None = None
    pause_seconds: float = 0.0


@dataclass
class RestartBudget:
    """Decides whether a launch restarts its ranks: at most `restarts` times, of which `done` are used.

    An attempt that fails with the error of the attempt before, after the same step, has gained nothing, and
    ends the launch. After other attempts without a new step (`idle` of them in a row), a pause grows, so that
    a fault that comes and goes causes no storm of starts. The first restart is at once.

    newest_step: the newest step that any attempt has recorded; -1 before the first attempt
    last_end: the error and the last recorded step of the last attempt
    """

    restarts: int
    done: int = 0
    newest_step: int = -1
    idle: int = 0
    last_end: tuple[str, int] | None = None

    def decide_restart_or_end(
        self,
        ended: list[RankOutcome],
        *,
        step: int | None = None,
        interrupted_by: signal.Signals | None = None,
        at_once: bool = False,
    ) -> RestartOrEnd:
        """Decides to restart the ranks after an attempt, and counts the restart, or to end the launch.

        ended: outcomes of all ranks, in the order of ranks
        step: the last step that the run has recorded
        interrupted_by: the first signal that the launcher received
        at_once: the ranks were killed without time to save
        """
        found = find_root_cause_failure(ended)
        if at_once:
            return RestartOrEnd(("ended at once; unsaved steps are lost",), CTRL_C_EXIT_CODE)
        if found is None:
            codes = {one.ending.exit_code for one in ended if one.ending}
            interrupted = errors.INTERRUPTED_EXIT_CODE
            return RestartOrEnd((), interrupted if interrupted in codes else 0)
        rank, failure = found
        outcome, text = ended[rank], failure.user_message(rank)
        if interrupted_by is not None and outcome.ending is None and outcome.exit_code == -signal.SIGTERM:
            said = "interrupted outside of training; nothing was saved that the last checkpoint does not hold"
            # A restarted run has trained before, so a scheduler should requeue it.
            return RestartOrEnd((said,), errors.INTERRUPTED_EXIT_CODE if self.done else 128 + interrupted_by)
        exit_code: int | None = failure.exit_code
        if not self.restarts:
            return RestartOrEnd((text,), exit_code, found)
        gained_nothing = self._note_attempt_and_compare(failure, step or 0)
        pause_seconds = 0.0
        if self.done == self.restarts:
            said = f"not restarted: it was already, {count_text(self.restarts, 'time')} (run.restarts)"
        elif not can_restart_help(failure):
            said = "not restarted: it would fail again"
        elif interrupted_by is not None:
            said = f"{interrupted_by.name}: not restarted; the next start resumes from the newest checkpoint"
            exit_code = errors.INTERRUPTED_EXIT_CODE
        elif gained_nothing:
            said = (
                f"not restarted, after {self.done} of {self.restarts} restarts (run.restarts)\n"
                f"  got: this error twice in a row, {f'after step {step}' if step else 'in the first step'}\n"
                "  why: the second attempt made no new step, and nothing suggests that a third one would\n"
                "  try: mend what the error names, then fullshard train --resume"
            )
        else:
            self.done += 1
            pause_seconds = min(2.0 ** (self.idle - 1), _LONGEST_PAUSE_SECONDS) if self.idle else 0.0
            wait = f" in {pause_seconds:.0f} s, since no new step was made" if pause_seconds else ""
            said = f"restart {self.done} of {self.restarts}{wait}, from this run's newest good checkpoint"
            exit_code = None
        return RestartOrEnd((text, said), exit_code, found, pause_seconds)

    def _note_attempt_and_compare(self, failure: FailureReport, step: int) -> bool:
        """Notes how an attempt ended. Returns whether the one before ended with the same error and step.

        Numbers in the error (ranks, processes, ports), and its advice, may differ. An attempt discards a
        damaged generation, so that the next one differs.
        """
        what_and_got = failure.message.partition("\n  why: ")[0]
        end = (f"{failure.name}: {_NUMBER.sub('#', what_and_got)}", step)
        is_same, self.last_end = end == self.last_end and failure.name not in _MENDED, end
        self.idle = 0 if step > self.newest_step else self.idle + 1
        self.newest_step = max(step, self.newest_step)
        return is_same


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


def find_root_cause_failure(ranks: list[RankOutcome]) -> tuple[int, FailureReport] | None:
    """Returns the rank whose failure most likely caused the others, and its failure; None if none failed.

    Failures are ordered by `_RootCauseOrder`, then by time. Those that only report a lost peer (`outcome.py`)
    come last: a killed rank writes no report, and the launcher notices that only after its peers failed.
    """
    failures = [(rank, *found) for rank in ranks if (found := _failure_of_rank(rank)) is not None]
    if not failures:
        return None
    rank, _, failure = min(failures, key=lambda one: (one[1], one[2].at))
    return rank.rank, failure


def _failure_of_rank(rank: RankOutcome) -> tuple[_RootCauseOrder, FailureReport] | None:
    """Returns (origin, report) of a rank's failure; None if it finished, or the launcher killed it."""
    ending, code = rank.ending, rank.exit_code
    if ending is not None and ending.failure is not None:
        return _RootCauseOrder.PEER_LOST if ending.failure.peer_lost else _RootCauseOrder.OWN, ending.failure
    if ending is not None and ending.exit_code in (0, errors.INTERRUPTED_EXIT_CODE):
        return None  # errors during teardown no longer matter
    if rank.killed_by_launcher:
        return None
    if ending is None and code is not None and code < 0:
        cause = _RootCauseOrder.STOPPED if -code in (signal.SIGTERM, signal.SIGABRT) else _RootCauseOrder.OWN
        error = _killed_by_signal_error(rank.rank, -code, oom_kills=rank.oom_kills)
    else:
        cause = _RootCauseOrder.OWN
        error = errors.LaunchError(
            f"rank {rank.rank} left early.",
            got=f"exit code {code if ending is None else ending.exit_code}",
            why="something in it called sys.exit or os._exit, or a signal came to it alone",
        )
    return cause, replace(FailureReport.from_exception(error), at=rank.seen_gone_at, traceback="")


def _killed_by_signal_error(rank: int, number: int, *, oom_kills: int | None) -> errors.LaunchError:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    why, fix = "it came from outside of fullshard", None
    if number == signal.SIGKILL and oom_kills == 0:
        why += "; not from the kernel for want of memory (oom_kill in /proc/vmstat did not change)"
        fix = "--resume starts at the newest whole step"
    elif number == signal.SIGKILL:
        why = "mostly the kernel, or a container's limit, because memory ran out; dmesg may say so"
        if oom_kills:
            why = f"the memory of the host or a container ran out (oom_kill in /proc/vmstat: +{oom_kills})"
        fix = (
            'fewer ranks on this machine, a smaller train.microbatch, or recompute.mode = "full"; '
            "--resume starts at the newest whole step (of a checkpoint, or on the drive of an nvme tier)"
        )
    elif number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        why = "native code crashed (torch, NCCL, a driver or an extension)"
        fix = "PYTHONFAULTHANDLER=1 shows where"
    return errors.LaunchError(f"rank {rank} was killed by {name}.", why=why, fix=fix)


def temporary_private_directory() -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary directory that only this user can read, as a context that finally removes it."""
    return tempfile.TemporaryDirectory(prefix="fullshard-", ignore_cleanup_errors=True)


def perform_request(request: LaunchRequest) -> int:
    """Runs the job of `request` on all ranks, and returns the exit code of the launch.

    Under torchrun or srun, this process is one rank: it calls the job itself, and raises its errors.
    Otherwise it starts ranks on this machine (see `choose_rank_count_and_device` and `_run_attempts`).
    """
    if prepare_environment_if_started_as_rank():
        return perform_as_torchrun_rank(request)
    return _run_attempts(request, ranks=choose_rank_count_and_device(request)[0])


def choose_rank_count_and_device(request: LaunchRequest) -> tuple[int, DeviceType]:
    """Returns the number of ranks to start on this machine, and their device type.

    The number is `run.ranks`, else the plan's, else one per GPU, or two on the CPU. Raises LaunchError for
    more ranks than GPUs, or if CUDA is required but missing.
    """
    run, plan = request.run, request.plan
    gpus = 0
    if run.run.device != "cpu" and not (plan and plan.device == "cpu") and may_have_gpus():
        import torch  # takes a second, which the check of a CPU run avoids

        gpus = torch.cuda.device_count()
    if run.run.device == "cuda" and not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        raise errors.LaunchError(
            "this machine has no CUDA device that torch can use.",
            got=f'run.device = "cuda"{", CUDA_VISIBLE_DEVICES is empty" if hidden else ""}',
            fix='run.device = "cpu", or a CUDA build of torch',
        )
    device: DeviceType = "cuda" if gpus else "cpu"
    ranks = run.run.ranks or (plan.world_size if plan else gpus or CPU_RANKS)
    if gpus and ranks > gpus:
        raise too_few_gpus_error(ranks, gpus=gpus, got=f"run.ranks = {ranks}")
    return ranks, device


def _run_attempts(request: LaunchRequest, *, ranks: int) -> int:
    """Starts `ranks` processes of `fullshard.launch.rank`, waits, and returns the exit code of the launch.

    The exit code is 0, 75 if the ranks were interrupted and have saved, or the code of the first rank that
    failed, whose message is printed on standard error. After a failure that may not recur, all ranks are
    ended and restarted, up to `run.restarts` times: see `can_restart_help` and `RestartBudget`.

    The first SIGINT, SIGTERM or SIGHUP is forwarded to the ranks as SIGTERM; saving may then take any time. A
    second SIGINT kills the ranks at once, with exit code 130. Must be called from the main thread. Raises
    LaunchError if ranks cannot be started.
    """
    set_default_log_levels(os.environ)
    attempts = RestartBudget(restarts=request.run.run.restarts)
    launch = uuid.uuid4().hex  # shared by all attempts, so that each resumes the previous one
    events = LaunchEventLog(request.run.run.dir, own={"launch": launch})
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with record_signals(*heard) as signals:
        while True:
            with temporary_private_directory() as directory:
                request.save(Path(directory))
                running = _LocalRanks(Path(directory), signals=signals, events=events)
                ended = running.run_until_all_end(ranks, launch=launch)
            conclusion = attempts.decide_restart_or_end(
                ended,
                step=events.read_last_step(),
                interrupted_by=signals.first_signal,
                at_once=running.ended_at_once,
            )
            for text in conclusion.messages:
                print_to_stderr(text)
            if conclusion.fault is not None:
                rank, failure = conclusion.fault
                events.record_fault(failure, rank=rank)
            elif conclusion.messages:  # its ranks were ended without time to save
                events.record("stop", {"saved": False})
            if conclusion.exit_code is not None:
                return conclusion.exit_code
            events.record("restart", {"count": attempts.done, "allowed": attempts.restarts})
            wait_before_restart(conclusion.pause_seconds, signals=signals)
            request = request.model_copy(update={"command_started": time.time()})


def wait_before_restart(
    seconds: float, *, signals: RecordedSignals, sleep: Callable[[float], object] = time.sleep
) -> None:
    """Waits until `seconds` have passed, or a signal has arrived, which the next attempt passes on."""
    left = seconds
    while left > 0 and signals.first_signal is None:
        sleep(min(left, _POLL_SECONDS))
        left -= _POLL_SECONDS


class _LocalRanks:
    """The processes of the ranks of one attempt, from their start to their end.

    ended_at_once: whether a second Ctrl-C killed them
    """

    def __init__(self, directory: Path, *, signals: RecordedSignals, events: LaunchEventLog) -> None:
        self._directory, self._signals, self._events = directory, signals, events
        self._processes: list[subprocess.Popen[bytes]] = []
        self._gone_at: dict[int, float] = {}
        self._ended_by_us: set[int] = set()
        self._passed_on = False
        self._oom_kills_before = count_oom_kills()
        self.ended_at_once = False

    def run_until_all_end(self, ranks: int, *, launch: str) -> list[RankOutcome]:
        """Starts the ranks, watches them until all have ended, and returns their outcomes."""
        with disable_gc():
            from fullshard.distributed.loopback import LOOPBACK, start_store_on_loopback

        raise_open_file_limit()  # for the store; the ranks inherit it
        try:
            try:
                store = start_store_on_loopback()  # lives as long as this attempt
                address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
                program = ("-P", "-m", "fullshard.launch.rank", str(self._directory), str(os.getpid()))
                for rank in range(ranks):
                    variables = os.environ | address | _rank_variables(rank, ranks=ranks, launch=launch)
                    process = subprocess.Popen(
                        [sys.executable, *program], env=variables, start_new_session=True
                    )
                    self._processes.append(process)
            except (OSError, RuntimeError) as error:
                got = f"{type(error).__name__}: {error}"
                raise errors.LaunchError(f"{ranks} ranks could not be started.", got=got) from error
            while self._list_running_ranks():
                time.sleep(_POLL_SECONDS)
                self._handle_ended_ranks_and_signals()
        finally:
            self._sigkill_ranks()
        now, before = count_oom_kills(), self._oom_kills_before
        oom_kills = None if now is None or before is None else now - before
        return [
            RankOutcome(
                rank=rank,
                ending=self._load_saved_outcome(rank),
                exit_code=process.returncode,
                seen_gone_at=self._gone_at.get(rank, time.time()),
                killed_by_launcher=rank in self._ended_by_us,
                oom_kills=oom_kills,
            )
            for rank, process in enumerate(self._processes)
        ]

    def _list_running_ranks(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def _handle_ended_ranks_and_signals(self) -> None:
        """Notes ended ranks, forwards a signal, kills all on a second Ctrl-C or some time after a failure."""
        running = self._list_running_ranks()
        for rank in range(len(self._processes)):
            if rank not in running:
                self._gone_at.setdefault(rank, time.time())
        if self._signals.first_signal is not None and not self._passed_on:
            self._forward_as_sigterm(self._signals.first_signal)
        if self._signals.is_interrupted_twice:
            self.ended_at_once = True
            self._sigkill_ranks()
        endings = {rank: self._load_saved_outcome(rank) for rank in range(len(self._processes))}
        times = [ending.failure.at for ending in endings.values() if ending and ending.failure]
        times += [at for rank, at in self._gone_at.items() if endings[rank] is None]
        failed_at = min(times, default=None)
        if failed_at is not None and time.time() > failed_at + _GRACE_SECONDS:
            self._sigkill_ranks()

    def _forward_as_sigterm(self, number: signal.Signals) -> None:
        self._passed_on = True
        again = " again" if number == signal.SIGINT else ""
        print_to_stderr(f"{number.name}: the ranks finish this step and save (Ctrl-C{again} ends them now)")
        for process in self._processes:
            process.terminate()  # does nothing to a process that has ended
        self._events.record("signal", {"signal": number.name})

    def _sigkill_ranks(self) -> None:
        for rank in self._list_running_ranks():
            self._ended_by_us.add(rank)
            with suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, signal.SIGKILL)  # a rank leads a session of its children

    def _load_saved_outcome(self, rank: int) -> ProcessOutcome | None:
        return ProcessOutcome.load(self._directory / f"rank-{rank}.json")


def _rank_variables(rank: int, *, ranks: int, launch: str) -> dict[str, str]:
    """Returns the environment variables of a rank, as torchrun sets them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": launch,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher's store, which outlives the ranks
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
