"""The FLOP per token of a described model are those of the formula, and those that torch counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fullshard.models.build import attention_window_share
from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.spec.records.measurement import model_flops_per_token
from tests.planner.describe.test_describe import decoder, plan_of, specify


def test_the_flops_are_those_of_the_formula():
    spec, section = specify(plan_of()), plan_of().run.decoder_config
    multiplied = spec.numel - section.vocabulary * section.d_model  # the table is looked up
    norms = section.d_model * (2 * section.layers + 1)
    formula = model_flops_per_token(
        multiplied - norms, layers=section.layers, d_model=section.d_model, sequence_length=64
    )
    assert spec.active_numel == multiplied - norms
    assert spec.flops_per_token == pytest.approx(formula, rel=0.01)  # the diagonal is not masked


def test_a_sliding_window_leaves_out_the_pairs_outside_of_it() -> None:
    """`attention_window_share` counts them by layer; a window longer than the sequence leaves out none."""
    kinds = ["sliding_attention", "full_attention", "linear_attention"]
    config = SimpleNamespace(sliding_window=8, layer_types=kinds)
    config.get_text_config = lambda: config
    model: Any = nn.Module()
    assert attention_window_share(model, sequence_length=32) == 1
    model.config = config
    assert attention_window_share(model, sequence_length=32) == (8 / 32 + 1) / 2
    assert attention_window_share(model, sequence_length=8) == 1
    del config.layer_types
    assert attention_window_share(model, sequence_length=32) == 8 / 32


@pytest.mark.parametrize("trained", ["", "blocks.2", "feed_forward.up", "embedding"])
def test_the_flops_leave_out_the_gradients_of_frozen_parameters(trained: str) -> None:
    plan = plan_of("train.loss_chunk=0")
    model = decoder(plan)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    flops = describe(model, plan, loss=next_token_loss).flops_per_token
    real = model.to_empty(device="cpu")
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # two counted matmuls
        next_token_loss(real, {"tokens": tokens, "labels": tokens})[0].backward()
    assert flops == pytest.approx(counter.get_total_flops() / 64, rel=0.06)
