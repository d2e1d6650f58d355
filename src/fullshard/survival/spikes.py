"""Detection of spikes: steps whose loss or gradient norm x stands out from earlier steps.

    x > mean + sigma · max(deviation, MIN_RELATIVE_STD · |mean|)

The mean and the deviation are over the last `spike_window` steps that were not skipped. No step is judged
before half of the window is filled. OLMo-core's SkipStepOptimizer skips steps by the same kind of test (a
rolling window of 128, 6 sigma).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from fullshard.spec.fault_tolerance_section import FaultToleranceSection

MIN_RELATIVE_STD = 1e-3
"""Least relative deviation that the test assumes; otherwise any rise of a flat curve would be a spike."""


@dataclass
class RecentSteps:
    """Losses and gradient norms of the last steps that were not skipped.

    They are part of the training state, so a resumed run judges steps as the uninterrupted run would.
    """

    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])

    def is_spike(self, loss: float, norm: float, *, section: FaultToleranceSection) -> bool:
        """Returns whether a step with this loss and norm is a spike, if `on_spike` asks for the test."""
        if section.on_spike == "none" or len(self.losses) < section.spike_window // 2:
            return False
        return any(
            new > _spike_threshold(before, sigma=section.spike_sigma)
            for new, before in ((loss, self.losses), (norm, self.norms))
        )

    def add_step(self, loss: float, norm: float, *, section: FaultToleranceSection) -> None:
        if section.on_spike == "none":
            return
        for values, new in ((self.losses, loss), (self.norms, norm)):
            values.append(new)
            del values[: -section.spike_window]


def _spike_threshold(before: Sequence[float], *, sigma: float) -> float:
    mean = fmean(before)
    return mean + sigma * max(pstdev(before, mean), MIN_RELATIVE_STD * abs(mean))
