"""Dropout is traced as it trains: its masks are counted, whatever mode the model came in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from tests.planner.describe.test_describe import (
    RANDOM_STATE_BYTES,
    allocated,
    highest,
    only_trace_of,
    plan_of,
)


class DropoutBlock(nn.Module):
    """Attention with dropout of its weights, and dropout of its output."""

    def __init__(self, rate: float, width: int) -> None:
        super().__init__()
        self.rate, self.dropout = rate, nn.Dropout(rate)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts)
        rate = self.rate if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return x + self.dropout(self.output(y.transpose(1, 2).flatten(2)))


def dropout_model(rate: float, *, width: int = 64, layers: int = 4) -> nn.Module:
    blocks = (DropoutBlock(rate, width) for _ in range(layers))
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256))


@pytest.mark.long
def test_dropout_is_traced_as_it_trains_though_the_model_is_in_evaluation_mode():
    plan = plan_of("recompute.mode=none", "sharding.units.min_parameters=1")
    model = dropout_model(0.1)
    spec = describe(model.eval(), plan, loss=next_token_loss)
    assert not any(module.training for module in model.modules())
    assert describe(model.train(), plan, loss=next_token_loss) == spec
    difference = allocated(model, plan, vocabulary=256) - highest(only_trace_of(spec, plan).phases)
    assert 0 <= difference <= 4 * RANDOM_STATE_BYTES


def test_on_a_gpu_dropout_keeps_a_byte_for_each_element_and_attention_none():
    plan = plan_of("recompute.mode=none", "precision.mode=bf16")
    kept: list[float] = []
    for rate in (0.0, 0.1):
        spec = describe(dropout_model(rate), plan, loss=next_token_loss, device_type="cuda")
        phases = only_trace_of(spec, plan).phases
        last = next(phase for phase in phases if phase.event == "end_forward")
        kept.append(last.end.activations.value_at(2))
    assert kept[1] - kept[0] == 4 * 2 * plan.run.data.sequence_length * 64
