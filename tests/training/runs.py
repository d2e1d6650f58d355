"""Small runs for the tests of this room: a regression that any loss may train, and its data."""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.parallel.materialize import materialize
from fullshard.spec.plan import DeviceType, Plan
from fullshard.spec.run import Run
from fullshard.training.loop import train
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState

WIDTH, BATCH = 5, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Regression(nn.Module):
    """x (batch, 5) -> (batch, 2). Rows that 2, 3 and 4 ranks divide unevenly, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pairs(step: int, rows: int = BATCH) -> tuple[Tensor, Tensor]:
    """The global batch of a step, from 0."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], dim=1)


class Pairs:
    """`pairs` cut into ranks' microbatches."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = pairs(step, plan.run.train.global_batch)
        for i in range(plan.accumulation):
            start = (i * plan.world_size + rank) * plan.microbatch
            rows = slice(start, start + plan.microbatch)
            yield x[rows], y[rows]


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).float().square().mean()


def run_of(*overrides: str) -> Run:
    """A Run of 12 rows a step in fp32, with `overrides` over it."""
    return Run.load(
        overrides=[
            f"train.global_batch={BATCH}",
            "train.steps=6",
            "data.sequence_length=4",
            "schedule.warmup_steps=2",
            "optimizer.learning_rate=1e-2",
            "precision.mode=fp32",
            *overrides,
        ]
    )


def meta(model: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return model()


def unsharded(run: Run, model: type[nn.Module] = Regression) -> nn.Module:
    """The very values that `sharded` begins with."""
    return materialize(meta(model), seed=run.run.seed)


def sharded(
    run: Run, *, model: type[nn.Module] = Regression, data: Any = None, device: DeviceType = "cpu"
) -> tuple[TrainState, Plan]:
    """A fresh state on this world's ranks."""
    plan = Plan.from_run(run, world_size=dist.get_world_size(), device=device)
    module = shard(meta(model), plan)
    return TrainState(module, build_optimizer(module, plan), data=Pairs() if data is None else data), plan


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, gathered. Collective."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def advance(state: TrainState, plan: Plan, *, to: int) -> list[float]:
    """Trains up to a step, with a new loop for each. Returns the losses."""
    losses: list[float] = []
    while state.step < to:
        losses.append(next(train(state, plan, loss=mean_square)).loss)
    return losses


def local_bits(state: TrainState) -> dict[str, Tensor]:
    """This rank's part of the parameters and of the optimizer's state, copied."""
    return {
        name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in state.tensors().items()
        if not name.startswith("rng.")
    }


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def logged() -> Generator[list[str]]:
    """Yields the messages that are logged meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fullshard").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("fullshard").removeHandler(handler)
