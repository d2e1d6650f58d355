"""Figures of a step, which the device computes and the host reads without stopping the device.

[Note: read one step later]
A host that reads a figure of a step waits until the device has finished it, and the device idles until the
host has launched the next step. So the figures are copied to pinned memory while the device continues, and
are read when the next step is launched already, or earlier if the program asks for them. On the CPU there is
nothing to wait for, and they are read at once.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fullshard.errors import TrainError
from fullshard.spec.run import Run
from fullshard.survival.spikes import RecentSteps


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Figures of one step over all ranks, equal on all ranks.

    loss: mean over valid tokens, in nats for the default loss
    grad_norm: norm of the gradient before clipping
    tokens: number of tokens that were computed, see `count_computed_tokens`
    trained_tokens: number of those whose label counts in the loss, as the loss function returns it; None if
        it returns a mean, which does not say over how many
    skipped: whether nothing was updated, because the loss or norm was not finite, or was a spike
    spike: whether the step was skipped because its loss or norm was a spike
    stop_requested: whether a rank was asked to stop
    gradient_factor: the gradients were multiplied by this before the update
    """

    loss: float
    grad_norm: float
    tokens: int
    trained_tokens: int | None
    skipped: bool
    spike: bool = False
    stop_requested: bool = False
    gradient_factor: float = 1.0


class HostCopy:
    """A copy of `numbers` in (pinned) host memory, whose creation does not wait for the device.

    is_ready: whether the copy was made at once, as on the CPU
    """

    def __init__(self, numbers: Tensor) -> None:
        self.is_ready = numbers.is_cpu
        # Programs set another default device, whose memory cannot be pinned.
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda, device="cpu")
        self._copy.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None

    def read(self) -> list[float]:
        """Returns the numbers, after waiting until the device has copied them."""
        if self._copied is not None:
            self._copied.synchronize()
        return cast(list[float], self._copy.tolist())


class PendingResult:
    """The result of a step that was launched. `read` waits for it.

    read_result: waits for the result and returns it, or raises the step's TrainError
    must_wait: whether `read_result` has to wait for the device
    own_loss: () the sum of this rank's losses, on the device
    """

    def __init__(
        self,
        read_result: Callable[[], StepResult],
        *,
        must_wait: bool = False,
        own_loss: Tensor | None = None,
    ) -> None:
        self._read_result, self.must_wait, self.own_loss = read_result, must_wait, own_loss
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        return self._result is not None

    def read(self) -> StepResult:
        """Returns the result. Raises TrainError for ranks in different steps, and impossible counts."""
        if self._result is None:
            self._result = self._read_result()
        return self._result

    def __getstate__(self) -> dict[str, Any]:
        return {"_result": self.read(), "must_wait": False, "own_loss": None}


class StepTimer:
    """Measures a step from the timer's creation to `stop`, by the device's clock if that is a GPU.

    There, a step begins when the device has finished the work launched before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = self._stopped = self._mark()

    def stop(self) -> None:
        self._stopped = self._mark()

    @property
    def seconds(self) -> float:
        """Seconds of the step. Waits until the device has finished it."""
        if isinstance(self._started, float):
            return cast(float, self._stopped) - self._started
        self._stopped.synchronize()
        return self._started.elapsed_time(self._stopped) * 1e-3

    def __getstate__(self) -> dict[str, Any]:
        return {"_started": 0.0, "_stopped": self.seconds}

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns `tensor` on `device`. The copy goes through pinned memory, and so never waits."""
    if device.type != "cpu" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


# The decision #
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
def decide_and_record_step(
    totals: Tensor, *, nominal: float, are_ranks_equal: Tensor, recent: RecentSteps, run: Run
) -> StepDecision:
    """Returns the decision, without waiting. Adds an accepted step to `recent` if `on_spike` is not "none".

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
    """Returns the result for a StepDecision's figures. Raises TrainError unless its count is finite, >= 0."""
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
