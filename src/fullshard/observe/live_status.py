"""Writes the state of a run to `live.json` from a thread on rank 0."""

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Lock, Thread

from fullshard.observe.progress import RunProgress, StepMetrics
from fullshard.spec.records.live_status import MOST_RANKS, HeldUp, LiveStatus, RankStatus
from fullshard.spec.records.run_files import LIVE
from fullshard.spec.run import Run
from fullshard.survival.phase import PhaseTracker
from fullshard.system.files import atomic_replace_context

INTERVAL_SECONDS = 2.0


class LiveStatusWriter:
    """Replaces `<run.dir>/live.json` every INTERVAL_SECONDS.

    The training thread only stores figures; another thread writes the files, so that a slow file system
    delays no step. A failed write is reported once, by `take_message`: the run does not depend on it.

    where: phase of this rank, and the heartbeats of all ranks as long as a watchdog runs
    """

    def __init__(self, run: Run, *, world_size: int, attempt: int, where: PhaseTracker) -> None:
        self._run, self._world_size, self._attempt, self._where = run, world_size, attempt, where
        where.heartbeats = {}
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._lock = Lock()  # guards all that follows
        self._progress = RunProgress(steps=run.train.step_count, world_size=world_size)
        self._figures: Mapping[str, float] = {}
        self._step = self._tokens = self._steps = 0
        self._saved: tuple[int, datetime] | None = None
        self._held_up: dict[tuple[int, str], float] = {}
        self._memory: Mapping[int, Mapping[str, float]] = {}
        self._message: str | None = None
        self._failed: set[Path] = set()
        self._stopped = Event()
        self._thread = Thread(target=self._write_until_stopped, name="fullshard live status", daemon=True)
        self._thread.start()

    def note_step(self, metrics: StepMetrics, *, figures: Mapping[str, float]) -> None:
        """Notes a finished step. `figures`: the values of its line in metrics.jsonl."""
        with self._lock:
            self._progress.add_step(metrics)
            self._step, self._figures = metrics.step, figures
            self._tokens += metrics.tokens
            self._steps += 1

    def note_event(self, event: str, *, step: int | None, details: Mapping[str, object]) -> None:
        """Notes an event of the run: see `fullshard.spec.records.event.RunEvent`."""
        with self._lock:
            if event == "save" and step is not None:
                self._saved = (step, datetime.now(UTC))
            elif event in ("straggler", "straggler_over"):
                rank, seconds = details["rank"], details.get("seconds")
                assert isinstance(rank, int), "the observer writes it"
                key = (rank, str(details["cause"]))
                self._held_up.pop(key, None)
                if event == "straggler":
                    self._held_up[key] = float(seconds) if isinstance(seconds, int | float) else 0.0

    def note_memory(self, by_rank: Mapping[int, Mapping[str, float]]) -> None:
        """Notes the figures of the ranks' memory."""
        with self._lock:
            self._memory = by_rank

    def take_message(self) -> str | None:
        """Returns the message about a failed write, once; None if no write has failed since."""
        with self._lock:
            message, self._message = self._message, None
        return message

    def close(self) -> None:
        """Writes the last state. Waits for at most a few seconds, if the file system does not answer."""
        self._stopped.set()
        self._thread.join(2 * INTERVAL_SECONDS)

    def _write_until_stopped(self) -> None:
        stopped = False
        while not stopped:
            stopped = self._stopped.wait(INTERVAL_SECONDS)
            status = self._make_status(running=not stopped)
            self._replace(Path(self._run.run.dir, LIVE), status.model_dump_json() + "\n")

    def _replace(self, path: Path, text: str) -> None:
        """Replaces the file atomically. It is not flushed to the disk: after a power cut, it is of no use."""
        try:
            draft = path.with_name(f".{path.name}.draft")
            with atomic_replace_context(path, draft=draft) as new:
                new.write_text(text, encoding="utf-8")
        except OSError as error:
            with self._lock:
                if path not in self._failed:
                    self._failed.add(path)
                    self._message = f"{path} cannot be written: {error.strerror}; the run does not need it"

    def _make_status(self, *, running: bool) -> LiveStatus:
        with self._lock:
            ranks = self._list_ranks(self._memory)
            has_steps = self._steps > 0
            return LiveStatus(
                at=datetime.now(UTC),
                interval_seconds=INTERVAL_SECONDS,
                running=running,
                process=self._process,
                attempt=self._attempt,
                world_size=self._world_size,
                step=self._step or self._where.step,
                steps=self._run.train.step_count,
                figures={name: _finite_or_none(value) for name, value in self._figures.items()},
                tokens_per_second=self._progress.recent_tokens_per_second if has_steps else None,
                seconds_left=max(0.0, self._progress.seconds_left) if has_steps else None,
                tokens=self._tokens,
                saved_step=None if self._saved is None else self._saved[0],
                saved_at=None if self._saved is None else self._saved[1],
                stragglers=tuple(
                    HeldUp(rank=rank, cause=cause, seconds=seconds)
                    for (rank, cause), seconds in self._held_up.items()
                ),
                phases=Counter(one.phase for one in ranks),
                ranks=tuple(_choose_listed(ranks)),
            )

    def _list_ranks(self, memory: Mapping[int, Mapping[str, float]]) -> list[RankStatus]:
        """Returns the state of each rank that is known: without a watchdog, only that of this one."""
        now, heartbeats = time.time(), self._where.heartbeats
        if not heartbeats:
            own = RankStatus(
                rank=0,
                host=socket.gethostname(),
                process=os.getpid(),
                step=self._where.step,
                phase=str(self._where.phase),
                memory=dict(memory.get(0, {})),
            )
            return [own]
        return [
            RankStatus(
                rank=rank,
                host=one.host.partition(" ")[0],
                process=one.process,
                step=one.step,
                phase=one.phase,
                seconds_in_phase=max(0.0, one.unmoved_seconds + now - one.at),
                memory=dict(memory.get(rank, {})),
            )
            for rank, one in sorted(heartbeats.items())
        ]


def _choose_listed(ranks: list[RankStatus]) -> list[RankStatus]:
    if len(ranks) <= MOST_RANKS:
        return ranks
    longest = sorted(ranks, key=lambda one: (one.step, -one.seconds_in_phase))[:MOST_RANKS]
    return sorted(longest, key=lambda one: one.rank)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
