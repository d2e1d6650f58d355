"""The model of DeepSpeed's fixtures, whose sizes divide by nothing, its data and its parameter groups."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER = 11, 5, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class SmallModel(nn.Module):
    """tokens (batch, sequence) -> logits (batch, sequence, vocabulary)."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("seen", torch.arange(3.0))
        if tied:
            self.head.weight = self.embed.weight
        self.blocks[0].down.weight.requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    """Returns the 2 sequences of 6 tokens that `rank` reads in `step`."""
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(step * 10 + rank))


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns matrices with weight decay, then vectors without, as torch's optimizers take them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 5e-3},
    ]
