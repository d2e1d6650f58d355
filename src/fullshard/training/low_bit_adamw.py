"""AdamW of few bits: on bf16 parameters with stochastic rounding, and torchao's with 8-bit moments.

Moments of 8 bits are in blocks of 256 values with one scale each (arXiv:2110.02861).

[Note: moments in a checkpoint]
Blocks are counted from the start of each rank's shard. A shard whose size is not a multiple of 256, or less
than 4096, keeps its moments in fp32. Which moments are quantised thus depends on the number of ranks.
Therefore checkpoints hold the moments in fp32 (8 bytes per parameter), and each load quantises them again. A
block with the same boundaries gets the same codes, and the same scale up to the last bit: the scale follows
from the block's largest value, whose code is the last (the first for a negative value).
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import dtensor_from_local_part, local_tensor
from fullshard.errors import MissingExtraError
from fullshard.offload import rounding
from fullshard.system.dotted import import_quietly


@cache
def import_adamw8bit_class() -> type[torch.optim.Optimizer]:
    """Returns torchao's AdamW8bit, whose step is not compiled on the CPU here. Raises MissingExtraError."""
    try:
        base: Any = import_quietly("torchao.optim").AdamW8bit
    except ImportError as error:
        needed_for = 'optimizer.name = "adamw8bit"'
        raise MissingExtraError("lowbit", package="torchao", needed_for=needed_for) from error

    class AdamW8bit(base):
        def step(self, closure: Any = None) -> Any:
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                return super().step(closure)

    return cast(type[torch.optim.Optimizer], AdamW8bit)


def dequantize(value: Tensor) -> Tensor:
    """Returns `value` in fp32 if it is a quantised moment, and unchanged otherwise."""
    local = local_tensor(value)
    if not hasattr(local, "dequantize") or not hasattr(local, "codes"):
        return value
    full = cast(Any, local).dequantize()
    return full if local is value else dtensor_from_local_part(cast(DTensor, value), full)


def quantize_state_for_optimizer(
    optimizer: torch.optim.Optimizer, parameter: Tensor, *, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns a copy of `state` with its moments quantised, if `optimizer` keeps 8-bit moments.

    state: optimizer state of `parameter`, with moments in fp32
    """
    kept, new_buffer = dict(state), getattr(optimizer, "_new_buffer", None)
    for key, value in state.items():
        if new_buffer is not None and key != "step":
            kept[key] = new_buffer(parameter, key == "exp_avg")
            _quantize_into(local_tensor(kept[key]), local_tensor(value))
    return kept


@torch.no_grad()
def _quantize_into(kept: Any, full: Tensor) -> None:
    """Copies `full` into `kept`, quantised if `kept` is. See [Note: moments in a checkpoint]."""
    if type(kept).__name__ != "OptimState8bit":
        kept.copy_(full)
        return
    blocks = full.float().reshape(-1, kept.block_size)
    largest, smallest = blocks.amax(-1), blocks.amin(-1)
    if kept.signed:
        # The last of the 8-bit codes is 1. The first is slightly more than -1.
        largest = torch.where(largest > -smallest, largest, smallest / kept.qmap[0])
    scale = largest.clip(1e-12)
    quantised = importlib.import_module("torchao.optim.quant_utils").quantize_8bit_with_qmap
    kept.codes.copy_(quantised((blocks / scale.unsqueeze(-1)).view(full.shape), kept.qmap))
    kept.scale.copy_(scale)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with 8 bytes per parameter: bf16 value, gradient and two moments.

    bf16 has 8 bits of mantissa, so rounding to nearest loses an update below 1/256 of the value. Stochastic
    rounding (arXiv:2010.06192) keeps the update in expectation. The second moment needs it too, because it
    decays by (1 - β₂) per step.

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
        step, shard = int(state["step"].item()), rounding.shard_index(parameter)
        kept = (parameter, state["exp_avg"], state["exp_avg_sq"], gradient)
        value, first, second, g = map(local_tensor, kept)
        key = rounding.rounding_key(self.seed, step=step, parameter=index, shard=shard)
        seed = rounding.RoundingSeed(key)
        beta1, beta2 = group["betas"]
        options = rounding.AdamOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        rounding.adamw_with_stochastic_rounding(
            (value, first, second), g, step=step, options=options, seed=seed
        )
