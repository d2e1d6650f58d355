"""Watches the memory of all ranks while a run trains: figures of each step, leaks, and allocator retries.

[Note: the test of a leak]
At the end of a step, gradients and activations are freed, so live bytes are the same after each step, except
after saves, validations and other rare work. The last STEPS values are cut into BLOCKS. The lowest
value of each block counts, so that memory which rare work holds for a moment does not. The growth from block
to block, d, must satisfy

    min(d)  >=  EVENNESS · mean(d)              it grows in every block, and not by one jump
    mean(d) >=  LEAST_BYTES · steps of a block  it is worth a message

A buffer that is allocated once, a cache that is filled, and a collection of garbage that frees what grew do
not pass the first line.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch
import torch.distributed as dist

from fullshard.distributed.agreement import has_backend, rank, world_size
from fullshard.observe.live_memory import LiveMemoryMeter, allocator_figures
from fullshard.observe.run_log import RunLog
from fullshard.quantities import format_bytes

BLOCKS, BLOCK_STEPS = 6, 10
STEPS = BLOCKS * BLOCK_STEPS
EVENNESS = 0.5
LEAST_BYTES = 128 << 10
SKIPPED_STEPS = 10
"""First steps of an attempt, which allocate what later ones reuse, and in which a run measures itself."""
WINDOW = 20
"""Steps between exchanges of the ranks' figures: few enough that a leak is named within 100 steps."""
_PLACES = {"host_bytes": "host memory", "allocated_bytes": "device memory"}
_FIGURES = ("host_bytes", "resident_bytes", *allocator_figures({}))


class LeakDetector:
    """Judges the live bytes of consecutive steps. See [Note: the test of a leak]."""

    def __init__(self) -> None:
        self._skipped = 0
        self._values: deque[float] = deque(maxlen=STEPS)

    def add_step(self, live_bytes: float) -> None:
        """Adds the live bytes at the end of a step."""
        if self._skipped < SKIPPED_STEPS:
            self._skipped += 1
        else:
            self._values.append(live_bytes)

    def growth_per_step(self) -> float:
        """Returns the bytes by which memory grows per step; 0 if it does not grow steadily."""
        if len(self._values) < STEPS:
            return 0.0
        values = [*self._values]
        lowest = [min(values[first : first + BLOCK_STEPS]) for first in range(0, STEPS, BLOCK_STEPS)]
        growths = [after - before for before, after in pairwise(lowest)]
        growth = fmean(growths) / BLOCK_STEPS
        is_even = min(growths) >= EVENNESS * fmean(growths)
        return growth if growth >= LEAST_BYTES and is_even else 0.0

    def forget(self) -> None:
        """Forgets the steps so far, because the run goes back to a checkpoint."""
        self._skipped = 0
        self._values.clear()


class MemoryWatch:
    """Reads the memory of this rank after each step, and compares the ranks after each WINDOW. Collective.

    The exchange runs beside the next step: no rank waits for it.

    steps: number of the run's last step
    """

    def __init__(self, device: torch.device, *, log: RunLog, steps: int) -> None:
        self._meter, self._log, self._steps = LiveMemoryMeter(device), log, steps
        self._detectors = {name: LeakDetector() for name in _PLACES}
        self._gathering: tuple[int, list[torch.Tensor], dist.Work | None] | None = None
        self._has_peers = world_size() > 1 and has_backend("cpu")
        self._named: set[tuple[int, str]] = set()
        self._retries: dict[int, float] = {}

    def observe_step(self, step: int) -> dict[str, float]:
        """Returns the figures of this rank at the end of `step`, by name, for metrics.jsonl."""
        if self._gathering is not None:
            judged, rows, work = self._gathering
            self._gathering = None
            if work is not None:
                work.wait()
            self._judge([row.tolist() for row in rows], step=judged)
        own = self._meter.read()
        for name, detector in self._detectors.items():
            if name in own:
                detector.add_step(own[name])
        if step % WINDOW == 0:
            growths = [detector.growth_per_step() for detector in self._detectors.values()]
            figures = [own.get(name, math.nan) for name in _FIGURES]
            self._exchange(torch.tensor([*figures, *growths], dtype=torch.float64), step=step)
        return own

    def forget(self) -> None:
        """Forgets the steps so far, because the run goes back to a checkpoint."""
        for detector in self._detectors.values():
            detector.forget()

    def _exchange(self, row: torch.Tensor, *, step: int) -> None:
        if not self._has_peers:
            self._gathering = (step, [row], None)
            return
        rows = [torch.empty_like(row) for _ in range(world_size())]
        work = dist.all_gather(rows, row, async_op=True)
        self._gathering = (step, rows, work)

    def _judge(self, rows: Sequence[Sequence[float]], *, step: int) -> None:
        """Records the figures of all ranks after `step`, or only of this rank without an exchange.

        rows: per rank, _FIGURES (NaN: unknown), then the growth per step of each of _PLACES
        """
        first = 0 if self._has_peers else rank()
        ranks = {first + index: dict(zip(_FIGURES, row, strict=False)) for index, row in enumerate(rows)}
        ranks = {
            number: {name: value for name, value in figures.items() if not math.isnan(value)}
            for number, figures in ranks.items()
        }
        most = {
            f"{name}_most": max(one[name] for one in ranks.values() if name in one)
            for name in dict.fromkeys(name for one in ranks.values() for name in one)
        }
        self._log.record_window(most, tracked=most)
        for (number, figures), row in zip(ranks.items(), rows, strict=True):
            for name, growth in zip(_PLACES, row[len(_FIGURES) :], strict=True):
                self._report_leak(number, name, growth=growth, step=step)
            before, now = self._retries.get(number, 0.0), figures.get("allocator_retries", 0.0)
            self._retries[number] = now
            if now > before:
                details = {"rank": number, "count": int(now - before)}
                details["reserved_bytes"] = int(figures["reserved_bytes"])
                self._log.record_event("allocator_retry", step=step, details=details)

    def _report_leak(self, number: int, name: str, *, growth: float, step: int) -> None:
        """Prints and records that a rank's memory grows; again only after the growth has stopped."""
        if growth == 0.0:
            self._named.discard((number, name))
        elif (number, name) not in self._named:
            self._named.add((number, name))
            more = format_bytes(round(growth * (self._steps - step)))
            self._log.print_message(
                f"step {step}: {_PLACES[name]} of rank {number} grows by {format_bytes(round(growth))} per "
                f"step: {more} more by the last step; something keeps tensors of each step"
            )
            details = {"rank": number, "memory": _PLACES[name], "bytes_per_step": round(growth)}
            self._log.record_event("leak", step=step, details=details)
