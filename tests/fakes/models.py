"""Models that hold what sharding finds hard."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH = 13, 10


def keep_blocks_apart(blocks: nn.ModuleList) -> None:
    """Makes blocks differ in a setting, so that none of them stands for another in a trace."""
    for at, block in enumerate(blocks):
        block.setting = f"block {at}"


class OddBlock(nn.Module):
    """Uneven rows (7 and 10 over 3 or 4 ranks), fewer rows than ranks (2), a bias, a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.narrow = nn.Linear(7, 2, bias=False)
        self.down = nn.Linear(2, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.narrow(torch.tanh(self.up(self.norm(x)))))
        return x + self.down(y) + 0.1 * self.frozen(x)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 6)
        self.outer = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.silu(self.inner(x)))


class MixtureBlock(nn.Module):
    """Every expert runs on every token, weighted: dense, so that each rank's gradient has every expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(h) for i, expert in enumerate(self.experts))


class OddModel(nn.Module):
    """tokens (batch, sequence) -> logits; blocks of different size, a scalar, and, if asked, tied weights."""

    scale_buffer: Tensor

    def __init__(self, *, tied: bool = False, mixture: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.temperature = nn.Parameter(torch.empty(()))
        kinds = [OddBlock, MixtureBlock, OddBlock] if mixture else [OddBlock, OddBlock, OddBlock]
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale_buffer", torch.empty(WIDTH))
        if tied:
            self.head.weight = self.embedding.weight
        self.reset_buffers()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def reset_buffers(self) -> None:
        if not self.scale_buffer.is_meta:
            self.scale_buffer.copy_(torch.linspace(0.9, 1.1, WIDTH))

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.constant_(self.temperature, 1.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale_buffer
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.temperature
