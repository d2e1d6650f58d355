"""Operations on traced tensors give the places of the real numbers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fullshard.weights.trace import TracedTensor, UntraceableOperationError, make_source_tensor

SOURCES = {"a": (12, 10), "b": (12, 10), "c": (4, 6, 5)}
Rearranging = Callable[[Tensor, Tensor, Tensor], Tensor]

REARRANGED: dict[str, Rearranging] = {
    "experts": lambda a, b, c: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "interleaved": lambda a, b, c: a.reshape(6, 2, 10).transpose(0, 1).reshape(12, 10),
    "rotary": lambda a, b, c: a.view(3, 2, 2, 10).transpose(1, 2).reshape(12, 10),
    "chunk": lambda a, b, c: torch.cat([a, b]).chunk(5)[2],
    "split": lambda a, b, c: torch.cat([a, b], dim=1).split([3, 14, 3], dim=1)[1],
    "turned": lambda a, b, c: c.transpose(1, 2).contiguous(),
    "turned and flat": lambda a, b, c: c.transpose(1, 2).reshape(4, 30)[1:3].view(5, 12),
    "cut from the flat": lambda a, b, c: c.reshape(-1)[7:91].reshape(4, 21),
    "pieces in rows": lambda a, b, c: torch.cat([a, b]).split([7, 17])[1].t().reshape(17, 10),
    "one of many": lambda a, b, c: torch.stack([a, b]).unbind(0)[1][-5:],
    "squeezed": lambda a, b, c: c[1:2].squeeze(0).unsqueeze(1),
    "permuted": lambda a, b, c: c.permute(2, 0, 1).reshape(10, 12),
}


def filled(traced: TracedTensor, sources: dict[str, Tensor]) -> Tensor:
    out = torch.full(tuple(traced.shape), -1)
    for part in traced.parts:
        box = tuple(slice(begin, begin + size) for begin, size in zip(part.at, part.shape, strict=True))
        assert (out[box] == -1).all()  # no two boxes overlap
        out[box] = sources[part.source].reshape(-1).as_strided(part.shape, part.strides, part.begin)
    return out


@pytest.mark.parametrize("rearranged", REARRANGED.values(), ids=REARRANGED)
def test_the_boxes_of_a_traced_tensor_hold_the_numbers_of_the_real_one(rearranged: Rearranging) -> None:
    real = {n: torch.arange(math.prod(s)).reshape(s) + 1000 * i for i, (n, s) in enumerate(SOURCES.items())}
    traced = rearranged(*(make_source_tensor(name, shape) for name, shape in SOURCES.items()))
    assert torch.equal(filled(traced, real), rearranged(*real.values()))


def test_arithmetic_is_refused() -> None:
    with pytest.raises(UntraceableOperationError, match="mul"):
        make_source_tensor("a", (2, 3)) * 2
    with pytest.raises(UntraceableOperationError, match="shapes"):
        torch.cat([make_source_tensor("a", (2, 3)), make_source_tensor("b", (2, 4))])
