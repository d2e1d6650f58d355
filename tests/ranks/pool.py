"""The test's end of the pool: starts workers, hands them a function, gathers what they return.

Workers are forked from one server process (multiprocessing's `forkserver`) that has imported torch and
has no thread but its first, so that a rank costs milliseconds, also where a broken test made it necessary
to end the others. Every call gets a new world, so pools of different sizes share the same workers.
"""

import itertools
import math
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.ranks import worker
from tests.ranks.worker import Call, Failure

# What most ranks need, imported once.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.debug",  # which every call uses, and which brings torch._dynamo
    "fullshard.checkpoint.background",
    "fullshard.training.loop",
    "fullshard.training.shard",
    "fullshard.training.optimizer",
    "safetensors.torch",
    "torch.utils.serialization.config",
    "hypothesis",
    "pytest",
    "tests.ranks.preloaded",
]


def warm() -> BaseContext:
    """Returns what starts processes from the one server, which has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailed(Exception):
    """A rank died, did not answer in time, or raised what cannot be brought over to the test."""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    def answer(self, rank: int) -> bytes | Failure:
        """Waits for the answer of the worker and returns it."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join()
            return Failure(-math.inf, None, f"rank {rank} died (exit code {self.process.exitcode}).", "")


class Workers:
    """The processes behind every pool of a session."""

    def __init__(self) -> None:
        self._context = warm()
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = itertools.count()

    def pool(self, n: int, *, timeout_seconds: float = 300.0) -> "Pool":
        """A pool of `n` ranks; a call of it may take `timeout_seconds`."""
        return Pool(self, n, timeout_seconds)

    def first(self, n: int) -> list[_Worker]:
        """The first `n` workers, started where there are fewer; all of them anew where one is dead."""
        if not all(one.process.is_alive() for one in self._workers):
            self._end()
        while len(self._workers) < n:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=worker.serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        return self._workers[:n]

    def new_store(self) -> str:
        """A path for the rendezvous of one call."""
        return str(Path(self._directory.name, f"store-{next(self._calls)}"))

    def close(self) -> None:
        """Ends the processes, and removes what they left."""
        self._end()
        self._directory.cleanup()

    def _end(self) -> None:
        for one in self._workers:
            one.process.kill()
            one.process.join()
            one.process.close()
            one.connection.close()
        self._workers.clear()


@dataclass(frozen=True)
class Pool:
    """`n` ranks. Made by `Workers.pool`."""

    workers: Workers
    n: int
    timeout_seconds: float

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank; its results by rank.

        Raises what the rank that failed first raised (with its traceback as a note), or RankFailed. Ranks
        that hang are ended, and started anew by the next call.
        """
        payload = pickle.dumps((function, args))
        chosen, store = self.workers.first(self.n), self.workers.new_store()
        for rank, one in enumerate(chosen):
            call = Call(payload, rank, self.n, store, self.timeout_seconds)
            one.connection.send_bytes(pickle.dumps(call))
        answers = self._gather(chosen)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if failures:
            rank = min(failures, key=lambda rank: failures[rank].at)
            raise _error(failures[rank], rank)
        return [pickle.loads(answers[rank]) for rank in range(self.n)]

    def _gather(self, chosen: list[_Worker]) -> dict[int, Any]:
        """Every rank's answer: its pickled result, or a Failure."""
        waiting = {one.connection: rank for rank, one in enumerate(chosen)}
        deadline = time.monotonic() + self.timeout_seconds
        answers: dict[int, bytes | Failure] = {}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = chosen[rank].answer(rank)
                if isinstance(answers[rank], Failure):
                    deadline = min(deadline, time.monotonic() + worker.GRACE_SECONDS)
        for rank in waiting.values():
            chosen[rank].process.kill()
            chosen[rank].process.join()
            summary = f"rank {rank} did not answer within {self.timeout_seconds:g} s."
            answers[rank] = Failure(math.inf, None, summary, "")
        return answers


def _error(failure: Failure, rank: int) -> BaseException:
    error = RankFailed(failure.summary) if failure.error is None else pickle.loads(failure.error)
    error.add_note(f"on rank {rank}:\n{failure.trace}")
    return error
