"""An optimizer that takes its time, so that a fault can be put between two steps of a tiny run."""

import time
from collections.abc import Callable
from typing import Any

import torch

PACE_SECONDS = 0.1


class PacedAdamW(torch.optim.AdamW):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        time.sleep(PACE_SECONDS)
        return super().step(closure)
