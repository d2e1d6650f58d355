"""Compares the ranks once per window of steps: names those that hold the others up, and gathers their memory.

[Note: the test of a straggler]
In synchronous training, all ranks take equally long: what differs is their own time (see [Note: own seconds]
in `distributed/ranges.py`). Rank r holds the others up by cause c if

    low(r, c) - m  >  max(FLOOR_SECONDS, SHARE · step)        it is worth a message
    low(r, c) - m  >  SCORE · (spread + NOISE_SECONDS)        it stands out
    low(r, c)      >  the median of each other rank           it is one rank, not half of them

where low is the lower quartile over the steps of the window, m the median over the other ranks' medians, and
spread a robust standard deviation of the others. So the rank is slower in three of four steps. Its cause is
the one with the largest excess.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fullshard.distributed.agreement import world_size
from fullshard.distributed.ranges import OwnWorkClock, OwnWorkSeconds
from fullshard.observe.memory import MEMORY_FIGURES
from fullshard.observe.run_log import RunLog
from fullshard.quantities import format_seconds
from fullshard.spec.records.step_spans import ProfiledStep
from fullshard.survival.phase import RunPhase
from fullshard.torch_private.groups import has_backend

FLOOR_SECONDS, SHARE, SCORE, NOISE_SECONDS = 0.030, 0.01, 4.0, 0.004
_LEAST_STEPS = 3
LEAST_WINDOW, MOST_WINDOW = 4, 50
MOST_LISTED_RANKS = 512
"""Ranks up to which metrics.jsonl lists the own seconds of each."""


class StragglerCause(StrEnum):
    """Work of a rank while the others wait for it. The first five are phases of a run."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SAVING = "saving"
    GARBAGE = "garbage collection"


_COMPUTING = {
    StragglerCause.FORWARD: (RunPhase.FORWARD,),
    StragglerCause.BACKWARD: (RunPhase.BACKWARD,),
    StragglerCause.OPTIMIZER: (RunPhase.REDUCE, RunPhase.OPTIMIZER),
}
_DEVICE_WORK = {
    StragglerCause.FORWARD: ("forward",),
    StragglerCause.BACKWARD: ("backward",),
    StragglerCause.OPTIMIZER: ("norm", "update"),
}
# Saves are rare: the last few are compared, as soon as there are enough.
_SAVES, _LEAST_SAVES = 5, 3

Windows: TypeAlias = NDArray[np.float64]
"""Figures of each rank over a window, (ranks, 3 + 3 · causes): its number of steps; medians of a step's
seconds and of those that it waited; lower quartile, median and upper quartile of its own seconds by cause."""
_STEPS, _STEP_SECONDS, _WAITING_SECONDS, _OWN = 0, 1, 2, slice(3, None)

_Gathering: TypeAlias = tuple[int, torch.Tensor, dist.Work | None]  # last step, figures of each rank


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up.

    seconds: time per step by which it is slower than the other ranks
    share: that part of a step
    """

    rank: int
    cause: StragglerCause
    seconds: float
    share: float


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (lower quartile, median, upper quartile); of under four values (least, median, greatest)."""
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) < _LEAST_STEPS + 1:
        return min(values), median(values), max(values)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def find_stragglers(windows: Windows) -> list[Straggler]:
    """Returns the ranks that hold the others up, with the largest cause of each, in the order of ranks.

    windows: of all ranks; under 3 steps name nobody. See [Note: the test of a straggler].
    """
    if len(windows) < 2 or windows[:, _STEPS].min() < _LEAST_STEPS:
        return []
    step = float(np.median(windows[:, _STEP_SECONDS]))
    largest: dict[int, tuple[float, StragglerCause]] = {}
    for cause, figures in zip(StragglerCause, windows[:, _OWN].T.reshape(-1, 3, len(windows)), strict=True):
        if (found := _find_outlier(figures, step=step)) is not None:
            rank, excess = found
            largest[rank] = max(largest.get(rank, (0.0, cause)), (excess, cause))
    return [
        Straggler(rank, cause, excess, excess / step if step else 0.0)
        for rank, (excess, cause) in sorted(largest.items())
    ]


def _find_outlier(figures: Windows, *, step: float) -> tuple[int, float] | None:
    """Returns (rank, seconds) of the rank whose figures of one cause stand out, if one does.

    figures: (lower quartile, median, upper quartile) × ranks
    """
    low, middle, high = figures
    rank = int(middle.argmax())  # only its lower quartile can exceed the medians of all others
    others = np.delete(middle, rank)
    if low[rank] <= others.max():
        return None
    typical = np.median(others)
    between = 1.4826 * np.median(np.abs(others - typical))
    spread = max(between, np.median(np.delete(high - low, rank)) / 1.349)
    excess = float(low[rank] - typical)
    stands_out = excess > max(FLOOR_SECONDS, SHARE * step, SCORE * (spread + NOISE_SECONDS))
    return (rank, excess) if stands_out else None


def data_seconds_without_lead(own: OwnWorkSeconds) -> float:
    """Returns the time for data in a step on a GPU, without that by which the host was ahead of it."""
    lead = own.by_phase.get(RunPhase.BETWEEN_STEPS, 0.0)  # waits for the step before
    return max(own.by_phase.get(RunPhase.DATA, 0.0) - lead, 0.0)


class StragglerWatch:
    """Gathers the seconds and memory of each rank once per window, and judges them a step later. Collective.

    clock: of this rank's own seconds
    device: of the ranks

    On a GPU, the host's time in forward and backward says nothing, so the kernels of the last profiled step
    count, and of the time for data `data_seconds_without_lead`. The gathering runs beside the next step: no
    rank waits for it. All ranks judge alike.
    """

    def __init__(self, clock: OwnWorkClock, *, log: RunLog, device: torch.device) -> None:
        self.every = min(max(log.every, LEAST_WINDOW), MOST_WINDOW)
        self._clock, self._log, self._is_on_host = clock, log, device.type == "cpu"
        self._recent: deque[tuple[float, OwnWorkSeconds]] = deque(maxlen=self.every)
        self._saves: deque[float] = deque(maxlen=_SAVES)
        self._has_new_save, self._profiled = False, dict[str, float]()
        self._gathering: _Gathering | None = None
        self._is_active = world_size() > 1 and has_backend("cpu")
        self._held_up: set[tuple[int, StragglerCause]] = set()
        self._since = time.perf_counter()

    def observe_step(
        self, step: int, *, memory: Mapping[str, float] | None = None
    ) -> tuple[Straggler, ...] | None:
        """Observes a step that was run. Returns the stragglers of a window one step after its end, else None.

        memory: of this rank after the step, by the names MEMORY_FIGURES
        """
        now, taken = time.perf_counter(), self._clock.take_seconds()
        self._recent.append((now - self._since, taken))
        self._since = now
        if RunPhase.SAVING in taken.by_phase:
            self._saves.append(taken.by_phase[RunPhase.SAVING])
            self._has_new_save = True
        if not self._is_active:
            return None
        named = None if self._gathering is None else self._find_and_record_stragglers(self._gathering)
        self._gathering = None
        if step % self.every == 0:
            own_memory = [(memory or {}).get(name, math.nan) for name in MEMORY_FIGURES]
            own = torch.tensor([*own_memory, *self._own_window()], dtype=torch.float64, device="cpu")
            # A sum of rows that other ranks leave at zero: an all-gather would make a tensor for each rank.
            every = torch.zeros(world_size(), len(own), dtype=torch.float64, device="cpu")
            every[dist.get_rank()] = own
            self._gathering = (step, every, dist.all_reduce(every, async_op=True))
            self._has_new_save, self._profiled = False, {}
        return named

    def note_device_seconds(self, step: ProfiledStep) -> None:
        """Notes the GPU's seconds in a profiled step, for the present window. On the CPU, notes nothing."""
        self._profiled = {} if self._is_on_host else step.seconds_by_name_on_compute_track()

    def drop_window_steps(self) -> None:
        """Drops the steps of the present window, because the run repeats steps. Saves still count."""
        self._recent.clear()

    def _own_window(self) -> list[float]:
        """Returns this rank's row of `Windows`."""
        owns = [own for _, own in self._recent]
        causes = {StragglerCause.DATA: (RunPhase.DATA,)} | (_COMPUTING if self._is_on_host else {})
        figures = {
            cause: quartiles([sum(one.by_phase.get(phase, 0.0) for phase in phases) for one in owns])
            for cause, phases in causes.items()
        }
        if not self._is_on_host:
            figures[StragglerCause.DATA] = quartiles([data_seconds_without_lead(one) for one in owns])
        if self._profiled:
            figures |= {
                cause: quartiles([sum(self._profiled.get(name, 0.0) for name in names)])
                for cause, names in _DEVICE_WORK.items()
            }
        figures[StragglerCause.GARBAGE] = quartiles([one.garbage for one in owns])
        if self._has_new_save and len(self._saves) >= _LEAST_SAVES:
            figures[StragglerCause.SAVING] = quartiles(self._saves)
        every_step, waiting = [seconds for seconds, _ in self._recent], [one.waiting for one in owns]
        own = [value for cause in StragglerCause for value in figures.get(cause, (0.0, 0.0, 0.0))]
        return [len(owns), median(every_step), median(waiting), *own]

    def _find_and_record_stragglers(self, gathering: _Gathering) -> tuple[Straggler, ...]:
        """Returns the stragglers of a window. Records its figures, and which stragglers are new or over."""
        last_step, figures, work = gathering
        if work is not None:
            work.wait()
        rows: Windows = figures.t().contiguous().t().numpy()  # each figure's values lie side by side
        windows, memory = rows[:, len(MEMORY_FIGURES) :], rows[:, : len(MEMORY_FIGURES)].max(axis=0).tolist()
        stragglers, waiting = find_stragglers(windows), float(np.median(windows[:, _WAITING_SECONDS]))
        own = windows[:, _OWN][:, 1::3].sum(axis=1)  # the sums of the medians
        pairs = zip(MEMORY_FIGURES, memory, strict=True)
        most = {f"{name}_most": value for name, value in pairs if not math.isnan(value)}
        recorded: dict[str, object] = {**most, "waiting_seconds": round(waiting, 6)}
        if len(own) <= MOST_LISTED_RANKS:
            recorded["own_seconds"] = own.round(6).tolist()
        tracked = {**most, "waiting_seconds": waiting, "own_seconds_most": float(own.max())}
        for one in stragglers:
            tracked |= {"straggler_rank": one.rank, f"straggler_seconds/{one.cause}": one.seconds}
        self._log.add_window_to_next_step(recorded, tracked=tracked)
        before, first = self._held_up, last_step - self.every + 1
        self._held_up = {(one.rank, one.cause) for one in stragglers}
        for rank, cause in sorted(before - self._held_up):
            self._log.record_event("straggler_over", step=first, details={"rank": rank, "cause": cause})
        for one in stragglers:
            if (one.rank, one.cause) not in before:
                per_step = f"{format_seconds(one.seconds)} per step ({100 * one.share:.0f} %)"
                self._log.print_message(
                    f"step {last_step}: rank {one.rank} holds the others up: {one.cause}, {per_step}"
                )
                details = {"rank": one.rank, "cause": one.cause, "from_step": first}
                details |= {"seconds": one.seconds, "share": one.share}
                self._log.record_event("straggler", step=last_step, details=details)
        return tuple(stragglers)
