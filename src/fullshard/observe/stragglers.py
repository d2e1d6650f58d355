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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles
from typing import TypeAlias

import torch
import torch.distributed as dist

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
_PER_CAUSE = 3
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

_Gathering: TypeAlias = tuple[int, list[torch.Tensor], dist.Work | None]  # last step, figures of each rank


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


@dataclass(frozen=True)
class RankWindow:
    """Figures of one rank over a window, in seconds per step.

    steps: number of its steps
    step_seconds, waiting_seconds: medians
    own: cause -> (lower quartile, median, upper quartile)
    """

    steps: int
    step_seconds: float
    waiting_seconds: float
    own: Mapping[StragglerCause, tuple[float, float, float]]

    @property
    def own_seconds(self) -> float:
        """The rank's own time of a step: the sum of its medians."""
        return sum(middle for _, middle, _ in self.own.values())

    def to_figures(self) -> list[float]:
        """Returns the window as numbers, for the other ranks."""
        own = [value for cause in StragglerCause for value in self.own.get(cause, (0.0,) * _PER_CAUSE)]
        return [float(self.steps), self.step_seconds, self.waiting_seconds, *own]

    @classmethod
    def from_figures(cls, figures: Sequence[float]) -> "RankWindow":
        """Returns the window whose `to_figures` are these."""
        steps, step_seconds, waiting_seconds, *rest = figures
        own = {
            cause: (rest[i], rest[i + 1], rest[i + 2])
            for cause, i in zip(StragglerCause, range(0, len(rest), _PER_CAUSE), strict=True)
        }
        return cls(int(steps), step_seconds, waiting_seconds, own)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (lower quartile, median, upper quartile); of under four values (least, median, greatest)."""
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) < _LEAST_STEPS + 1:
        return min(values), median(values), max(values)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def find_stragglers(windows: Sequence[RankWindow]) -> list[Straggler]:
    """Returns the ranks that hold the others up, with the largest cause of each, in the order of ranks.

    windows: of all ranks; under 3 steps name nobody. See [Note: the test of a straggler].
    """
    if len(windows) < 2 or min(one.steps for one in windows) < _LEAST_STEPS:
        return []
    step = median(one.step_seconds for one in windows)
    largest: dict[int, tuple[float, StragglerCause]] = {}
    for cause in StragglerCause:
        for rank, excess in _outliers([one.own[cause] for one in windows], step=step):
            largest[rank] = max(largest.get(rank, (0.0, cause)), (excess, cause))
    return [
        Straggler(rank, cause, excess, excess / step if step else 0.0)
        for rank, (excess, cause) in sorted(largest.items())
    ]


def _outliers(figures: Sequence[tuple[float, float, float]], *, step: float) -> Iterable[tuple[int, float]]:
    """Yields (rank, seconds) of the ranks whose figures of one cause stand out."""
    medians = [middle for _, middle, _ in figures]
    highest, second = sorted(medians)[-1], sorted(medians)[-2]
    for rank, (low, middle, _) in enumerate(figures):
        if low <= (second if middle == highest else highest):
            continue
        others = [one for index, one in enumerate(medians) if index != rank]
        widths = [high - below for index, (below, _, high) in enumerate(figures) if index != rank]
        typical = median(others)
        between = 1.4826 * median(abs(one - typical) for one in others)
        excess, spread = low - typical, max(between, median(widths) / 1.349)
        if excess > max(FLOOR_SECONDS, SHARE * step, SCORE * (spread + NOISE_SECONDS)):
            yield rank, excess


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
        now, own = time.perf_counter(), self._clock.take_seconds()
        self._recent.append((now - self._since, own))
        self._since = now
        if RunPhase.SAVING in own.by_phase:
            self._saves.append(own.by_phase[RunPhase.SAVING])
            self._has_new_save = True
        if not self._is_active:
            return None
        named = None if self._gathering is None else self._find_and_record_stragglers(self._gathering)
        self._gathering = None
        if step % self.every == 0:
            own_memory = [(memory or {}).get(name, math.nan) for name in MEMORY_FIGURES]
            figures = torch.tensor(
                [*own_memory, *self._own_window().to_figures()], dtype=torch.float64, device="cpu"
            )
            every = [torch.empty_like(figures) for _ in range(world_size())]
            self._gathering = (step, every, dist.all_gather(every, figures, async_op=True))
            self._has_new_save, self._profiled = False, {}
        return named

    def note_device_seconds(self, step: ProfiledStep) -> None:
        """Notes the GPU's seconds in a profiled step, for the present window. On the CPU, notes nothing."""
        self._profiled = {} if self._is_on_host else step.seconds_by_name_on_compute_track()

    def drop_window_steps(self) -> None:
        """Drops the steps of the present window, because the run repeats steps. Saves still count."""
        self._recent.clear()

    def _own_window(self) -> RankWindow:
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
        return RankWindow(
            steps=len(owns),
            step_seconds=median([seconds for seconds, _ in self._recent]),
            waiting_seconds=median([one.waiting for one in owns]),
            own=figures,
        )

    def _find_and_record_stragglers(self, gathering: _Gathering) -> tuple[Straggler, ...]:
        """Returns the stragglers of a window. Records its figures, and which stragglers are new or over."""
        last_step, figures, work = gathering
        if work is not None:
            work.wait()
        rows = [one.tolist() for one in figures]
        windows = [RankWindow.from_figures(row[len(MEMORY_FIGURES) :]) for row in rows]
        waiting, own = median(one.waiting_seconds for one in windows), [one.own_seconds for one in windows]
        stragglers = find_stragglers(windows)
        most = {
            f"{name}_most": max(values)
            for name, values in zip(MEMORY_FIGURES, zip(*rows, strict=True), strict=False)
            if not math.isnan(sum(values))
        }
        recorded: dict[str, object] = {**most, "waiting_seconds": round(waiting, 6)}
        if len(own) <= MOST_LISTED_RANKS:
            recorded["own_seconds"] = [round(one, 6) for one in own]
        tracked = {**most, "waiting_seconds": waiting, "own_seconds_most": max(own)}
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
