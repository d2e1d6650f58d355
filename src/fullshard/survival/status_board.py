"""Status board of the watchdogs of all ranks, in a store. At a hang, one rank reads what all have written."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fullshard.errors import TrainError
from fullshard.survival import diagnosis
from fullshard.survival.phase import Heartbeat
from fullshard.survival.store_rows import append_row, count_rows
from fullshard.torch_private.groups import find_default_store

T = TypeVar("T")

# Keys looked up in one request: the store's time for a request grows faster than its number of keys.
_KEYS = 1024


class StatusBoard:
    """Heartbeats, reports and the verdict of the ranks, in a store that all of them reach.

    Each request runs on a thread of its own, because it may never return if a link is cut. Once the store has
    not answered in time, every request raises RuntimeError, because the store's client does not recover.
    """

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, answer_seconds: float) -> None:
        self.rank, self.world_size, self._store = rank, world_size, store
        self._answer_seconds, self._lost = answer_seconds, False

    @classmethod
    def open_default(cls, *, answer_seconds: float) -> "StatusBoard":
        """Returns the board of this rank, in the store of the default process group if there is one."""
        store = find_default_store()
        rank, world_size = (0, 1) if store is None else (dist.get_rank(), dist.get_world_size())
        clone: Callable[[], dist.Store] | None = getattr(store, "clone", None)
        if store is None or world_size == 1:
            store = dist.HashStore()
        elif clone is not None:  # a connection of its own: the main thread may hold the other one's lock
            store = clone()
            store.set_timeout(timedelta(seconds=answer_seconds))
        store = dist.PrefixStore("fullshard/watchdog", store)
        return cls(store, rank=rank, world_size=world_size, answer_seconds=answer_seconds)

    def publish_heartbeat(self, seen: Heartbeat, *, is_slow: bool) -> bool:
        """Publishes this rank's position. Returns whether reports were requested.

        is_slow: whether this rank may stay in its phase for longer than usual, and others wait for it
        """

        def publish(store: dist.Store) -> bool:
            store.set(f"seen/{self.rank}", json.dumps(asdict(seen)))
            if is_slow:
                store.set("slow", str(seen.at))
            return store.check([_request_key(0)])

        return self._call_store(publish)

    def find_slow_heartbeat_time(self) -> float:
        """Returns when a rank that `is_slow` last published, in seconds since the epoch; 0 if none has."""
        return self._call_store(lambda store: float(store.get("slow")) if store.check(["slow"]) else 0.0)

    def publish_report(self, report: diagnosis.RankReport) -> None:
        row = json.dumps([self.rank, asdict(report)]) + "\n"
        self._call_store(lambda store: append_row(store, row, key="reports"))

    def count_reports(self) -> int:
        return self._call_store(lambda store: count_rows(store, "reports"))

    def read_reports(self) -> dict[int, diagnosis.RankReport]:
        """Returns all reports so far. This rank must have published its own."""
        rows = self._call_store(lambda store: store.get("reports")).decode().splitlines()
        return {
            rank: diagnosis.RankReport(**one | {"seen": Heartbeat(**one["seen"])})
            for rank, one in map(json.loads, rows)
        }

    def read_heartbeats(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Returns the last heartbeats of those of `ranks` that have published any."""
        keys = [f"seen/{rank}" for rank in ranks]
        if len(keys) > _KEYS or not self._call_store(lambda store: store.check(keys)):
            if len(keys) <= 1:
                return {}
            half = len(keys) // 2
            return self.read_heartbeats(ranks[:half]) | self.read_heartbeats(ranks[half:])
        values = self._call_store(lambda store: store.multi_get(keys))
        return {rank: Heartbeat(**json.loads(one)) for rank, one in zip(ranks, values, strict=True)}

    def request_reports_and_return_if_first(self, attempt: int) -> bool:
        """Asks all ranks for their reports. Returns whether this rank is the first to ask in `attempt`."""
        return self._call_store(lambda store: store.add(_request_key(attempt), 1)) == 1

    def publish_verdict(self, verdict: diagnosis.Diagnosis) -> None:
        error = verdict.error
        words = {"what": error.what, "got": error.got, "why": error.why, "fix": error.fix}
        self._call_store(lambda store: store.set("verdict", json.dumps([words, *verdict.shown])))

    def wait_for_verdict_and_count_reader(self, seconds: float) -> diagnosis.Diagnosis | None:
        """Returns the verdict, and counts this rank among its readers; None if none comes in `seconds`."""

        def wait(store: dist.Store) -> diagnosis.Diagnosis | None:
            try:
                store.wait(["verdict"], timedelta(seconds=seconds))
            except RuntimeError:  # the time is over, or the store has gone, and the next line raises, too
                if not store.check(["verdict"]):
                    return None
            words, *shown = json.loads(store.get("verdict"))
            store.add("read", 1)
            return diagnosis.Diagnosis(TrainError(words.pop("what"), **words), shown)

        return self._call_store(wait, pause_seconds=seconds)

    def count_verdict_readers(self) -> int:
        return self._call_store(lambda store: store.add("read", 0))

    def _call_store(self, act: Callable[[dist.Store], T], *, pause_seconds: float = 0.0) -> T:
        """Returns `act(store)`, which may itself wait for `pause_seconds`. Raises RuntimeError: see above."""
        if self._lost:
            raise RuntimeError("the store has not answered before")
        answer = Future[T]()

        def call_and_set_answer() -> None:
            try:
                answer.set_result(act(self._store))
            except RuntimeError as error:
                answer.set_exception(error)

        thread = threading.Thread(target=call_and_set_answer, name="fullshard store", daemon=True)
        thread.start()
        thread.join(timeout=self._answer_seconds + pause_seconds)
        try:
            return answer.result(timeout=0)
        except (RuntimeError, TimeoutError) as error:
            self._lost = True
            raise RuntimeError("the store does not answer") from error


def _request_key(attempt: int) -> str:
    return f"called/{attempt}"
