"""AdamW on bfloat16 parameters and moments, with stochastically rounded updates. arXiv:2010.06192.

A bf16 parameter has 8 bits of mantissa, so rounding to nearest loses an update below 1/256 of the value, and
training plateaus. Stochastic rounding preserves the mean, and so keeps the update in expectation. The second
moment needs stochastic rounding too, because it decays by (1 - β₂) per step.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from fullshard.distributed.tensors import local_tensor
from fullshard.offload.rounding import (
    AdamOptions,
    RoundingSeed,
    adamw_with_stochastic_rounding,
    rounding_key,
    shard_index,
)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with 8 bytes per parameter: bf16 value, gradient and two moments.

    The random bits depend only on `seed`, step, parameter and shard, so a shard's replicas stay equal.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.seed = seed
        self._places: dict[Tensor, int] = {}
        for group in self.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                self._parameter_index(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                index = self._parameter_index(parameter)
                if parameter.grad is not None:
                    self._update_parameter(parameter, parameter.grad, group=group, index=index)
        return loss

    def _parameter_index(self, parameter: Tensor) -> int:
        """Returns the parameter's number, from 1, in the order in which this optimizer met its parameters."""
        return self._places.setdefault(parameter, len(self._places) + 1)

    def _update_parameter(
        self, parameter: Tensor, gradient: Tensor, *, group: dict[str, Any], index: int
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"].item())
        kept = (parameter, state["exp_avg"], state["exp_avg_sq"], gradient)
        value, first, second, g = map(local_tensor, kept)
        seed = RoundingSeed(rounding_key(self.seed, step=step, parameter=index, shard=shard_index(parameter)))
        beta1, beta2 = group["betas"]
        options = AdamOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        adamw_with_stochastic_rounding((value, first, second), g, step=step, options=options, seed=seed)
