"""Detection of spikes: steps whose loss or gradient norm x stands out from earlier steps.

    x > mean + SIGMA · max(deviation, MIN_RELATIVE_STD · |mean|)

The mean and the deviation are over the last WINDOW steps that were not skipped. No step is judged before half
of the window is filled. OLMo-core's SkipStepOptimizer skips steps by the same kind of test, with this window
and this threshold.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

WINDOW = 128
SIGMA = 6.0
MIN_RELATIVE_STD = 1e-3
"""Least relative deviation that the test assumes; otherwise any rise of a flat curve would be a spike."""


class RecentSteps:
    """Losses and gradient norms of the last steps that were not skipped, oldest first.

    They are part of the training state, so a resumed run judges steps as the uninterrupted run would. They
    are tensors on the device, where a step is judged without waiting for the host.
    """

    def __init__(self, losses: Sequence[float] = (), norms: Sequence[float] = ()) -> None:
        # (2, window): losses and norms, of which the last `_count` are valid
        self._values = torch.tensor([list(losses), list(norms)], dtype=torch.float64)
        self._count = torch.tensor(len(losses))

    @property
    def losses(self) -> list[float]:
        """Losses of the recent steps. Waits for the device."""
        return self._valid_values(0)

    @property
    def norms(self) -> list[float]:
        """Gradient norms of the recent steps. Waits for the device."""
        return self._valid_values(1)

    def is_spike(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns whether a step with this loss and norm is a spike, a bool tensor on their device."""
        values, count = self._move_values_and_count_to(loss.device)
        valid = torch.arange(WINDOW, device=loss.device) >= WINDOW - count
        mean = torch.where(valid, values, 0.0).sum(1) / count
        squares = torch.where(valid, values - mean[:, None], 0.0).square()
        deviation = (squares.sum(1) / count).sqrt()
        threshold = mean + SIGMA * torch.maximum(deviation, MIN_RELATIVE_STD * mean.abs())
        return (torch.stack([loss, norm]) > threshold).any() & (count >= WINDOW // 2)

    def add_step(self, loss: Tensor, norm: Tensor, *, accepted: Tensor) -> None:
        """Adds a step if `accepted`, a bool tensor, is true. Keeps the last WINDOW steps."""
        values, count = self._move_values_and_count_to(loss.device)
        longer = torch.cat([values[:, 1:], torch.stack([loss, norm])[:, None]], dim=1)
        self._values = torch.where(accepted, longer, values)
        self._count = (count + accepted).clamp(max=WINDOW)

    def _move_values_and_count_to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Moves the values to `device`, padded to a window. Returns them, and the count of valid ones."""
        if self._values.shape[1] != WINDOW or self._values.device != device:
            kept = self._values[:, -WINDOW:].to(device)
            self._values = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)
            self._values[:, WINDOW - kept.shape[1] :] = kept
            self._count = self._count.clamp(max=WINDOW).to(device)
        return self._values, self._count

    def _valid_values(self, row: int) -> list[float]:
        count = int(self._count)
        return cast(list[float], self._values[row, self._values.shape[1] - count :].tolist())
