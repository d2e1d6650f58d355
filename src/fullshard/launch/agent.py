"""Starting ranks on this machine through torchelastic, and handling their signals and failures."""

import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fullshard.errors import LaunchError
from fullshard.launch.attempts import RankOutcome, RestartBudget, RestartOrEnd
from fullshard.launch.environment import set_default_log_levels
from fullshard.launch.event_log import LaunchEventLog
from fullshard.launch.gc import disable_gc
from fullshard.launch.outcome import ProcessOutcome
from fullshard.launch.request import LaunchRequest
from fullshard.launch.scratch import temporary_private_directory
from fullshard.system.process import is_process_running
from fullshard.system.signals import RecordedSignals, record_signals
from fullshard.system.terminal import escape_control_characters

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

POLL_SECONDS = 0.1
# After the first failure the others mostly fail at once, because their connections break. Ranks blocked in a
# collective do not react to SIGTERM, and torchelastic would wait 30 seconds for them.
GRACE_SECONDS = 3.0


def run_attempts(request: LaunchRequest, *, ranks: int) -> int:
    """Starts `ranks` processes of `fullshard.launch.rank`, waits, and returns the exit code of the launch.

    The exit code is 0, 75 if the ranks were interrupted and have saved, or the code of the first rank that
    failed, whose message is printed on standard error. After a failure that may not recur, all ranks are
    ended and restarted, up to `run.restarts` times: see `fullshard.launch.attempts.can_restart_help`.

    The first SIGINT, SIGTERM or SIGHUP is forwarded to the ranks as SIGTERM; saving may then take any time. A
    second SIGINT kills the ranks at once, with exit code 130. Must be called from the main thread. Raises
    LaunchError if ranks cannot be started.
    """
    set_default_log_levels(os.environ)
    attempts = RestartBudget(restarts=request.run.run.restarts)
    launch = uuid.uuid4().hex  # shared by all attempts, so that each resumes the previous one
    events = LaunchEventLog(request.run.run.dir, own={"launch": launch})
    heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with record_signals(*heard) as signals, _silence_torchelastic_logs():
        while True:
            with temporary_private_directory() as directory:
                request.save(directory)
                agent = _build_local_agent(directory, ranks, launch=launch)
                watch = _RankMonitor(agent, directory, signals=signals, events=events)
                with ThreadPoolExecutor(max_workers=1, thread_name_prefix="torchelastic") as thread:
                    ended = watch.run_until_ranks_end(thread)
            conclusion = attempts.decide_restart_or_end(
                ended, interrupted_by=signals.first_signal, at_once=watch.ended_at_once
            )
            for text in conclusion.messages:
                _print_to_stderr(text)
            _record_conclusion(conclusion, events, attempts=attempts)
            if conclusion.exit_code is not None:
                return conclusion.exit_code
            request = request.model_copy(update={"command_started": time.time()})


def _record_conclusion(conclusion: RestartOrEnd, events: LaunchEventLog, *, attempts: RestartBudget) -> None:
    """Records the failure of an attempt, its restart, or that its ranks were ended without time to save."""
    if conclusion.fault is not None:
        rank, failure = conclusion.fault
        events.record_fault(failure, rank=rank)
    elif conclusion.messages:
        events.record("stop", {"saved": False})
    if conclusion.exit_code is None:
        events.record("restart", {"count": attempts.done, "allowed": attempts.restarts})


def _build_local_agent(directory: Path, ranks: int, *, launch: str) -> "LocalElasticAgent":
    with disable_gc():
        from torch.distributed.elastic.agent.server.api import WorkerSpec  # the import takes a second
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from fullshard.launch.rendezvous import LoopbackRendezvous

    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=LoopbackRendezvous(launch),
        entrypoint=sys.executable,
        args=("-P", "-m", "fullshard.launch.rank", str(directory), str(os.getpid())),
        max_restarts=0,  # we start other attempts ourselves, each with its own agent and store
        monitor_interval=POLL_SECONDS,
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(directory / "torchelastic")))


class _RankMonitor:
    """Watches the ranks of one attempt from start to end.

    The agent runs in its own thread, because in the main thread it would install its own handlers, which end
    the ranks.
    """

    def __init__(
        self,
        agent: "LocalElasticAgent",
        directory: Path,
        *,
        signals: RecordedSignals,
        events: LaunchEventLog,
    ) -> None:
        self._agent = agent
        self._events = events
        self._directory = directory
        self._ranks = agent.get_worker_group().spec.local_world_size
        self._signals = signals
        self._gone_at: dict[int, float] = {}
        self._ended_by_us: set[int] = set()
        self._passed_on = False
        self.ended_at_once = False

    def run_until_ranks_end(self, thread: ThreadPoolExecutor) -> list[RankOutcome]:
        """Runs the agent in `thread`, watches the ranks until all have ended, and returns their outcomes."""
        run = thread.submit(cast("Callable[[], RunResult]", self._agent.run))
        try:
            while not run.done():
                wait([run], timeout=POLL_SECONDS)
                self._poll_ranks_and_signals()
        finally:
            if not run.done():
                self._sigkill_ranks()
        return self._collect_rank_outcomes(run)

    def _poll_ranks_and_signals(self) -> None:
        pids = self._rank_pids()
        if len(pids) < self._ranks:
            return  # ranks are still starting: signals wait until they run
        for rank, pid in pids.items():
            if rank not in self._gone_at and not is_process_running(pid):
                self._gone_at[rank] = time.time()
        if self._signals.first_signal is not None and not self._passed_on:
            self._forward_signal(self._signals.first_signal)
        if self._signals.is_interrupted_twice:
            self.ended_at_once = True
            self._sigkill_ranks()
        failed_at = self._first_failure_time()
        if failed_at is not None and time.time() > failed_at + GRACE_SECONDS:
            self._sigkill_ranks()

    def _rank_pids(self) -> dict[int, int]:
        workers = self._agent.get_worker_group().workers
        return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}

    def _forward_signal(self, number: signal.Signals) -> None:
        self._passed_on = True
        _print_to_stderr(f"{number.name}: the ranks finish this step and save (Ctrl-C again ends them now)")
        for pid in self._rank_pids().values():
            with suppress(ProcessLookupError):  # it has exited in the meantime
                os.kill(pid, signal.SIGTERM)
        self._events.record("signal", {"signal": number.name})

    def _sigkill_ranks(self) -> None:
        for rank, pid in self._rank_pids().items():
            if is_process_running(pid):
                self._ended_by_us.add(rank)
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # a rank leads a session of all its children

    def _first_failure_time(self) -> float | None:
        """Returns the time of the first failure so far, in seconds since the epoch, or None."""
        endings = {rank: self._load_saved_outcome(rank) for rank in range(self._ranks)}
        times = [ending.failure.at for ending in endings.values() if ending and ending.failure]
        times += [at for rank, at in self._gone_at.items() if endings[rank] is None]
        return min(times, default=None)

    def _load_saved_outcome(self, rank: int) -> ProcessOutcome | None:
        return ProcessOutcome.load(self._directory / f"rank-{rank}.json")

    def _collect_rank_outcomes(self, run: "Future[RunResult]") -> list[RankOutcome]:
        try:
            result = run.result()
        except (OSError, RuntimeError) as error:
            raise LaunchError(
                f"{self._ranks} ranks could not be started.", got=f"{type(error).__name__}: {error}"
            ) from error
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        return [
            RankOutcome(
                rank=rank,
                ending=self._load_saved_outcome(rank),
                exit_code=codes.get(rank, 0),
                seen_gone_at=self._gone_at.get(rank, time.time()),
                killed_by_launcher=rank in self._ended_by_us,
            )
            for rank in range(self._ranks)
        ]


def _print_to_stderr(text: str) -> None:
    """Prints on standard error, at the start of a line, and shows the cursor that a rank may have hidden."""
    restored = "\r\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{restored}{escape_control_characters(text)}", file=sys.stderr, flush=True)


@contextmanager
def _silence_torchelastic_logs() -> Generator[None]:
    """Context that silences torchelastic's report of a failure, because fullshard prints its own."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(silence)
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate
