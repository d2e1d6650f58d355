"""Updates with given gradients: sharded on the ranks of a pool, each of which has its part of them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import load, save
from fullshard.distributed.tensors import dtensor_from_local_part, local_tensor, shard_offsets
from fullshard.models.loss import choose_loss
from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.figures import StepDecision
from fullshard.training.gradients import update_as_device_decides, update_parameters
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.training.runs import local_bits, whole
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


def state_after_updates(run: Run, model: str) -> TrainState:
    state, _ = state_of(run, model)
    for step in range(STEPS):
        set_gradients(state.model, step)
        state.optimizer.step()
    return state


def values_and_state(state: TrainState) -> Tensors:
    """Parameters, and their tensors of state as "name key", whole."""
    found = whole(state.model)
    for name, parameter in state.model.named_parameters():
        for key, one in state.optimizer.state.get(parameter, {}).items():
            if isinstance(one, Tensor) and one.ndim:
                found[f"{name} {key}"] = one.full_tensor() if isinstance(one, DTensor) else one
    return found


def updated_here(run: Run, model: str) -> Tensors:
    """Parameters and state after STEPS updates with given gradients."""
    return values_and_state(state_after_updates(run, model))


def differing(found: Tensors, wanted: Tensors) -> list[str]:
    assert wanted
    return [name for name, one in wanted.items() if not torch.equal(found[name], one)]


def state_after_resume(run: Run, model: str, source: Path | None, target: Path, first: int) -> TrainState:
    """One update with given gradients, of a state that is loaded from `source`, and saved in `target`."""
    state, plan = state_of(run, model)
    if source is not None:
        load(state, source)
    set_gradients(state.model, first)
    state.optimizer.step()
    save(state, target, plan=plan)
    return state


def resumed(*given: Any) -> Tensors:
    return values_and_state(state_after_resume(*given))


def resumed_on_fewer_ranks(
    ranks: Any, directory: Path, *, model: str = ODD, resume: Any = resumed, **run: Any
) -> Any:
    """Three updates, each in a run that resumes the one before: on 3, 2 and 1 ranks.

    resume: returns what is found on a rank, of what `state_after_resume` takes
    """
    source, found = None, None
    for step, count in enumerate((3, 2, 1)):
        target, run_here = directory / str(step), run_of(ranks=count, model=model, **run)
        found = ranks(count).run(resume, run_here, model, source, target, step)[0]
        source = target
    return found


def keys_after_another_kind(name: str, kinds: tuple[str, str], matrix: str, directory: Path) -> set[str]:
    """Trains a step, resumes with another kind of one matrix, and returns its keys of state then."""
    for number, kind in enumerate(kinds):
        group = f"optimizer.groups=[{{match=['{matrix}'], kind='{kind}'}}]"
        state, plan = state_of(run_of(name, 2, DECODER, extra=[group]), DECODER)
        if number:
            load(state, directory)
        set_gradients(state.model, number)
        state.optimizer.step()
        state.step = number + 1
        save(state, directory, plan=plan)
    return set(state.optimizer.state[dict(state.model.named_parameters())[matrix]])


def bits_of_skipped_step(run: Run, model: str, found_inf_before: float = 0.0) -> list[str]:
    """Names of what differs after a step whose gradients are NaN, and which the device skips.

    found_inf_before: 1 if the device skips the step before it too
    """
    state, _ = state_of(run, model)
    set_gradients(state.model, 0)
    update_as_device_decides(state.optimizer, decision(found_inf=found_inf_before))
    before = local_bits(state)
    for parameter in state.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter.detach(), torch.nan)
    update_as_device_decides(state.optimizer, decision(found_inf=1.0))
    return [name for name, one in local_bits(state).items() if not torch.equal(one, before[name])]


def bits_by_decision(run: Run, model: str, how: str, skips_first: bool = False) -> Tensors:
    """The bits of this rank after an update with gradients scaled by 4, as the "device" or "host" decides.

    skips_first: whether the device first skips a step, which is as if it had not been
    """
    state, _ = state_of(run, model)
    if how == "device" and skips_first:
        set_gradients(state.model, 1)
        update_as_device_decides(state.optimizer, decision(found_inf=1.0))
    set_gradients(state.model, 0)
    if how == "device":
        update_as_device_decides(state.optimizer, decision(found_inf=0.0, scale=4.0))
    else:
        update_parameters(
            state.optimizer, [p.grad for p in state.model.parameters() if p.grad is not None], factor=0.25
        )
    return local_bits(state)


def trained(run: Run, model: str) -> Tensors:
    state, plan = state_of(run, model)
    assert not any(step.skipped for step in train(state, plan, loss=choose_loss(run, state.model)))
    return whole(state.model)


def assert_training_does_not_depend_on_ranks_nor_on_microbatches(name: str, ranks: Any) -> None:
    """In fp32, by a thousandth of what training changes: the optimizers magnify roundings of gradients."""
    wanted = ranks(1).run(trained, run_of(name, 1, DECODER), DECODER)[0]
    first = dict(materialize(build(DECODER, run_of(name, 1, DECODER)), seed=0).named_parameters())
    for count, accumulation in ((2, (4, "last_microbatch")), (3, (1, "every_microbatch"))):
        run = run_of(name, count, DECODER, accumulation=accumulation)
        found = ranks(count).run(trained, run, DECODER)[0]
        for key, one in wanted.items():
            moved = (one - first[key].detach()).abs().max()
            assert (found[key] - one).abs().max() <= 1e-3 * moved, key
