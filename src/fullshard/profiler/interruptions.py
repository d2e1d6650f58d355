"""Interruptions of a rank: garbage collections, and pauses in which nothing of the process ran."""

import gc
import os
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

TICK_SECONDS = 0.05
_LEAST_PAUSE_NS = 20_000_000


class Interruptions:
    """Context that notes garbage collections and pauses of this process, which the calling thread trains.

    A thread wakes up every TICK_SECONDS. If it is late by more than the time in which it or the training
    thread was runnable or computed, nothing ran: the process was stopped (SIGSTOP), or its host was. A pause
    is noted as shorter than it was by up to a tick.
    """

    def __init__(self) -> None:
        self._collections: list[tuple[int, int]] = []
        self._pauses: list[tuple[int, int]] = []
        self._collecting_since = 0
        self._has_ended = False
        self._trainer = threading.get_native_id()
        self._ticker = threading.Thread(target=self._tick, name="fullshard pauses", daemon=True)

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note_collection)
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended = True
        with suppress(ValueError):
            gc.callbacks.remove(self._note_collection)
        self._ticker.join()

    def take(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns (collections, pauses) since the last call, each as (begin, end) in ns."""
        collections, self._collections = self._collections, []
        pauses, self._pauses = self._pauses, []
        return collections, pauses

    def _note_collection(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter_ns()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collections.append((self._collecting_since, now))

    def _tick(self) -> None:
        try:
            files = [os.open(f"/proc/self/task/{self._trainer}/schedstat", os.O_RDONLY)]
            files.append(os.open("/proc/thread-self/schedstat", os.O_RDONLY))
        except OSError:  # not Linux: a pause looks like a busy machine
            return
        last, busy = time.perf_counter_ns(), _explained_ns(*files)
        while not self._has_ended:
            time.sleep(TICK_SECONDS)  # less processor time than waiting for an Event
            now, busy_now = time.perf_counter_ns(), _explained_ns(*files)
            late = now - last - round(TICK_SECONDS * 1e9) - (busy_now - busy)
            if late > _LEAST_PAUSE_NS:
                self._pauses.append((now - late, now))
            last, busy = now, busy_now
        for file in files:
            os.close(file)


def _explained_ns(trainer: int, own: int) -> int:
    """Returns the ns in which the trainer computed, or it or the ticker was runnable without a core."""
    computed, queued, *_ = os.pread(trainer, 64, 0).split()
    return int(computed) + int(queued) + int(os.pread(own, 64, 0).split()[1])
