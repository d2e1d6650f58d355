"""Names the ranks that hold the others up, and why, from what each rank measured over a window of steps.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, quantiles

FLOOR_SECONDS, SHARE, SCORE, NOISE_SECONDS = 0.030, 0.01, 4.0, 0.004
_LEAST_STEPS = 3
_PER_CAUSE = 3


class StragglerCause(StrEnum):
    """Work of a rank while the others wait for it. The first five are phases of a run."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    SAVING = "saving"
    GARBAGE = "garbage collection"


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


def spread_figures(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns (lower quartile, median, upper quartile); of fewer than four values the extremes."""
    if not values:
        return 0.0, 0.0, 0.0
    if len(values) < _LEAST_STEPS + 1:
        return min(values), median(values), max(values)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def find_stragglers(windows: Sequence[RankWindow]) -> list[Straggler]:
    """Returns the ranks that hold the others up, with the largest cause of each, in the order of ranks.

    windows: of all ranks. See [Note: the test of a straggler].
    """
    if len(windows) < 2 or min(one.steps for one in windows) < _LEAST_STEPS:
        return []
    step = median(one.step_seconds for one in windows)
    largest: dict[int, tuple[float, StragglerCause]] = {}
    for cause in StragglerCause:
        for rank, excess in _excesses([one.own[cause] for one in windows], step=step):
            largest[rank] = max(largest.get(rank, (0.0, cause)), (excess, cause))
    return [
        Straggler(rank, cause, excess, excess / step if step else 0.0)
        for rank, (excess, cause) in sorted(largest.items())
    ]


def _excesses(figures: Sequence[tuple[float, float, float]], *, step: float) -> Iterable[tuple[int, float]]:
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
