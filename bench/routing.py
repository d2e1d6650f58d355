"""Prints how unevenly a router of random weights spreads text over experts, layer by layer.

KempnerForge's mixture as it begins (kempnerforge/model at 2611fef): 24 layers of width 2,048, 16 heads and
4 of keys, two of 8 or 16 experts per token, weights of standard deviation 0.02, of attention's output (and,
if experts are modules of their own, of the experts') 0.02 / sqrt(48). Experts have 512 channels instead of
7,168, with outputs as large. The tokens are words of this repository's pages, each with a random embedding,
so that frequent words are as frequent as in English.

python bench/routing.py EXPERTS [packed|modules]      # rows of the fullest expert over the mean, by layer
"""

import re
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH, INNER, HEADS, KEYS, LAYERS, CHOSEN = 2048, 512, 16, 4, 24, 2
WIDE = (7168 / INNER) ** 0.5
SEQUENCES, LENGTH = 4, 512
STD = 0.02


def words() -> Tensor:
    pages = sorted(Path(__file__).parents[1].glob("docs/**/*.md"))
    found = re.findall(r"\w+|[^\w\s]", "\n".join(page.read_text() for page in pages))
    known = {word: index for index, word in enumerate(dict.fromkeys(found))}
    far = len(found) // SEQUENCES
    rows = [[known[word] for word in found[i * far : i * far + LENGTH]] for i in range(SEQUENCES)]
    return torch.tensor(rows)


def random(*shape: int, std: float = STD) -> Tensor:
    return torch.randn(*shape) * std


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def rotated(x: Tensor) -> Tensor:
    """x: (batch, heads, sequence, head_dim)"""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    angles = torch.outer(
        torch.arange(x.shape[2]), 500_000.0 ** (-torch.arange(0, x.shape[3], 2) / x.shape[3])
    )
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def attention(x: Tensor) -> Tensor:
    each = WIDTH // HEADS
    q, k, v = (
        (x @ random(WIDTH, heads * each)).unflatten(-1, (heads, each)).transpose(1, 2)
        for heads in (HEADS, KEYS, KEYS)
    )
    y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) @ random(WIDTH, WIDTH, std=STD / (2 * LAYERS) ** 0.5)


def mixture(x: Tensor, experts: int, *, output_std: float) -> tuple[Tensor, float]:
    flat = x.flatten(0, 1)
    weights, index = F.softmax(flat @ random(WIDTH, experts), -1).topk(CHOSEN, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    y, counts = torch.zeros_like(flat), torch.bincount(index.flatten(), minlength=experts)
    for expert in range(experts):
        token, place = torch.where(index == expert)
        rows = flat[token]
        inner = F.silu(rows @ random(WIDTH, INNER)) * (rows @ random(WIDTH, INNER))
        y.index_add_(0, token, inner @ random(INNER, WIDTH, std=output_std) * weights[token, place, None])
    return y.view_as(x), float(counts.max() / counts.float().mean())


@torch.no_grad()
def main(experts: int, kind: str) -> None:
    torch.manual_seed(0)
    tokens = words()
    x = random(int(tokens.max()) + 1, WIDTH)[tokens]
    fullest: list[float] = []
    for _ in range(LAYERS):
        x = x + attention(norm(x))
        std = WIDE * STD if kind == "packed" else WIDE * STD / (2 * LAYERS) ** 0.5
        y, most = mixture(norm(x), experts, output_std=std)
        x = x + y
        fullest.append(most)
    print(" ".join(f"{most:.2f}" for most in fullest))
    print(f"{experts} experts, {kind}: mean {statistics.mean(fullest):.2f} of at most {experts / CHOSEN:g}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "packed")
