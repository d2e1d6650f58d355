"""The decision of a step, computed on the device: norm, clipping, and whether the step is skipped."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.errors import TrainError
from fullshard.spec.run import Run
from fullshard.survival.spikes import RecentSteps
from fullshard.training.figures import StepResult


class StepDecision(NamedTuple):
    """Decision about the update of a step, as tensors on the device.

    figures: (9,) in fp64, for `step_result`
    grad_scale: () in fp32; the update divides the gradient by it
    found_inf: () in fp32; 1 if the step is skipped, else 0
    """

    figures: Tensor
    grad_scale: Tensor
    found_inf: Tensor


@torch.no_grad()
def decide_step(
    totals: Tensor, *, nominal: float, are_ranks_equal: Tensor, recent: RecentSteps, run: Run
) -> StepDecision:
    """Returns the decision, and adds the step to `recent` unless it is skipped. Never waits for the device.

    totals: (6,) in fp64, over all ranks: loss sum, count of valid tokens, squared norm, tokens, trained
        tokens, stop requests
    are_ranks_equal: whether all ranks are in the same step; else it is skipped
    nominal: what the summed gradient was divided by, in all; see [Note: one denominator] in `step.py`
    """
    section, limit = run.fault_tolerance, run.optimizer.clip_norm
    loss_sum, count, squared, tokens, trained, stops = totals.unbind()
    counted = torch.where(count > 0, count, math.nan)  # without a valid token, nothing is finite
    mean, unscale = loss_sum / counted, nominal / counted
    norm = squared.sqrt() * unscale
    accepted = torch.isfinite(mean) & torch.isfinite(norm) & torch.isfinite(count) & are_ranks_equal
    spike = torch.zeros_like(accepted)
    if section.on_spike != "none":
        spike = accepted & recent.is_spike(mean, norm)
        accepted = accepted & ~spike
        recent.add_step(mean, norm, accepted=accepted)
    factor = unscale * (limit / (norm + 1e-6)).clamp(max=1.0) if limit else unscale
    flags = (accepted.double(), spike.double(), stops)
    figures = torch.stack([mean, norm, count, tokens, trained, *flags, factor])
    return StepDecision(figures, factor.reciprocal().float(), 1.0 - accepted.float())


def step_result(figures: list[float]) -> StepResult:
    """Returns the result for the figures of a StepDecision. Raises TrainError for an impossible count."""
    mean, norm, count, tokens, trained, accepted, spike, stops, factor = figures
    if not 0 <= count < math.inf:
        raise TrainError(
            "the counts of the loss function do not sum to a number of items.",
            got=f"{count}, over all ranks and microbatches of the step",
            why="the summed loss and its gradient are divided by the sum of the counts",
            fix="(sum, count) with a finite count >= 0 on each rank",
        )
    return StepResult(
        loss=mean,
        grad_norm=norm,
        tokens=int(tokens),
        trained_tokens=None if math.isnan(trained) else int(trained),
        skipped=not accepted,
        spike=bool(spike),
        stop_requested=stops > 0,
        gradient_factor=factor,
    )
