"""Measures an operation with the inputs of many ranks, in a process of its own."""

import gc
import math
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, log2
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np

MOST_SECONDS, ENOUGH_SECONDS = 20, 1.5
"""Processor seconds, with the preparation, at which a measurement is given up, and no larger one is made."""


@dataclass(frozen=True)
class Row:
    """An operation at a number of ranks. The seconds are processor seconds of one process.

    amount, unit: what else grows, and its unit
    most_seconds, most_amount: limits
    problem: why the result is wrong whatever its figures are, or ""
    """

    operation: str
    ranks: int
    seconds: float = 0.0
    amount: float = 0.0
    unit: str = "B"
    most_seconds: float = inf
    most_amount: float = inf
    is_derived: bool = False
    problem: str = ""

    @property
    def is_within_limits(self) -> bool:
        return not self.problem and self.seconds <= self.most_seconds and self.amount <= self.most_amount

    def cells(self) -> tuple[str, ...]:
        """Returns the texts of the columns."""
        star = "*" if self.is_derived else ""
        seconds = f"{self.seconds:,.3f}" if self.seconds < 10 else f"{self.seconds:,.0f}"
        limits = [f"{self.most_seconds:g} s"] if self.most_seconds < inf else []
        limits += [decimal_text(self.most_amount, self.unit)] if self.most_amount < inf else []
        amount = decimal_text(self.amount, self.unit) + star if self.amount else ""
        cpu = seconds + star if self.seconds or not self.amount else ""
        ok = ("yes" if limits else "") if self.is_within_limits else "NO"
        return self.operation, f"{self.ranks:,}", cpu, amount, ", ".join(limits), ok


@dataclass(frozen=True)
class Case:
    """Rows of one measurement, which grows with ranks and with `parts`.

    measure: returns the rows of (ranks, parts), without scaling
    parts: number of parts of the whole: tensors, blocks, kept checkpoints; the measurement begins at `least`
    is_isolated: whether it runs in a forked process; it has the process groups and stores of none other
    """

    name: str
    measure: Callable[[int, int], list[Row]]
    parts: int = 1
    least: int = 1
    is_isolated: bool = True

    def rows(self, ranks: int) -> list[Row]:
        """Measures with more and more parts, and derives the figures of all from the last measurement."""
        if not self.is_isolated:
            return self.measure(ranks, self.parts)
        parts = self.least
        rows, used = in_child(self.measure, ranks, parts)
        while parts < self.parts and used < ENOUGH_SECONDS:
            parts = min(4 * parts, self.parts)
            rows, used = in_child(self.measure, ranks, parts)
        if parts == self.parts or max(one.seconds for one in rows) == inf:
            return rows
        by = self.parts / parts
        return [replace(o, seconds=by * o.seconds, amount=by * o.amount, is_derived=True) for o in rows]


def in_child(measure: Callable[[int, int], list[Row]], ranks: int, parts: int) -> tuple[list[Row], float]:
    """Returns `measure(ranks, parts)` of a forked process, and all of its processor seconds."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_send_rows, args=(theirs, measure, ranks, parts))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        child.join()
        is_over = child.exitcode == -signal.SIGXCPU
        problem = f"given up after {MOST_SECONDS} processor seconds" if is_over else "failed: see above"
        return [Row(measure.__name__.replace("_", " "), ranks, seconds=inf, problem=problem)], inf
    finally:
        child.kill()
        child.join()


def _send_rows(to: Connection, measure: Callable[[int, int], list[Row]], ranks: int, parts: int) -> None:
    before = time.process_time()
    most = MOST_SECONDS + math.ceil(before)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    rows = measure(ranks, parts)
    to.send((rows, time.process_time() - before))


@contextmanager
def measured() -> Generator[SimpleNamespace]:
    """Context that measures processor `seconds`, `wall` seconds, and `peak` bytes above those at its begin.

    Without garbage collection, as in the training loop.
    """
    gc.collect()
    gc.disable()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    found = SimpleNamespace()
    before, cpu, wall = _memory_bytes("VmRSS"), time.process_time(), time.perf_counter()
    yield found
    found.seconds, found.wall = time.process_time() - cpu, time.perf_counter() - wall
    found.peak = max(_memory_bytes("VmHWM") - before, 0)
    gc.enable()


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def decimal_text(amount: float, unit: str) -> str:
    """Returns an amount with a decimal prefix: `1.83 GB`, `537 M requests`."""
    if unit != "B":
        scales = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
        size, prefix = next(((s, p) for s, p in scales if amount >= s), (1.0, ""))
        return f"{amount / size:.3g}{prefix} {unit}"
    size, prefix = next(((s, p) for s, p in ((1e9, "G"), (1e6, "M")) if amount >= s), (1e3, "k"))
    return f"{amount / size:.3g} {prefix}B"


def fit_growth(counts: dict[int, float]) -> Callable[[int], float]:
    """Returns the simplest sum of N, N log N and N² that is within 3 % of all counts by ranks."""
    shapes: list[Callable[[float], float]] = [lambda n: n, lambda n: n * log2(n), lambda n: n * n]
    best: tuple[float, Callable[[int], float]] = (inf, float)
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        table = np.array([[shapes[i](n) / count for i in chosen] for n, count in counts.items()])
        factors = np.linalg.lstsq(table, np.ones(len(counts)), rcond=None)[0]
        error = float(abs(table @ factors - 1).max())
        if min(factors) >= 0 and error < best[0] / 2 and best[0] > 0.03:
            pairs = list(zip(chosen, map(float, factors), strict=True))
            best = error, lambda n, pairs=pairs: sum(factor * shapes[i](n) for i, factor in pairs)
    return best[1]
