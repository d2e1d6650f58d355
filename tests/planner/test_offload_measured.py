"""Bytes of a tier are those that ranks take, on the device and on the host."""

from pathlib import Path

import pytest

from fullshard.planner.offload import TIERS
from fullshard.planner.search import predict
from fullshard.sharding.describe import describe
from fullshard.training.loss import next_token_loss
from tests.fakes.hardware import cpu_of
from tests.planner.measured import measured, meta_model, plan_of


@pytest.mark.parametrize("tier", TIERS[1:])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_bytes_of_a_tier_are_as_planned(ranks, tier: str, precision: str, tmp_path: Path):
    plan = plan_of(
        2,
        "sharding.strategy=full_shard",
        f"precision.mode={precision}",
        f"offload.tier={tier}",
        "offload.group_parameters=100000",
        f"run.dir={tmp_path}",
    )
    spec = describe(meta_model(plan), plan, loss=next_token_loss)
    hardware = cpu_of(2).model_copy(update={"disk_bytes_per_second": 1e9})
    prediction = predict(spec, plan, hardware).prediction
    assert prediction is not None
    assert prediction.offload is not None
    for found in ranks(2).run(measured, plan):
        host = found.pop("host")
        assert prediction.offload.host_bytes == pytest.approx(host, rel=0.01)
        assert prediction.memory.total == pytest.approx(sum(found.values()), rel=0.03)
        assert prediction.memory.total + prediction.offload.host_bytes == pytest.approx(
            sum(found.values()) + host, rel=0.02
        )
