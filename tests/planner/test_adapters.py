"""Memory of adapters, as predicted: sums as large as the experts that they adapt, and norms of DoRA."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.architectures_hf import CONFIGS
from tests.planner.measured import measured, plan_of, predicted

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96, "num_hidden_layers": 3}
EXPERTS = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen3_moe", [f"adapter.targets={json.dumps(EXPERTS)}"]),
        (
            "qwen3_moe",
            [f"adapter.targets={json.dumps(EXPERTS)}", "recompute.mode=full", "precision.mode=bf16"],
        ),
        (
            "qwen3_moe",
            [f"adapter.targets={json.dumps(EXPERTS)}", "adapter.base_dtype=nf4", "precision.mode=bf16"],
        ),
        ("llama", ["adapter.options={use_dora = true}"]),
    ],
)
def test_adapters_take_the_predicted_bytes(
    model: str, settings: list[str], ranks: Callable[..., Any], tmp_path: Path
) -> None:
    config = CONFIGS[model] | SIZES | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_of(2, f"model.hf={tmp_path}", "adapter.rank=4", "sharding.strategy=full_shard", *settings)
    terms = predicted(plan)
    parts = max(ranks(2).run(measured, plan), key=lambda one: sum(one.values()))
    assert terms.parameter_shards == parts["parameter_shards"]
    assert terms.frozen_shards == parts["frozen_shards"] > 0
    assert terms.optimizer_state == parts["optimizer_state"]
    # On CPUs that multiply in bf16, oneDNN copies operands of up to this size, which no plan counts.
    copies = (48 << 10) * (plan.run.precision.mode == "bf16")
    assert terms.total == pytest.approx(sum(parts.values()), rel=0.01, abs=copies)
