"""Bytes of a tier are those that ranks take, on the device and on the host."""

from pathlib import Path

import pytest

from fullshard.planner.offload import TIERS
from fullshard.planner.search import predict
from fullshard.sharding.describe import describe
from fullshard.training.loss import next_token_loss
from tests.fakes.hardware import cpu_of
from tests.planner.measured import measured, meta_model, plan_of

QUICK = {
    ("optimizer:cpu", "fp32", "host"),
    ("optimizer:cpu", "bf16", "device"),
    ("params+optimizer:nvme", "bf16", "host"),
}


@pytest.mark.parametrize(
    ("tier", "precision", "update"),
    [
        pytest.param(
            tier, precision, update, marks=[] if (tier, precision, update) in QUICK else pytest.mark.long
        )
        for tier in TIERS[1:]
        for precision in ("fp32", "bf16")
        for update in ("host", "device")
    ],
)
def test_bytes_of_a_tier_are_as_planned(  # signature: pytest's
    ranks, tier: str, precision: str, update: str, tmp_path: Path
):
    plan = plan_of(
        2,
        "sharding.strategy=full_shard",
        f"precision.mode={precision}",
        f"offload.tier={tier}",
        f"offload.update={update}",
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
