"""The FLOP per token of a described model are those of the formula, and those that torch counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fullshard.models.build import attention_flop_per_token, attention_window_share
from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.machine.catalog import hardware_on
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


def test_attention_that_is_written_out_is_counted_by_its_windows_and_not_as_parameters() -> None:
    """gpt-oss-20b: 3.6B active parameters, half of its 24 blocks see 128 positions."""
    subject = resolve_model_to_plan("gpt-oss-20b")
    spec = subject.describe_model(subject.load_run(["precision.mode=bf16"]), hardware_on("8xH100"))
    assert not any(kernel.kind == "attention" for kernel in spec.kernels)
    assert spec.active_numel == pytest.approx(3.61e9, rel=1e-3)
    attention = 12 * 64 * 64 * 12 * (spec.sequence_length + 128)
    assert spec.flops_per_token == pytest.approx(6 * spec.active_numel + attention, rel=1e-6)


def test_the_flop_of_attention_follow_from_the_config() -> None:
    config = SimpleNamespace(num_attention_heads=4, hidden_size=32, num_hidden_layers=3)
    config.get_text_config = lambda: config
    model: Any = nn.Module()
    assert attention_flop_per_token(model, sequence_length=16) == 0
    model.config = config
    assert attention_flop_per_token(model, sequence_length=16) == 4 * 3 * 32 * 16
    config.layer_types = ["sliding_attention", "linear_attention", "full_attention"]
    assert attention_flop_per_token(model, sequence_length=16) == 4 * 2 * 32 * 16


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
