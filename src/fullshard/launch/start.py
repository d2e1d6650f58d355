"""Running a request's job on ranks that torchrun or srun started, or on ranks that fullshard starts."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

from fullshard.errors import LaunchError
from fullshard.launch.attempts import RankOutcome, RestartBudget, RestartOrEnd
from fullshard.launch.detect import may_have_gpus
from fullshard.launch.environment import prepare_rank_environment, set_default_log_levels
from fullshard.launch.event_log import LaunchEventLog
from fullshard.launch.gc import disable_gc
from fullshard.launch.outcome import ProcessOutcome
from fullshard.launch.rank import perform_as_torchrun_rank
from fullshard.launch.request import LaunchRequest
from fullshard.spec.plan import DeviceType
from fullshard.system.process import RecordedSignals, record_signals
from fullshard.system.terminal import escape_control_characters

# See `RunSetupSection.ranks`. Two show that sharding works; more only compete for the cores.
CPU_RANKS = 2
_POLL_SECONDS = 0.1
# After the first failure the others mostly fail at once, because their connections break. Ranks blocked in a
# collective do not react to SIGTERM, and are killed.
_GRACE_SECONDS = 3.0


def temporary_private_directory() -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary directory that only this user can read, as a context that finally removes it."""
    return tempfile.TemporaryDirectory(prefix="fullshard-", ignore_cleanup_errors=True)


def perform_request(request: LaunchRequest) -> int:
    """Runs the job of `request` on all ranks, and returns the exit code of the launch.

    Under torchrun or srun, this process is one rank: it calls the job itself, and raises its errors.
    Otherwise it starts ranks on this machine (see `choose_rank_count_and_device` and `_run_attempts`).
    """
    if prepare_rank_environment():
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
        raise LaunchError(
            "this machine has no CUDA device that torch can use.",
            got=f'run.device = "cuda"{", CUDA_VISIBLE_DEVICES is empty" if hidden else ""}',
            fix='run.device = "cpu", or a CUDA build of torch',
        )
    device: DeviceType = "cuda" if gpus else "cpu"
    ranks = run.run.ranks or (plan.world_size if plan else gpus or CPU_RANKS)
    if gpus and ranks > gpus:
        raise LaunchError(
            f"{ranks} ranks need a GPU each.",
            got=f"run.ranks = {ranks}, {gpus} GPUs",
            why="NCCL refuses two ranks on one device",
            fix=f'run.ranks = {gpus}, or run.device = "cpu"',
        )
    return ranks, device


def _run_attempts(request: LaunchRequest, *, ranks: int) -> int:
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
    with record_signals(*heard) as signals:
        while True:
            with temporary_private_directory() as directory:
                request.save(Path(directory))
                running = _LocalRanks(Path(directory), signals=signals, events=events)
                ended = running.run_until_all_end(ranks, launch=launch)
            conclusion = attempts.decide_restart_or_end(
                ended, interrupted_by=signals.first_signal, at_once=running.ended_at_once
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
        self.ended_at_once = False

    def run_until_all_end(self, ranks: int, *, launch: str) -> list[RankOutcome]:
        """Starts the ranks, watches them until all have ended, and returns their outcomes."""
        with disable_gc():
            from fullshard.distributed.loopback import LOOPBACK, start_store_on_loopback

        try:
            try:
                store = start_store_on_loopback()  # lives as long as this attempt
                address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(store.port)}
                for rank in range(ranks):
                    self._start_rank(address | _rank_variables(rank, ranks=ranks, launch=launch))
            except (OSError, RuntimeError) as error:
                got = f"{type(error).__name__}: {error}"
                raise LaunchError(f"{ranks} ranks could not be started.", got=got) from error
            while self._running():
                time.sleep(_POLL_SECONDS)
                self._poll_ranks_and_signals()
        finally:
            self._sigkill_ranks()
        return [
            RankOutcome(
                rank=rank,
                ending=self._load_saved_outcome(rank),
                exit_code=process.returncode,
                seen_gone_at=self._gone_at.get(rank, time.time()),
                killed_by_launcher=rank in self._ended_by_us,
            )
            for rank, process in enumerate(self._processes)
        ]

    def _start_rank(self, variables: dict[str, str]) -> None:
        program = ("-P", "-m", "fullshard.launch.rank", str(self._directory), str(os.getpid()))
        process = subprocess.Popen(
            [sys.executable, *program], env=os.environ | variables, start_new_session=True
        )
        self._processes.append(process)

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def _poll_ranks_and_signals(self) -> None:
        running = self._running()
        for rank in range(len(self._processes)):
            if rank not in running:
                self._gone_at.setdefault(rank, time.time())
        if self._signals.first_signal is not None and not self._passed_on:
            self._forward_signal(self._signals.first_signal)
        if self._signals.is_interrupted_twice:
            self.ended_at_once = True
            self._sigkill_ranks()
        failed_at = self._first_failure_time()
        if failed_at is not None and time.time() > failed_at + _GRACE_SECONDS:
            self._sigkill_ranks()

    def _forward_signal(self, number: signal.Signals) -> None:
        self._passed_on = True
        _print_to_stderr(f"{number.name}: the ranks finish this step and save (Ctrl-C again ends them now)")
        for process in self._processes:
            process.terminate()  # does nothing to a process that has ended
        self._events.record("signal", {"signal": number.name})

    def _sigkill_ranks(self) -> None:
        for rank in self._running():
            self._ended_by_us.add(rank)
            with suppress(ProcessLookupError):
                os.killpg(self._processes[rank].pid, signal.SIGKILL)  # a rank leads a session of its children

    def _first_failure_time(self) -> float | None:
        """Returns the time of the first failure so far, in seconds since the epoch, or None."""
        endings = {rank: self._load_saved_outcome(rank) for rank in range(len(self._processes))}
        times = [ending.failure.at for ending in endings.values() if ending and ending.failure]
        times += [at for rank, at in self._gone_at.items() if endings[rank] is None]
        return min(times, default=None)

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


def _print_to_stderr(text: str) -> None:
    """Prints on standard error, at the start of a line, and shows the cursor that a rank may have hidden."""
    restored = "\r\x1b[?25h" if sys.stderr.isatty() else ""
    print(f"{restored}{escape_control_characters(text)}", file=sys.stderr, flush=True)
