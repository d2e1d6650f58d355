"""Updates with given gradients: sharded on the ranks of a pool, each of which has its part of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.distributed.tensors import dtensor_from_local_part, local_tensor, shard_offsets
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.figures import StepDecision
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.training.same_numbers import build, make_run

RATE, DECAY, STEPS = 0.02, 0.1, 3
DECODER, MIXTURE, ODD = "decoder", "mixture_decoder", "odd_mixture"

Tensors = dict[str, Tensor]

# ranks, model, strategy, settings. `decoder` has rows that 3 ranks divide, and 2 and 4 do not; `odd_mixture`
# has matrices of 2 and 7 rows, so that ranks have none.
CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (1, DECODER, "full_shard", {}),
    (2, DECODER, "full_shard", {}),
    (3, DECODER, "zero1", {}),
    (3, ODD, "full_shard", {}),
    (4, ODD, "full_shard", {}),
    (2, DECODER, "no_shard", {}),
    (4, DECODER, "hybrid_shard", {}),
    (2, MIXTURE, "full_shard", {}),  # stacks of experts by expert
    (3, MIXTURE, "full_shard", {}),  # stacks of 4 experts by their rows
    (2, DECODER, "full_shard", {"tensor": 2}),
    (4, DECODER, "full_shard", {"tensor": 2}),
    (4, MIXTURE, "full_shard", {"expert": 2}),
    (4, MIXTURE, "full_shard", {"tensor": 2, "expert": 2}),
]


def run_of(name: str, ranks: int, model: str, *, strategy: str = "full_shard", **more: Any) -> Run:
    extra = (f"optimizer.name={name}", f"optimizer.learning_rate={RATE}", *more.pop("extra", ()))
    length = 16 if "context" in more or "tensor" in more or "expert" in more else 9
    return make_run(model=model, ranks=ranks, strategy=strategy, length=length, extra=extra, **more)


def state_of(run: Run, model: str) -> tuple[TrainState, Plan]:
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    module = shard(build(model, run), plan)
    return TrainState(module, build_optimizer(module, plan), data=Rows(VOCABULARY)), plan


def gradients(model: nn.Module, step: int) -> Tensors:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(one.shape, generator=generator)
        for name, one in model.named_parameters()
        if one.requires_grad
    }


def set_gradients(model: nn.Module, step: int) -> None:
    """Gives each parameter this rank's part of a gradient that does not depend on the ranks."""
    given = gradients(model, step)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and name in given:
            size = local_tensor(parameter).shape
            box = tuple(slice(b, b + n) for b, n in zip(shard_offsets(parameter), size, strict=True))
            parameter.grad = dtensor_from_local_part(parameter, given[name][box].contiguous())
        else:
            parameter.grad = given.get(name)


def decision(*, found_inf: float, scale: float = 1.0) -> StepDecision:
    return StepDecision(torch.zeros(9), torch.tensor(scale), torch.tensor(found_inf))
