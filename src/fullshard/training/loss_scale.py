"""The loss scale that keeps fp16 gradients from vanishing."""

from dataclasses import dataclass


@dataclass
class LossScale:
    """Dynamic loss scale: halved after an overflow, doubled after `window` good steps. arXiv:1710.03740.

    Every rank passes the same `finite`, so the scales of all ranks stay equal. `window` 0 disables scaling.
    """

    scale: float = 1.0
    window: int = 0
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        if self.window == 0:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self.good_steps >= self.window:
            self.scale, self.good_steps = self.scale * 2, 0
