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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fullshard.torch_private.tensors import foreach_add, local_part


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

    The random bits depend only on `seed`, step, parameter and shard, so a shard's replicas stay equal. Step
    counts are on the parameters' device, which decides on the update: see [Note: decided on the device] in
    `gradients.py`.

    grad_scale, found_inf: as torch's fused AdamW takes them; unset, 1 and 0
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

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
        self._seeds: dict[Tensor, rounding.RoundingSeed] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in cast(list[Tensor], group["params"]):
                self._rounding_seed(parameter)
            if own := [one for one in cast(list[Tensor], group["params"]) if one.grad is not None]:
                self._update_parameters(own, group)
        return loss

    def _rounding_seed(self, parameter: Tensor) -> rounding.RoundingSeed:
        """Returns the seed of a parameter, by its number, from 1 in the order of first use, and its shard."""
        if parameter not in self._seeds:
            number, shard = len(self._seeds) + 1, rounding.shard_index(parameter)
            key = rounding.rounding_key(self.seed, parameter=number, shard=shard)
            self._seeds[parameter] = rounding.RoundingSeed(key)
        return self._seeds[parameter]

    def _update_parameters(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [find_or_make_adamw_state(self, parameter) for parameter in parameters]
        counts = [state["step"] for state in states]
        one = torch.ones_like(counts[0]) if self.found_inf is None else 1.0 - self.found_inf
        foreach_add(counts, [one] * len(counts))
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        options = rounding.AdamOptions(rate, beta1, beta2, group["eps"], group["weight_decay"])
        fixed = rounding.fixed_factors(options)
        of_steps = rounding.factors_of_steps(
            torch.stack(counts), options, grad_scale=self.grad_scale, found_inf=self.found_inf
        )
        for parameter, state, of_step in zip(parameters, states, of_steps.unbind(), strict=True):
            kept = (parameter, state["exp_avg"], state["exp_avg_sq"], parameter.grad)
            value, first, second, g = map(local_part_of, kept)
            rounding.adamw_with_stochastic_rounding(
                (value, first, second),
                g,
                factors=rounding.UpdateFactors(fixed, of_step),
                seed=self._rounding_seed(parameter),
            )


def find_or_make_adamw_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns the state of `parameter`: moments like it, and its step count, on its device."""
    state = optimizer.state[parameter]
    if state.keys() - {"step"} != {"exp_avg", "exp_avg_sq"}:  # none, or of another kind, in the checkpoint
        state.clear()
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    step_count_of(state, parameter)
    return state


def step_count_of(state: dict[str, Tensor], parameter: Tensor) -> Tensor:
    """Returns the step count in the state of `parameter`, on its device. Creates it if it is missing."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    if state["step"].device != parameter.device:  # of a checkpoint
        state["step"] = state["step"].to(parameter.device)
    return state["step"]


def local_part_of(value: Any) -> Any:
    """Returns this rank's part of a DTensor, faster than `local_tensor`; other values unchanged."""
    return local_part(value) if isinstance(value, DTensor) else value
