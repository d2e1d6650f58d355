"""Units too small or too large are told of, with figures; small models are left in peace."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.models.decoder import DecoderModel
from fullshard.sharding.apply import shard
from fullshard.sharding.unit_sizes import UnitSizeWarning, unit_size_messages
from fullshard.sharding.units import find_units
from fullshard.spec.model_section import DecoderConfig
from fullshard.spec.run import UnitSection
from tests.fakes.architectures import on_meta
from tests.fakes.plans import STRATEGIES, plan_of


def findings(model: nn.Module, world_size: int, *overrides: str, policy: str = "block") -> list[str]:
    plan = plan_of(world_size, f"train.global_batch={world_size}", *overrides)
    section = plan.run.sharding.units
    if policy == "leaves":
        units = find_units(model, section, predicate=lambda _, module: not list(module.children()))
    else:
        units = find_units(model, section)
    return unit_size_messages(units, plan)


def decoder(**fields: Any) -> DecoderModel:
    with torch.device("meta"):
        return DecoderModel(DecoderConfig(**fields))


SEVEN_BILLION = {
    "vocabulary": 32000,
    "d_model": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "d_ff": 14336,
}


def test_blocks_of_a_large_model_are_of_the_right_size() -> None:
    for world_size in (8, 64, 512):
        assert findings(decoder(**SEVEN_BILLION), world_size, "precision.mode=bf16") == []


def test_units_are_too_small_where_each_rank_gives_too_little_to_a_gather() -> None:
    # A block of 12.6 M parameters in bf16: 768 KiB from each of 32 ranks, 96 KiB from each of 256.
    model = decoder(vocabulary=32000, d_model=1024, layers=24, heads=16, kv_heads=16, d_ff=2730)
    assert findings(model, 32, "precision.mode=bf16") == []
    (finding,) = findings(model, 256, "precision.mode=bf16")
    assert "26 of 26 units are small: each of 256 ranks gives less than 256.00 KiB" in finding
    assert "blocks.0, the smallest: 96.00 KiB" in finding


def test_a_unit_for_every_layer_is_too_small() -> None:
    model = decoder(vocabulary=32000, d_model=512, layers=12, heads=8, kv_heads=2, d_ff=1365)
    (finding,) = findings(model, 8, policy="leaves")
    assert "units are small" in finding
    assert findings(model, 8) == []


def test_a_unit_is_too_large_where_it_is_most_of_the_model() -> None:
    model = decoder(vocabulary=100_000, d_model=512, layers=2, heads=8, kv_heads=2, d_ff=1365, tied=True)
    (finding,) = findings(model, 4)
    assert "the unit (root) is 195.31 MiB of the model's 216.32 MiB (90%)" in finding
    assert "4 ranks" in finding


@pytest.mark.parametrize("strategy", ["no_shard", "zero1", "shard_grad_op"])
def test_no_unit_is_too_large_where_all_stay_gathered(strategy: str) -> None:
    model = decoder(vocabulary=100_000, d_model=512, layers=2, heads=8, kv_heads=2, d_ff=1365, tied=True)
    assert findings(model, 4, *STRATEGIES[strategy]) == []


def test_small_models_are_left_in_peace() -> None:
    assert findings(decoder(), 2) == []
    assert findings(decoder(), 8, policy="leaves") == []
    assert findings(on_meta("one_layer"), 2) == []


def warned() -> list[tuple[type, str, str]]:
    model = decoder(vocabulary=34_000, d_model=512, layers=1, heads=8, kv_heads=2, d_ff=512, tied=True)
    plan = plan_of(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard(model, plan, init=lambda module: [nn.init.zeros_(p) for p in module.parameters(recurse=False)])
    return [(w.category, str(w.message), w.filename) for w in caught if w.category is UnitSizeWarning]


def test_rank_0_warns_once_where_shard_is_called(ranks: Callable[..., Any]) -> None:
    first, second = ranks(2).run(warned)
    assert second == []
    ((category, message, filename),) = first
    assert category is UnitSizeWarning
    assert message.startswith("the unit (root) is 66.41 MiB")
    assert filename == __file__


def test_a_plan_for_one_rank_has_nothing_to_warn_of() -> None:
    model = decoder(vocabulary=100_000, d_model=512, layers=2, heads=8, kv_heads=2, d_ff=1365, tied=True)
    assert findings(model, 1) == []
    assert find_units(model, UnitSection())
