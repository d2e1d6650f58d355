"""Recurrent layers are described at any length, with their FLOP and the bytes that they take on the CPU."""

from functools import cache

import pytest
import torch
from torch import nn

from fullshard.profiler.memory import measure_peak_memory
from fullshard.spec.model import ModelSpec
from fullshard.tracing.describe import describe
from tests.fakes.architectures import VOCABULARY, Recurrent, loss_of
from tests.fakes.plans import plan_of

WIDTH, ROWS = 64, 2


@cache
def described(kind: type[nn.RNNBase], length: int, *, precision: str = "bf16") -> ModelSpec:
    with torch.device("meta"):
        model = Recurrent(kind, width=WIDTH)
        batch = torch.empty((ROWS, length), dtype=torch.int64)
    settings = (f"train.global_batch={ROWS}", "recompute.mode=none", f"precision.mode={precision}")
    plan = plan_of(1, *settings, f"data.sequence_length={length}")
    return describe(model, plan, loss=loss_of, batch=batch)


@pytest.mark.parametrize("kind", [nn.RNN, pytest.param(nn.GRU, marks=pytest.mark.long), nn.LSTM])
def test_flops_and_bytes_are_those_of_the_layer(kind: type[nn.RNNBase]) -> None:
    spec, length = described(kind, 64, precision="fp32"), 64
    model = Recurrent(kind, width=WIDTH)
    assert spec.active_numel == sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert spec.flops_per_token == 6 * spec.active_numel
    tokens = torch.randint(0, VOCABULARY, (ROWS, length))
    with measure_peak_memory(torch.device("cpu")) as peak:
        loss_of(model, tokens).backward()
    peaks = (moment for phase in spec.traces[0].phases for moment in phase.peaks)
    highest = max(sum(line.value_at(ROWS) for line in moment) for moment in peaks)
    assert highest == pytest.approx(peak.bytes, rel=0.05)


def test_a_longer_sequence_takes_no_more_operations_to_trace() -> None:
    short, long = described(nn.RNN, 64), described(nn.RNN, 2048)
    launches = [sum(one.times for phase in s.traces[0].phases for one in phase.work) for s in (short, long)]
    assert launches[0] == launches[1]
    assert long.flops_per_token == short.flops_per_token


def test_recurrent_layers_are_torchs_own_after_a_description() -> None:
    own = torch._VF.gru
    described(nn.GRU, 4)
    assert torch._VF.gru is own
    x = torch.ones(1, 3, 4)
    output, _ = nn.GRU(4, 5, batch_first=True)(x)
    assert output.shape == (1, 3, 5)
