"""A watchdog per rank, which detects that the run hangs, reports each rank's position, and ends the run.

[Note: how a hang is detected] Every second or so, the watchdog thread of each rank publishes the rank's
position, over a connection of its own to the store in which the ranks found each other. If a rank stays in
one phase for too long, its watchdog requests a report from all ranks: their positions and stacks. The rank
that requested first waits briefly for the reports and names the culprit (`diagnosis.py`). Then all ranks
exit. No part of this needs a collective or the main thread, which may be blocked in a collective forever.

If native code holds a rank's interpreter lock, that rank's watchdog thread cannot run. The other ranks look
at its process and name it. In addition, the watchdog thread restarts a C timer (faulthandler) at each tick.
When the timer expires, it prints the rank's stacks and ends the process.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.errors import TrainError
from fullshard.spec.fault_tolerance_section import FaultToleranceSection
from fullshard.survival.diagnosis import (
    Diagnosis,
    Heartbeat,
    Report,
    UnresponsiveRank,
    diagnose,
    process_state,
    store_lost,
    this_host,
)
from fullshard.survival.fingerprint import default_store
from fullshard.survival.phase import SLOW_PHASES, PhaseTracker, RunPhase
from fullshard.survival.stacks import all_stacks, in_collective, last_collective, other_threads, user_frame
from fullshard.system.last_words import receivers
from fullshard.system.terminal import printable

T = TypeVar("T")

# Fractions of the limit: the time between two heartbeats, the time to wait for reports, and the time that
# the store may take to answer. Each has bounds in seconds.
_TICK, _GRACE, _STORE = 1 / 16, 1 / 8, 1 / 4
_TICK_SECONDS = (0.1, 2.0)
_GRACE_SECONDS = (1.0, 10.0)
# Lower ranks ask for reports first, one tick apart, so that thousands of ranks do not ask at once.
_IN_TURN = 16
_STORE_SECONDS = (3.0, 10.0)
_LEAVE_SECONDS = 1.0


@contextmanager
def watching(where: PhaseTracker, section: FaultToleranceSection) -> Generator[None]:
    """Context in which a watchdog watches this thread, whose phase `where` holds, and the other ranks.

    If the run hangs, prints the diagnosis to standard error and exits with TrainError's exit code, or with 1
    if native code holds the interpreter. All ranks open the context with the same settings. Does nothing if
    `fault_tolerance.watchdog_timeout_seconds` is 0.
    """
    if section.watchdog_timeout_seconds == 0:
        yield
        return
    watchdog = _Watchdog(where, section)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _StatusBoard:
    """Heartbeats, reports and the verdict of the ranks, in the store of the default process group.

    Each request runs on a thread of its own, because it may never return if a link is cut. Once the store has
    not answered in time, every request raises RuntimeError, because the store's client does not recover.
    """

    def __init__(self, *, answer_seconds: float) -> None:
        store = default_store()
        self.rank, self.world_size = (0, 1) if store is None else (dist.get_rank(), dist.get_world_size())
        clone: Callable[[], dist.Store] | None = getattr(store, "clone", None)
        if store is None or self.world_size == 1:
            store = dist.HashStore()
        elif clone is not None:  # a connection of its own: the main thread may hold the other one's lock
            store = clone()
            store.set_timeout(timedelta(seconds=answer_seconds))
        self._store, self._lost = dist.PrefixStore("fullshard/watchdog", store), False
        self._answer_seconds = answer_seconds

    def publish(self, seen: Heartbeat) -> None:
        self._do(lambda store: store.set(f"seen/{self.rank}", json.dumps(asdict(seen))))

    def request_reports(self) -> bool:
        """Asks all ranks for their reports. Returns whether this rank is the first to ask."""
        return self._do(lambda store: store.add("called", 1)) == 1

    def called(self) -> bool:
        return self._do(lambda store: store.check(["called"]))

    def report(self, report: Report) -> None:
        self._do(lambda store: store.set(f"report/{self.rank}", json.dumps(asdict(report))))

    def sightings(self) -> dict[int, Heartbeat]:
        return {rank: Heartbeat(**one) for rank, one in self._read("seen").items()}

    def reports(self) -> dict[int, Report]:
        return {
            rank: Report(**one | {"seen": Heartbeat(**one["seen"])})
            for rank, one in self._read("report").items()
        }

    def conclude(self, error: TrainError) -> None:
        words = {"what": error.what, "got": error.got, "why": error.why, "fix": error.fix}
        self._do(lambda store: store.set("verdict", json.dumps(words)))

    def verdict(self) -> TrainError | None:
        if not self._do(lambda store: store.check(["verdict"])):
            return None
        words = json.loads(self._do(lambda store: store.get("verdict")))
        self._do(lambda store: store.add("read", 1))
        return TrainError(words.pop("what"), **words)

    def readers(self) -> int:
        return self._do(lambda store: store.add("read", 0))

    def _read(self, kind: str) -> dict[int, Any]:
        keys = {rank: f"{kind}/{rank}" for rank in range(self.world_size)}
        return self._do(
            lambda store: {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
        )

    def _do(self, act: Callable[[dist.Store], T]) -> T:
        if self._lost:
            raise RuntimeError("the store has not answered before")
        answer = Future[T]()

        def ask() -> None:
            try:
                answer.set_result(act(self._store))
            except RuntimeError as error:
                answer.set_exception(error)

        thread = threading.Thread(target=ask, name="fullshard store", daemon=True)
        thread.start()
        thread.join(timeout=self._answer_seconds)
        try:
            return answer.result(timeout=0)
        except (RuntimeError, TimeoutError) as error:
            self._lost = True
            raise RuntimeError("the store does not answer") from error


class _Watchdog:
    """Watches the thread that creates it, from a thread of its own. See [Note: how a hang is detected]."""

    def __init__(self, where: PhaseTracker, section: FaultToleranceSection) -> None:
        self._where, self._section = where, section
        answer_seconds = _within(_STORE * section.watchdog_timeout_seconds, _STORE_SECONDS)
        self._board = _StatusBoard(answer_seconds=answer_seconds)
        self._tick = _within(_TICK * section.watchdog_timeout_seconds, _TICK_SECONDS)
        self._grace = _within(_GRACE * section.watchdog_timeout_seconds, _GRACE_SECONDS)
        self._trainer = threading.get_ident()
        self._host = this_host()
        self._moves, self._unmoved, self._looked_at = where.changes, 0.0, time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Starts the timer, publishes a first heartbeat, and starts the watchdog thread."""
        self._set_timer()
        with suppress(RuntimeError):
            self._board.publish(self._seen())
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * _STORE_SECONDS[1])  # it may be asking the store
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopped.wait(self._tick):
            self._count()
            self._set_timer()
            called = False
            # Without the store no other rank can be asked, but this rank still detects its own hang.
            with suppress(RuntimeError):
                self._board.publish(self._seen())
                called = self._board.called()
            if called or self._hangs():
                self._end()

    def _count(self) -> None:
        now, moves = time.monotonic(), self._where.changes
        # Time in which this process did not run (it was stopped, or the machine slept) does not count.
        passed = min(now - self._looked_at, 4 * self._tick)
        self._unmoved = self._unmoved + passed if moves == self._moves else 0.0
        self._moves, self._looked_at = moves, now

    def _limit(self) -> float:
        slow = self._where.phase in SLOW_PHASES or not self._where.has_finished_step
        return self._section.watchdog_timeout_seconds * (self._section.slow_phase_factor if slow else 1.0)

    def _set_timer(self) -> None:
        """Restarts the C timer, which ends the process if this thread stops running."""
        seconds = self._limit() + 2 * self._grace  # after the limit, so that the other ranks act first
        with suppress(AttributeError, OSError, ValueError):  # standard error is missing or not a file
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)

    def _hangs(self) -> bool:
        turn = min(self._board.rank, _IN_TURN) * self._tick
        now, own = time.time(), self._limit()
        if self._unmoved <= own + turn:
            return False
        with suppress(RuntimeError):  # a healthy rank may be in a phase with a longer limit, such as saving
            return not any(
                own < one.limit_seconds > one.unmoved_seconds and now - one.at < 5 * self._tick + 1
                for one in self._board.sightings().values()
            )
        return True

    def _seen(self) -> Heartbeat:
        return Heartbeat(
            host=self._host,
            process=os.getpid(),
            step=self._where.step,
            phase=str(self._where.phase),
            unmoved_seconds=self._unmoved,
            limit_seconds=self._limit(),
            at=time.time(),
        )

    def _report(self) -> Report:
        # With a GPU, backward runs on autograd's own threads.
        threads = other_threads() if self._where.phase is RunPhase.BACKWARD else [self._trainer]
        return Report(
            seen=self._seen(),
            # The reduction's sums are read in this phase: on a GPU, a rank waits for the reduction there.
            waits=self._where.phase is RunPhase.REDUCE or any(in_collective(one) for one in threads),
            place=user_frame(self._trainer),
            collective=last_collective(),
            stacks=all_stacks(),
        )

    def _end(self) -> None:
        """Publishes this rank's report, diagnoses the hang or waits for another rank's verdict, and exits."""
        own, first = self._report(), True
        with suppress(RuntimeError):
            self._board.report(own)
            first = self._board.request_reports()
        error = None if first else self._awaited_verdict()
        if error is None:
            verdict = self._judge(own)
            error = verdict.error
            # If there are receivers, they print the error. One rank prints the stacks for all.
            text = verdict.stacks if receivers() else f"{error}\n\n{verdict.stacks}"
            with suppress(OSError):  # standard error may be closed
                print(f"\n{printable(text)}", file=sys.stderr, flush=True)
            with suppress(RuntimeError):
                self._board.conclude(error)
                self._await_readers()
        with suppress(OSError):  # a full disk must not keep a hanging rank alive
            for receiver in receivers():
                receiver(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)

    def _judge(self, own: Report) -> Diagnosis:
        """Diagnoses the hang from this rank's own report and those of the other ranks that arrive in time."""
        others, sightings = dict[int, Report](), dict[int, Heartbeat]()
        deadline = time.monotonic() + self._grace
        try:
            while len(others) < self._board.world_size and time.monotonic() < deadline:
                time.sleep(self._tick / 2)
                others = self._board.reports()
            sightings = self._board.sightings()
        except RuntimeError:
            return store_lost(self._board.rank, own)
        known = {**others, self._board.rank: own}
        silent: dict[int, UnresponsiveRank] = {}
        for rank in set(range(self._board.world_size)) - known.keys():
            last = sightings.get(rank)
            silent[rank] = UnresponsiveRank(last, None if last is None else process_state(last))
        return diagnose(known, silent, now=time.time())

    def _awaited_verdict(self) -> TrainError | None:
        deadline = time.monotonic() + 2 * self._grace
        with suppress(RuntimeError):
            while time.monotonic() < deadline:
                if (error := self._board.verdict()) is not None:
                    return error
                time.sleep(self._tick / 2)
        return None

    def _await_readers(self) -> None:
        """Waits until the other ranks have read the verdict, because the store may end with this process."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._board.readers() < self._board.world_size - 1 and time.monotonic() < deadline:
            time.sleep(self._tick / 2)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])
