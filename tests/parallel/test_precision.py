"""Dtypes in forward, backward and between."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fullshard.distributed.collectives import DirectReduceScatter
from fullshard.training.shard import shard
from tests.fakes.architectures import WIDTH, Block
from tests.fakes.plans import plan_of

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Buffered(Block):
    """Adds a table, in whatever dtype it is kept in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def reset_buffers(self) -> None:
        self.table.zero_()
        self.count.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table.to(x.dtype)


class WatchedReduction(DirectReduceScatter):
    def __init__(self, seen: dict[str, torch.dtype]) -> None:
        self.seen = seen

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ):
        self.seen["reduced"] = input_tensor.dtype
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def dtypes(given: torch.dtype, *settings: str) -> dict[str, torch.dtype]:
    with torch.device("meta"):
        model = nn.Sequential(Buffered(), Buffered())
    shard(model, plan_of(dist.get_world_size(), *settings))
    seen: dict[str, torch.dtype] = {"kept": next(model.parameters()).dtype, "buffer": model[0].table.dtype}

    def before(module: nn.Module, args: tuple[Tensor]) -> None:
        seen.update(input=args[0].dtype, parameter=module.up.weight.dtype)

    model[0].register_forward_pre_hook(before)
    model[1].register_forward_pre_hook(lambda _, args: seen.update(between=args[0].dtype))
    for block in model:
        assert isinstance(block, FSDPModule)
        block.set_custom_reduce_scatter(WatchedReduction(seen))
    output = model(torch.ones(2, WIDTH, dtype=given))
    output.float().sum().backward()
    gradient = next(model.parameters()).grad
    assert model[0].count.dtype == torch.int64
    return seen | {"output": output.dtype, "gradient": gradient.dtype}


@pytest.mark.parametrize(
    ("mode", "kept", "computed", "reduced"),
    [
        ("fp32", FP32, FP32, FP32),
        ("bf16", FP32, BF16, FP32),
        ("bf16_reduce", FP32, BF16, BF16),
        ("fp16", FP32, FP16, FP32),
        ("bf16_pure", BF16, BF16, FP32),
    ],
)
def test_dtypes_of_each_mode(
    mode: str, kept: torch.dtype, computed: torch.dtype, reduced: torch.dtype, ranks: Any
) -> None:
    for seen in ranks(2).run(dtypes, FP32, f"precision.mode={mode}"):
        assert seen == {
            "kept": kept,
            "gradient": kept,
            "parameter": computed,
            "input": computed,
            "between": computed,
            "output": computed,
            "reduced": reduced,
            "buffer": FP32,
        }


def test_inputs_are_left_as_they_are_where_casting_is_off(ranks: Any) -> None:
    (seen,) = ranks(1).run(dtypes, BF16, "precision.mode=bf16", "precision.cast_inputs=false")
    assert seen["input"] == BF16
    with pytest.raises(RuntimeError, match="dtype"):
        ranks(1).run(dtypes, FP32, "precision.mode=bf16", "precision.cast_inputs=false")


class Weighted(Block):
    """Computes with a weight of each row, and notes its dtype."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        self.noted = [*getattr(self, "noted", []), weights.dtype]
        return super().forward(x) * weights


class WithUnitInside(nn.Module):
    """The backward of its last module, a unit, begins its recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = Block(), Weighted()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.inner(x, x.float().softmax(-1).max(-1, keepdim=True).values)


def dtypes_of_first_and_recomputed_forward() -> list[torch.dtype]:
    with torch.device("meta"):
        model = nn.Sequential(WithUnitInside(), WithUnitInside())
    units = 'sharding.units={names=["*", "*.inner"]}'
    shard(model, plan_of(dist.get_world_size(), "precision.mode=bf16", "recompute.mode=full", units))
    model(torch.ones(2, WIDTH)).float().sum().backward()
    return model[0].inner.noted


def test_inputs_are_cast_in_the_recomputed_forward_as_in_the_first(ranks: Any) -> None:
    assert ranks(2).run(dtypes_of_first_and_recomputed_forward) == [[torch.bfloat16] * 2] * 2
