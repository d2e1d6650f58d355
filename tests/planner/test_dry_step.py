"""The planner's closed form gives the bytes of a step on fake ranks, which are those of real ranks."""

import pytest

from fullshard.models.loss import next_token_loss
from fullshard.planner.describe.describe import describe
from fullshard.planner.predict.memory import peak_bytes
from tests.fakes.architectures_hf import write_config
from tests.planner.dry_step import dry_peak_bytes
from tests.planner.measured import measured, meta_model, plan_of

HYBRID = ["sharding.strategy=hybrid_shard", "sharding.shard_degree=8"]
RECOMPUTED_ON_HOST = ["recompute.mode=full", "recompute.inputs=host"]


@pytest.mark.parametrize(
    ("n", "accumulation", "overrides"),
    [
        pytest.param(2, 3, ["sharding.strategy=zero1", "recompute.mode=full"], marks=pytest.mark.long),
        pytest.param(2, 1, ["recompute.mode=offload"], marks=pytest.mark.long),
        pytest.param(2, 2, RECOMPUTED_ON_HOST, marks=pytest.mark.long),
        (2, 1, ["model.hf=llama"]),
        pytest.param(2, 1, ["model.hf=llama", "sharding.tensor_parallel=2"], marks=pytest.mark.long),
    ],
)
def test_dry_step_equals_real_ranks(ranks, tmp_path, n, accumulation, overrides):
    write_config("llama", tmp_path)
    overrides = [one.replace("model.hf=llama", f"model.hf={tmp_path}") for one in overrides]
    plan = plan_of(n, *overrides, accumulation=accumulation)
    real = sum(ranks(n).run(measured, plan)[0].values())
    assert dry_peak_bytes(meta_model(plan), plan) == pytest.approx(real, rel=0.001)


@pytest.mark.parametrize(
    ("device", "overrides"),
    [
        pytest.param("cuda", [*HYBRID, "precision.mode=bf16"], marks=pytest.mark.long),
        pytest.param(
            "cuda",
            ["sharding.strategy=zero1", "recompute.mode=selective", "precision.mode=bf16"],
            marks=pytest.mark.long,
        ),
        ("cuda", ["sharding.strategy=full_shard", "recompute.mode=offload", "precision.mode=bf16"]),
        ("cuda", ["sharding.strategy=full_shard", *RECOMPUTED_ON_HOST, "precision.mode=bf16"]),
    ],
    ids=["hybrid", "zero1", "offload", "inputs on the host"],
)
def test_predicted_peak_equals_dry_step_at_64_ranks(device, overrides):
    plan = plan_of(64, *overrides).model_copy(update={"device": device})
    predicted = peak_bytes(describe(meta_model(plan), plan, loss=next_token_loss), plan)
    assert predicted.total == pytest.approx(dry_peak_bytes(meta_model(plan), plan), rel=0.005)
