"""Figures of a step, which the device computes and the host reads without stopping the device.

[Note: read one step later]
A host that reads a figure of a step waits until the device has finished it, and the device idles until the
host has launched the next step. So the figures are copied to pinned memory while the device continues, and
are read when the next step is launched already, or earlier if the program asks for them. On the CPU there is
nothing to wait for, and they are read at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


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
        self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
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
    """

    def __init__(self, read_result: Callable[[], StepResult], *, must_wait: bool = False) -> None:
        self._read_result, self.must_wait = read_result, must_wait
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """True if the result was read before."""
        return self._result is not None

    def read(self) -> StepResult:
        """Returns the result. Raises TrainError if the ranks were not in the same step."""
        if self._result is None:
            self._result = self._read_result()
        return self._result

    def __getstate__(self) -> dict[str, Any]:
        return {"_result": self.read(), "must_wait": False}


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
