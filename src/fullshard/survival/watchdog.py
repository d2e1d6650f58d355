"""The watchdog of a rank: when ranks stop moving it says which is where, and ends the job.

[Note: how a hang is told] A thread of each rank tells the others every second or so where the rank is, over a
connection of its own to the store in which the ranks found each other. A rank that stays in one phase for too
long calls all of them; each then reports where it stands, with its stacks. The rank that called first waits a
little for the reports, names the culprit (`diagnosis.py`), and all leave. Nothing of it needs the rank's main
thread, which may sit in a collective for good, or a collective.

Where native code holds a rank's interpreter, no such thread comes to run. The others see its process and name
it; and a timer in C (faulthandler), which that thread sets anew each time, shows its stacks and ends it.
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
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.errors import TrainError
from fullshard.spec.run import SurvivalSection
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

# Of the limit: how often a rank tells where it is, and how long one that calls waits for reports.
# And how long the store may take to answer.
_TICK, _GRACE, _STORE = 1 / 16, 1 / 8, 1 / 4
_TICK_SECONDS = (0.1, 2.0)
_GRACE_SECONDS = (1.0, 10.0)
# The lower ranks call first, one tick after the other, so that thousands do not ask thousands at once.
_IN_TURN = 16
_STORE_SECONDS = (3.0, 10.0)
_LEAVE_SECONDS = 1.0


@contextmanager
def watching(where: PhaseTracker, section: SurvivalSection) -> Generator[None]:
    """Watches over this thread, which tells in `where` what it does, and over its ranks. All open it alike.

    A run that hangs within it ends: what it hangs at on standard error, then TrainError's exit code, or 1
    where native code holds the interpreter. Does nothing where `survival.watchdog_seconds` is 0.
    """
    if section.watchdog_seconds == 0:
        yield
        return
    answer_seconds = _within(_STORE * section.watchdog_seconds, _STORE_SECONDS)
    board = _StatusBoard.of_default_group(answer_seconds=answer_seconds)
    watchdog = _Watchdog(where, section, board=board)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


class _StatusBoard:
    """What the ranks tell each other, in the group's store. Alone, a rank has none and tells itself.

    Whatever it is asked raises RuntimeError once the store has not answered: its client does not recover. It
    may not even come back, where a link is cut, so it is asked on a thread of its own.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, answer_seconds: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._lost = dist.PrefixStore("fullshard/watchdog", store), False
        self._answer_seconds = answer_seconds
        self._acts: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="fullshard store", daemon=True)
        self._thread.start()

    @classmethod
    def of_default_group(cls, *, answer_seconds: float) -> "_StatusBoard":
        store = default_store()
        if store is None or dist.get_world_size() == 1:
            return cls(dist.HashStore(), rank=0, world_size=1, answer_seconds=answer_seconds)
        clone: Callable[[], dist.Store] | None = getattr(store, "clone", None)
        if clone is not None:  # a connection of its own: the main thread may hold the other one's lock
            store = clone()
            store.set_timeout(timedelta(seconds=answer_seconds))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        return cls(store, rank=rank, world_size=world_size, answer_seconds=answer_seconds)

    def close(self) -> None:
        self._acts.put(None)
        self._thread.join(timeout=self._answer_seconds)

    def publish(self, seen: Heartbeat) -> None:
        self._do(lambda store: store.set(f"seen/{self.rank}", json.dumps(asdict(seen))))

    def request_reports(self) -> bool:
        """Asks all ranks for their reports. True if nobody has before."""
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
        said = {"what": error.what, "got": error.got, "why": error.why, "fix": error.fix}
        self._do(lambda store: store.set("verdict", json.dumps(said)))

    def verdict(self) -> TrainError | None:
        if not self._do(lambda store: store.check(["verdict"])):
            return None
        said = json.loads(self._do(lambda store: store.get("verdict")))
        self._do(lambda store: store.add("read", 1))
        return TrainError(said["what"], got=said["got"], why=said["why"], fix=said["fix"])

    def readers(self) -> int:
        """Ranks that have read the verdict."""
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
        self._acts.put(lambda: _settle(answer, lambda: act(self._store)))
        try:
            return answer.result(timeout=self._answer_seconds)
        except (RuntimeError, TimeoutError) as error:
            self._lost = True
            raise RuntimeError("the store does not answer") from error

    def _serve(self) -> None:
        while (act := self._acts.get()) is not None:
            act()


def _settle(answer: Future[T], act: Callable[[], T]) -> None:
    try:
        answer.set_result(act())
    except RuntimeError as error:
        answer.set_exception(error)


class _Watchdog:
    """Watches the thread that makes it, from a thread of its own. See [Note: how a hang is told]."""

    def __init__(self, where: PhaseTracker, section: SurvivalSection, *, board: _StatusBoard) -> None:
        self._where, self._section, self._board = where, section, board
        self._tick = _within(_TICK * section.watchdog_seconds, _TICK_SECONDS)
        self._grace = _within(_GRACE * section.watchdog_seconds, _GRACE_SECONDS)
        self._trainer = threading.get_ident()
        self._host = this_host()
        self._moves, self._unmoved, self._looked_at = where.changes, 0.0, time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Shows this rank once before anything can happen to it: then it was heard of."""
        with suppress(RuntimeError):
            self._board.publish(self._seen())
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2 * _STORE_SECONDS[1])  # it may be asking the store
        self._board.close()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopped.wait(self._tick):
            self._count()
            self._set_timer()
            called = False
            # Where the store is lost nobody can be asked, but that this rank hangs is seen all the same.
            with suppress(RuntimeError):
                self._board.publish(self._seen())
                called = self._board.called()
            if called or self._hangs():
                self._end()

    def _count(self) -> None:
        now, moves = time.monotonic(), self._where.changes
        # Time in which this process did not run (it was stopped, the machine slept) is nobody's fault in it.
        passed = min(now - self._looked_at, 4 * self._tick)
        self._unmoved = self._unmoved + passed if moves == self._moves else 0.0
        self._moves, self._looked_at = moves, now

    def _limit(self) -> float:
        slow = self._where.phase in SLOW_PHASES or not self._where.has_finished_step
        return self._section.watchdog_seconds * (self._section.watchdog_patience if slow else 1.0)

    def _set_timer(self) -> None:
        """If this thread does not come again, the C thread speaks and ends the process: after the others."""
        file = sys.__stderr__
        with suppress(AttributeError, OSError, ValueError):  # there is no standard error, or it is no file
            seconds = self._limit() + 2 * self._grace
            faulthandler.dump_traceback_later(seconds, exit=True, file=file or sys.stderr)

    def _hangs(self) -> bool:
        turn = min(self._board.rank, _IN_TURN) * self._tick
        return self._unmoved > self._limit() + turn and not self._others_take_their_time()

    def _others_take_their_time(self) -> bool:
        """Whether a rank that is well is where it may be for longer than this one: still saving, say."""
        now, own = time.time(), self._limit()
        with suppress(RuntimeError):
            return any(
                own < one.limit_seconds > one.unmoved_seconds and now - one.at < 5 * self._tick + 1
                for one in self._board.sightings().values()
            )
        return False

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
        # Backward runs on threads of autograd's own where there is a GPU.
        threads = other_threads() if self._where.phase is RunPhase.BACKWARD else [self._trainer]
        return Report(
            seen=self._seen(),
            # The reduction's sums are read where they lie: on a GPU, that is where a rank waits for it.
            waits=self._where.phase is RunPhase.REDUCE or any(in_collective(one) for one in threads),
            place=user_frame(self._trainer),
            collective=last_collective(),
            stacks=all_stacks(),
        )

    def _end(self) -> None:
        """Reports, judges or waits for who does, and leaves."""
        own, first = self._report(), True
        with suppress(RuntimeError):
            self._board.report(own)
            first = self._board.request_reports()
        error = None if first else self._awaited_verdict()
        if error is None:
            verdict = self._judge(own)
            error = verdict.error
            # Whoever takes the last words shows them; the stacks are shown here, by one rank for all.
            _say(verdict.stacks if receivers() else f"{error}\n\n{verdict.stacks}")
            with suppress(RuntimeError):
                self._board.conclude(error)
                self._await_readers()
        with suppress(OSError):  # a full disk must not keep a rank that hangs
            for receiver in receivers():
                receiver(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)

    def _judge(self, own: Report) -> Diagnosis:
        """From this rank's own report, and those of the others that come in time."""
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
                error = self._board.verdict()
                if error is not None:
                    return error
                time.sleep(self._tick / 2)
        return None

    def _await_readers(self) -> None:
        """The store may be this very process's, and would end with it."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._board.readers() < self._board.world_size - 1 and time.monotonic() < deadline:
            time.sleep(self._tick / 2)


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may listen any more
        print(f"\n{printable(text)}", file=sys.stderr, flush=True)
