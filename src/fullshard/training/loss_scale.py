"""The loss scale that keeps fp16 gradients from vanishing."""

from dataclasses import dataclass


@dataclass
class LossScale:
    """Dynamic: halved when a step overflows, doubled after `window` steps without. arXiv:1710.03740.

    Every rank sees the same global norm, so every rank's scale is the same without asking. A scale of 1 that
    never moves (`window` 0) stands for no scaling.
    """

    scale: float = 1.0
    window: int = 0
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        if self.window == 0:
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.scale, self.good_steps = self.scale * 2, 0
