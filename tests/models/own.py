"""Objects of a user, by dotted path: a model whose blocks differ in size, a loss, batches."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.spec.plan import Plan
from fullshard.spec.run import Run
from tests.fakes.architectures_hf import batch_of


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x + self.shift)))


class Pyramid(nn.Module):
    """x (batch, width) -> (batch, width)."""

    def __init__(self, width: int = 6, inner: tuple[int, ...] = (5, 9, 17)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, each) for each in inner)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branching(Pyramid):
    """Branches on the value of an activation, which a trace on fake tensors does not have."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum().item() > 0 else -y


def no_module() -> str:
    return "a model"


def square_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    error = model(batch["x"]) - batch["y"]
    return error.square().sum(), error.shape[0]


class Given:
    """Rows for the architecture of `data.options.name`, cut alike at any number of ranks."""

    def __init__(self, run: Run) -> None:
        self.name = run.data.options["name"]

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Any]:
        whole = rows_of(self.name, step, plan.run.train.global_batch)
        for accumulated in range(plan.accumulation):
            first = (accumulated * plan.world_size + rank) * plan.microbatch
            yield {key: tensor[first : first + plan.microbatch] for key, tensor in whole.items()}


def rows_of(name: str, step: int, rows: int) -> dict[str, Tensor]:
    if name != "pyramid":
        return batch_of(name, step, sequences=rows)
    x = torch.randn((rows, 6), generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.flip(1).sin()}


class ReadsInConstructor(nn.Module):
    """A constructor that reads what has no values, unless it does so `within` torch.device("cpu")."""

    def __init__(self, *, what: str, within: bool = False) -> None:
        super().__init__()
        with torch.device("cpu") if within else nullcontext():
            self.inner = nn.Linear(4, 4)
            if what == "spectral norm":
                torch.nn.utils.parametrizations.spectral_norm(self.inner)
            if what == "scale":
                self.scale = float(self.inner.weight.detach().norm())
            if what == "buffer":
                self.register_buffer("table", torch.empty(3))
                self.table.fill_(2.0)
