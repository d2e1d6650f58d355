"""Steps whose loss or gradient norm stands out from those before.

    x > mean + sigma · max(deviation, FLAT · |mean|)

over the last `spike_window` steps that were not left out themselves, once there are half as many. OLMo-core's
SkipStepOptimizer judges likewise (a rolling 128, 6 sigma), and leaves such steps out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from fullshard.spec.run import SurvivalSection

MIN_RELATIVE_STD = 1e-3
"""A curve is taken to vary by at least this part of its mean; else on a flat one any rise stood out."""


@dataclass
class RecentSteps:
    """Losses and gradient norms of the last steps that were taken. Part of the state: a run that goes on
    judges as the run that was not stopped."""

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])

    def spikes(self, loss: float, norm: float, *, section: SurvivalSection) -> bool:
        """Whether a step of this loss or norm stands out from these."""
        if section.on_spike == "none" or len(self.losses) < section.spike_window // 2:
            return False
        return any(
            new > _threshold(before, sigma=section.spike_sigma)
            for new, before in ((loss, self.losses), (norm, self.norms))
        )

    def add(self, loss: float, norm: float, *, section: SurvivalSection) -> None:
        if section.on_spike == "none":
            return
        for values, new in ((self.losses, loss), (self.norms, norm)):
            values.append(new)
            del values[: -section.spike_window]


def _threshold(before: Sequence[float], *, sigma: float) -> float:
    mean = fmean(before)
    return mean + sigma * max(pstdev(before, mean), MIN_RELATIVE_STD * abs(mean))
