"""A watchdog per rank, which detects that the run hangs, reports each rank's position, and ends the run.

[Note: how a hang is detected] At each tick (0.1 to 2 s, longer above 8,192 ranks), the watchdog thread of
each rank publishes the rank's position, over a connection of its own to the store in which the ranks found
each other. If a rank stays in one phase for too long, its watchdog requests a report from all ranks. The rank
that requested first waits briefly for the reports and names the culprit (`diagnosis.py`). Then all ranks
exit, a few after printing their stacks. No part of this needs a collective or the main thread, which may be
blocked in a collective forever. One rank alone reads what the others wrote, all reports in one request.

If native code holds a rank's interpreter lock, that rank's watchdog thread cannot run. The other ranks look
at its process and name it. In addition, the watchdog thread restarts a C timer (faulthandler) at each tick.
When the timer expires, it prints the rank's stacks and ends the process.
"""

import faulthandler
import itertools
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch

from fullshard.spec.settings.train_section import SLOW_PHASE_FACTOR, FaultToleranceSection
from fullshard.survival import diagnosis
from fullshard.survival.flight_recorder import RecordedCollectives, read_recorded_collectives
from fullshard.survival.phase import SLOW_PHASES, Heartbeat, PhaseTracker, RunPhase
from fullshard.survival.status_board import StatusBoard
from fullshard.system.process import watchdog_exit_receivers
from fullshard.system.terminal import escape_control_characters

# Fractions of the limit: the time between two heartbeats, the time to wait for reports, and the time that
# the store may take to answer. Each has bounds in seconds.
_TICK, _GRACE, _STORE = 1 / 16, 1 / 8, 1 / 4
_TICK_SECONDS = (0.1, 2.0)
_GRACE_SECONDS = (1.0, 6.0)
# Ticks per second of all ranks together, which their one store has to answer.
_TICKS_OF_ALL_RANKS = 4096
# Lower ranks request reports first, one tick apart, so that a verdict is mostly in the log of rank 0.
_IN_TURN = 16
_STORE_SECONDS = (3.0, 10.0)
_LEAVE_SECONDS = 3.0


@contextmanager
def watch_for_hangs(
    where: PhaseTracker,
    section: FaultToleranceSection,
    *,
    grace_seconds: float | None = None,
    slack_seconds: float = 0.0,
) -> Generator[None]:
    """Context in which a watchdog watches this thread, whose phase `where` holds, and the other ranks.

    grace_seconds: how long to wait for the reports of other ranks; None: an eighth of the limit, 1 to 6
    slack_seconds: further seconds for the store's answers, heartbeats, the verdict and the C timer, on a
        machine that pauses processes for long

    If the run hangs, prints the diagnosis to standard error and exits with TrainError's exit code, or with 1
    if native code holds the interpreter. All ranks open the context with the same settings. Does nothing if
    `fault_tolerance.watchdog_timeout_seconds` is 0.
    """
    if section.watchdog_timeout_seconds == 0:
        yield
        return
    watchdog = _Watchdog(where, section, grace_seconds=grace_seconds, slack_seconds=slack_seconds)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _Watchdog:
    """Watches the thread that creates it, from a thread of its own. See [Note: how a hang is detected]."""

    def __init__(
        self,
        where: PhaseTracker,
        section: FaultToleranceSection,
        *,
        grace_seconds: float | None,
        slack_seconds: float,
    ) -> None:
        self._where, self._section, self._slack = where, section, slack_seconds
        answer_seconds = _clamp(_STORE * section.watchdog_timeout_seconds, _STORE_SECONDS)
        self._answer_seconds = answer_seconds + slack_seconds
        self._board = StatusBoard.open_default(answer_seconds=self._answer_seconds)
        tick = _clamp(_TICK * section.watchdog_timeout_seconds, _TICK_SECONDS)
        self._tick = max(tick, self._board.world_size / _TICKS_OF_ALL_RANKS)
        grace = _clamp(_GRACE * section.watchdog_timeout_seconds, _GRACE_SECONDS)
        self._grace = max(grace, 1.5 * self._tick) if grace_seconds is None else grace_seconds
        self._trainer = threading.get_ident()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._host = diagnosis.host_and_namespace_id()
        self._moves, self._unmoved, self._looked_at = where.changes, 0.0, time.monotonic()
        self._excused = 0.0  # of the unmoved seconds, those in which another rank was in a slow phase
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch_until_stop, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Starts the timer, publishes a first heartbeat, and starts the watchdog thread."""
        self._postpone_forced_exit()
        with suppress(RuntimeError):
            self._publish_heartbeat()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * _STORE_SECONDS[1])  # it may be asking the store
        faulthandler.cancel_dump_traceback_later()

    def _watch_until_stop(self) -> None:
        if self._gpu is not None:  # the flight recorder asks the device, which for a new thread is the first
            torch.cuda.set_device(self._gpu)
        while not self._stopped.wait(self._tick):
            self._update_unmoved_seconds()
            self._postpone_forced_exit()
            called = False
            # Without the store no other rank can be asked, but this rank still detects its own hang.
            with suppress(RuntimeError):
                called = self._publish_heartbeat()
            if called or self._update_excused_and_detect_hang():
                self._report_and_exit()

    def _update_unmoved_seconds(self) -> None:
        now, moves = time.monotonic(), self._where.changes
        # Time in which this process did not run (it was stopped, or the machine slept) does not count.
        passed = min(now - self._looked_at, 4 * self._tick)
        self._unmoved = self._unmoved + passed if moves == self._moves else 0.0
        self._excused = min(self._excused, self._unmoved)
        self._moves, self._looked_at = moves, now

    def _phase_limit_seconds(self) -> float:
        slow = self._where.phase in SLOW_PHASES or not self._where.has_finished_step
        return self._section.watchdog_timeout_seconds * (SLOW_PHASE_FACTOR if slow else 1.0)

    def _publish_heartbeat(self) -> bool:
        """Publishes this rank's position. Returns whether reports were requested."""
        seen = self._make_heartbeat()
        is_slow = self._section.watchdog_timeout_seconds < seen.limit_seconds > seen.unmoved_seconds
        return self._board.publish_heartbeat(seen, is_slow=is_slow)

    def _postpone_forced_exit(self, *, more_seconds: float = 0.0) -> None:
        """Restarts the C timer, which ends the process if this thread stops running."""
        # After the limit, so that the other ranks act first.
        seconds = self._phase_limit_seconds() + 2 * self._grace + self._slack + more_seconds
        with suppress(AttributeError, OSError, ValueError):  # standard error is missing or not a file
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    def _update_excused_and_detect_hang(self) -> bool:
        """Returns whether this rank is too long in its phase. Ranks in longer ones excuse the time so far."""
        turn = min(self._board.rank, _IN_TURN) * self._tick
        own = self._phase_limit_seconds()
        if self._unmoved - self._excused <= own + turn:
            return False
        if own > self._section.watchdog_timeout_seconds:  # as long as that of any other
            return True
        with suppress(RuntimeError):  # a healthy rank may be in a phase with a longer limit, such as saving
            seconds = time.time() - self._board.find_slow_heartbeat_time()
            if seconds < 5 * self._tick + 1 + self._slack:
                # That rank's next phase has its whole limit, too, before it comes to where this one waits.
                self._excused = self._unmoved
                return False
        return True

    def _make_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            host=self._host,
            process=os.getpid(),
            step=self._where.step,
            phase=str(self._where.phase),
            unmoved_seconds=self._unmoved,
            limit_seconds=self._phase_limit_seconds(),
            at=time.time(),
        )

    def _make_report(self) -> diagnosis.RankReport:
        threads = _other_thread_ids() if self._where.phase in _ON_OTHER_THREADS else [self._trainer]
        stacks = [[frame.f_code.co_filename for frame in _thread_frames(thread)] for thread in threads]
        clock, recorded = self._where.clock, read_recorded_collectives()
        return diagnosis.RankReport(
            seen=self._make_heartbeat(),
            waits=self._board.world_size > 1 and waits_for_other_ranks(stacks, recorded),
            place=_user_frame_text(self._trainer),
            collective=recorded.last,
            wait="" if clock is None else clock.current_wait_name(),
            unit=self._where.last_unit_name(),
            unfinished=recorded.unfinished,
            started=recorded.started,
        )

    def _report_and_exit(self) -> None:
        """Publishes this rank's report, diagnoses the hang or waits for another rank's verdict, and exits."""
        # Time to judge in place of a rank that gives no verdict: the first 2 · grace pass in waiting for it.
        self._postpone_forced_exit(more_seconds=2 * self._grace + self._answer_seconds + _LEAVE_SECONDS)
        own, stacks = self._make_report(), _all_stacks_text()
        verdict = self._publish_report_and_wait_for_verdict(own)
        is_judge = verdict is None
        verdict = verdict or diagnose_from_reports(self._board, own, grace_seconds=self._grace)
        receivers = watchdog_exit_receivers()
        # The ranks that are shown print their own stacks. The error comes last, unless a receiver shows it.
        is_shown = self._board.rank in verdict.shown
        text = f"\nrank {self._board.rank}, every thread\n{stacks}" if is_shown else ""
        if is_judge and not any(shows_error for _, shows_error in receivers):
            text += f"\n{verdict.error}\n"
        with suppress(OSError):  # standard error may be closed
            print(escape_control_characters(text), end="", file=sys.stderr, flush=True)
        if is_judge:
            self._publish_verdict_and_wait_for_readers(verdict)
        with suppress(OSError):  # a full disk must not keep a hanging rank alive
            for receiver, _ in receivers:
                receiver(verdict.error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(verdict.error.exit_code)

    def _publish_report_and_wait_for_verdict(self, own: diagnosis.RankReport) -> diagnosis.Diagnosis | None:
        """Returns another rank's verdict. None if this rank is to judge, or cannot reach the store.

        If the rank that is to judge gives no verdict, the first of the others takes its place. So however
        many fail, one rank at a time reads the reports.
        """
        with suppress(RuntimeError):
            self._board.publish_report(own)
            for attempt in itertools.count():
                if self._board.request_reports_and_return_if_first(attempt):
                    return None
                verdict = self._board.wait_for_verdict_and_count_reader(2 * self._grace + self._slack)
                if verdict is not None:
                    return verdict
        return None

    def _publish_verdict_and_wait_for_readers(self, verdict: diagnosis.Diagnosis) -> None:
        with suppress(RuntimeError):
            self._board.publish_verdict(verdict)
            # The other ranks must have read it, because the store may end with this process.
            deadline, others = time.monotonic() + _LEAVE_SECONDS, self._board.count_reports() - 1
            while self._board.count_verdict_readers() < others and time.monotonic() < deadline:
                time.sleep(_TICK_SECONDS[0])


def diagnose_from_reports(
    board: StatusBoard, own: diagnosis.RankReport, *, grace_seconds: float
) -> diagnosis.Diagnosis:
    """Diagnoses the hang from this rank's own report and those of the other ranks that arrive in time."""
    ranks, deadline = range(board.world_size), time.monotonic() + grace_seconds
    try:
        while board.count_reports() < len(ranks) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS[0])
        known = {**board.read_reports(), board.rank: own}
        missing = [rank for rank in ranks if rank not in known]
        sightings = board.read_heartbeats(missing)
    except RuntimeError:
        return diagnosis.diagnose_lost_store(board.rank, own)
    silent: dict[int, diagnosis.UnresponsiveRank] = {}
    for rank in missing:
        last = sightings.get(rank)
        silent[rank] = diagnosis.UnresponsiveRank(
            last, None if last is None else diagnosis.process_state_letter(last)
        )
    return diagnosis.diagnose_hang(known, silent, now=time.time())


def _clamp(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


# Phases in which threads other than the one that trains may wait for other ranks: with a GPU, backward runs
# on autograd's own threads, and saves in the background run on a thread of theirs.
_ON_OTHER_THREADS = (RunPhase.BACKWARD, RunPhase.SAVING, RunPhase.FINISHING)
# Parts of the paths of files: those of collectives, those that wait for the device, those that write files,
# and those through which torch calls an operation.
_COLLECTIVES, _DEVICE_WAITS = ("/torch/distributed/", "/fullshard/distributed/"), ("/torch/cuda/",)
_FILES, _CALLS = "/torch/distributed/checkpoint/", ("/torch/_ops.py", "/torch/_library/")


def waits_for_other_ranks(stacks: Iterable[Sequence[str]], recorded: RecordedCollectives) -> bool:
    """Returns whether a rank waits for others.

    stacks: for each thread that may wait, the files of its frames, innermost first

    A rank with an unfinished collective on its device waits, wherever its host is: NCCL's calls return at
    once, and the host later waits for figures, or in a launch because the queue is full. The rank that the
    others wait for has no such collective, because the others come to those that it has launched. If it waits
    for its device, then for its own work. gloo's collectives block the host, so its innermost frame decides.
    """
    if recorded.unfinished:
        return True
    paths = _COLLECTIVES if recorded.records_device else (*_COLLECTIVES, *_DEVICE_WAITS)
    for stack in stacks:
        files = (file.replace(os.sep, "/") for file in stack)
        innermost = next((file for file in files if not any(part in file for part in _CALLS)), "")
        if _FILES not in innermost and any(part in innermost for part in paths):
            return True
    return False


def _thread_frames(thread: int) -> list[FrameType]:
    """Returns the frames of a thread, innermost first, or an empty list if the thread has ended."""
    innermost = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return [frame for frame, _ in traceback.walk_stack(innermost)] if innermost is not None else []


def _user_frame_text(thread: int) -> str:
    """Returns `file:line in function` of a thread's innermost frame, outside libraries if there is one."""
    frames = _thread_frames(thread)
    libraries = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    near = [frame for frame in frames if not frame.f_code.co_filename.startswith(libraries)] or frames
    if not near:
        return "nowhere in Python"
    code = near[0].f_code
    return f"{code.co_filename}:{near[0].f_lineno} in {code.co_name}"


def _other_thread_ids() -> list[int]:
    own = threading.get_ident()
    return [thread for thread in sys._current_frames() if thread != own]  # pyright: ignore[reportPrivateUsage]


def _all_stacks_text() -> str:
    """Returns the stacks of all threads except fullshard's own, each with its innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts: list[str] = []
    for thread in _other_thread_ids():
        if not names.get(thread, "").startswith("fullshard ") and (frames := _thread_frames(thread)):
            texts += [f"  thread {names.get(thread, thread)}\n", *traceback.format_stack(frames[0])]
    return "".join(texts)
