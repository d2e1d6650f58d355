"""AdamW on bfloat16 parameters and moments, whose updates are rounded stochastically.

A bf16 parameter keeps 8 bits of mantissa: an update below 1/256 of the value is lost by rounding to nearest,
and training plateaus. Rounded up or down at random, with the probability that makes the mean right, it is
kept in expectation. The second moment needs it likewise: it decays by (1 - β₂) a step. arXiv:2010.06192.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fullshard.profiler.memory import local_tensor


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW: arXiv:1711.05101. 8 bytes a parameter: bf16 value, gradient and two moments.

    The random bits come from `seed`, the step, the parameter and the shard, so that replicas of a shard round
    alike, and a resumed run rounds as the run that was not stopped.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        index = 0
        for group in self.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                index += 1
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group=group, index=index)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, *, group: dict[str, Any], index: int) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"].item())
        value, first, second, g = (
            local_tensor(t) for t in (parameter, state["exp_avg"], state["exp_avg_sq"], gradient)
        )
        if value.numel() == 0:
            return
        beta1, beta2 = group["betas"]
        generator = torch.Generator(value.device)
        generator.manual_seed(hash((self.seed, step, index, _shard_index(parameter))) & (2**63 - 1))
        g32 = g.float()
        m = first.float().lerp_(g32, 1 - beta1)
        v = second.float().mul_(beta2).addcmul_(g32, g32, value=1 - beta2)
        new = value.float().mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
        new.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1**step))
        for target, exact in ((value, new), (first, m), (second, v)):
            round_stochastically(exact, out=target, generator=generator)


def round_stochastically(exact: Tensor, *, out: Tensor, generator: torch.Generator) -> None:
    """Writes fp32 `exact` into `out`; to bf16 by adding random low bits and cutting them.

    A bf16 is the upper half of an fp32: of the 2^16 equally likely additions, as many carry into the upper
    half as the lower half's value, so the mean over roundings is `exact`, and what bf16 can hold stays as it
    is. Infinities, NaNs and other dtypes are copied to nearest.
    """
    if out.dtype is not torch.bfloat16:
        out.copy_(exact)
        return
    bits = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32, device=exact.device, generator=generator)
    bits.add_(exact.view(torch.int32)).bitwise_and_(-(1 << 16))
    out.copy_(torch.where(exact.isfinite(), bits.view(torch.float32), exact))


def _shard_index(parameter: Tensor) -> int:
    """The rank's place along the mesh axis that shards the parameter; the same on all replicas of a shard."""
    if not isinstance(parameter, DTensor):
        return 0
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            return parameter.device_mesh.get_local_rank(axis)
    return 0
