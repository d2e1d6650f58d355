"""The model, the data and the optimizer of the fixtures: sizes that divide by nothing, and two groups."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullshard.spec.plan import Plan

STEPS, ROWS, LENGTH, WORDS = 3, 12, 5, 11
RATE, WARMUP = 1e-2, 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, WORDS, bias=False)
        self.register_buffer("seen", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initial() -> Tiny:
    """The values that all fixtures and the undisturbed run begin with."""
    torch.manual_seed(0)
    return Tiny()


def batch(step: int) -> Tensor:
    """The tokens of a step, (12, 6)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, as in fullshard."""
    two = [one for one in model.parameters() if one.ndim >= 2]
    one = [one for one in model.parameters() if one.ndim < 2]
    return [{"params": two, "weight_decay": 0.1}, {"params": one, "weight_decay": 0.0}]


class Batches:
    """`batch` cut into ranks' microbatches."""

    def microbatches(self, step: int, *, rank: int, plan: Plan) -> Iterator[Tensor]:
        rows = batch(step).tensor_split(plan.world_size)
        yield rows[rank]


RUN = f"""
[model]
python = "tests.takeover.tiny:Tiny"
[data]
sequence_length = {LENGTH}
[train]
steps = 8
global_batch = {ROWS}
[optimizer]
learning_rate = {RATE}
betas = [0.9, 0.999]
weight_decay = 0.1
clip_norm = 0.0
[schedule]
kind = "constant"
warmup_steps = {WARMUP}
[precision]
mode = "fp32"
"""
