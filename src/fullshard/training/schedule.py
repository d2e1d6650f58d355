"""The learning rate as a function of the step alone, so that resuming needs no state."""

import math

from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import ScheduleSection


def learning_rate_factor(section: ScheduleSection, *, step: int, steps: int) -> float:
    """Returns the factor that multiplies the peak learning rate in step `step` (from 0) of `steps`.

    During a warmup of w steps: (step + 1) / w. Then, with t from 0 to 1 over the remaining steps and r =
    `min_lr_ratio`:

        constant  1
        linear    1 - (1 - r) t
        cosine    r + (1 - r) (1 + cos πt) / 2             arXiv:1608.03983
        wsd       1, then linear to r over the last `decay_fraction` of all steps   arXiv:2404.06395
    """
    warmup, last = section.warmup_steps, steps - 1
    if step < warmup:
        return (step + 1) / warmup
    span = 1 - section.min_lr_ratio
    progress = _progress_fraction(step, start=warmup, last=last)
    if section.kind == "cosine":
        return section.min_lr_ratio + span * (1 + math.cos(math.pi * progress)) / 2
    if section.kind == "linear":
        return 1 - span * progress
    if section.kind == "wsd":
        start = max(warmup, last - section.decay_fraction * steps)
        return 1 - span * _progress_fraction(step, start=start, last=last)
    return 1.0


def warmup_warning(run: Run) -> str | None:
    """Returns a warning message if `run` ends before its warmup does, or None."""
    warmup, steps, peak = run.schedule.warmup_steps, run.train.step_count, run.optimizer.learning_rate
    if warmup <= steps:
        return None
    highest = peak * learning_rate_factor(run.schedule, step=steps - 1, steps=steps)
    return (
        f"schedule.warmup_steps = {warmup} is more than train.steps = {steps}: the learning rate never "
        f"reaches {peak:g}; the highest is {highest:.3g}, in the last step"
    )


def _progress_fraction(step: int, *, start: float, last: int) -> float:
    return min(1.0, max(0.0, (step - start) / (last - start))) if last > start else 0.0
