"""States on meshes with further axes, and what holds of their checkpoints on any mesh."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import load, save
from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from tests.fakes.data import Rows
from tests.fakes.models import VOCABULARY
from tests.training.same_numbers import build

BF16 = "precision.mode=bf16"


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of_run(model: str, run: Run) -> tuple[TrainState, Plan]:
    """A fresh state on this world's ranks."""
    plan = Plan.from_run(run, world_size=dist.get_world_size())
    module = shard(build(model, run), plan)
    return TrainState(module, build_optimizer(module, plan), data=Rows(VOCABULARY)), plan


def parameters_of(state: TrainState) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in state.model.named_parameters()}


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Weights and the optimizer's state, whole."""
    return {name: whole(one) for name, one in state.tensors().items() if not name.startswith("rng.")}


def train_and_save(state: TrainState, plan: Plan, directory: Path) -> dict[str, Tensor]:
    """Trains two steps and saves; returns what was saved."""
    assert [step.index for step, _ in zip(train(state, plan), range(2), strict=False)] == [1, 2]
    save(state, directory, plan=plan)
    return tensors_of(state)


def load_whole(state: TrainState, directory: Path) -> dict[str, Tensor]:
    load(state, directory)
    return tensors_of(state)


def assert_loads_on_any_mesh(
    ranks: Callable[..., Any],
    directory: Path,
    *,
    saved: Callable[[Path, int], dict[str, Tensor]],
    loaded: Callable[[Path, int], dict[str, Tensor]],
    cases: Sequence[tuple[int, int, Sequence[tuple[int, int]]]],
) -> None:
    """Weights and the optimizer's state, bit for bit.

    cases: (size of the axis, ranks) that save, and (ranks, size of the axis) that load
    """
    for source, count, targets in cases:
        own = directory / str(count)
        written = ranks(count).run(saved, own, source)[0]
        assert sum(name.startswith("optimizer.") for name in written) >= 2
        for others, size in targets:
            for values in ranks(others).run(loaded, own, size):
                for name, value in written.items():
                    assert torch.equal(values[name], value), (source, size, name)
