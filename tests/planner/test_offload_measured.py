"""Bytes of a tier are those that ranks take on the device and on the host, and those that drives move."""

import itertools
from pathlib import Path

import pytest

from fullshard.models.loss import next_token_loss
from fullshard.offload.state import find_offloaded_state
from fullshard.planner.predict.offload import TIERS
from fullshard.planner.search.search import predict
from fullshard.spec.groups import PAGE_BYTES
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import MemoryTerms, OffloadTerms
from fullshard.spec.records.measurement import DriveTrafficBytes
from fullshard.training.optimizer import build_optimizer
from fullshard.training.shard import shard
from fullshard.training.state import TrainState
from fullshard.training.step import run_step
from tests.fakes.hardware import cpu_of
from tests.planner.measured import described, measured, meta_model, microbatches, plan_of

BASE = "*[ndg].*"  # all but the norms
CASES = list(itertools.product(TIERS[1:], ("fp32", "bf16"), ("host", "device")))
QUICK = {("optimizer:cpu", "bf16", "device"), ("params+optimizer:nvme", "bf16", "host")}


@pytest.mark.parametrize(
    ("tier", "precision", "update"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.long) for case in CASES],
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
        "offload.sub_group_parameters=100000",
        f"run.dir={tmp_path}",
    )
    check_bytes(ranks, plan)


def test_averages_of_a_tier_are_in_host_memory_as_planned(ranks):
    overrides = ("sharding.strategy=full_shard", "offload.tier=params+optimizer:cpu", "ema.decay=0.9")
    with_average, without = (planned(plan_of(2, *overrides[:count])) for count in (3, 2))
    assert with_average[0] == without[0]
    assert with_average[1].host_bytes == pytest.approx(4 / 3 * without[1].host_bytes, rel=0.01)
    check_bytes(ranks, plan_of(2, *overrides))


@pytest.mark.parametrize(
    "tier", ["params+optimizer:nvme", pytest.param("optimizer:nvme", marks=pytest.mark.long)]
)
def test_bytes_of_a_tier_beside_a_frozen_base_are_as_planned(ranks, tier: str, tmp_path: Path):
    """Which is in fp32, and computed in bf16."""
    shards = ("sharding.strategy=full_shard", "precision.mode=bf16", "offload.sub_group_parameters=100000")
    check_bytes(ranks, plan_of(2, *shards, f"offload.tier={tier}", f"run.dir={tmp_path}"), frozen=BASE)


def check_bytes(ranks, plan: Plan, *, frozen: str = "") -> None:
    memory, offload = planned(plan, frozen)
    for found in ranks(2).run(measured, plan, frozen):
        host = found.pop("host")
        assert offload.host_bytes == pytest.approx(host, rel=0.01)
        assert memory.total == pytest.approx(sum(found.values()), rel=0.03)
        assert memory.total + offload.host_bytes == pytest.approx(sum(found.values()) + host, rel=0.02)


def moved(plan: Plan, frozen: str, warm: int, steps: int) -> list[DriveTrafficBytes]:
    """On a rank: what the drive reads and writes in each of `steps`, after so many others."""
    model = shard(meta_model(plan, frozen=frozen), plan)
    state = TrainState(model, build_optimizer(model, plan))
    for _ in range(warm + steps + 1):
        run_step(state, plan, microbatches=microbatches(plan), loss=next_token_loss)
    state.wait_for_updates()
    offloaded = find_offloaded_state(model)
    assert offloaded is not None, "the plan has a tier"
    offloaded.close()
    return list(offloaded.settings.traffic.steps)[warm:]


def planned(plan: Plan, frozen: str = "") -> tuple[MemoryTerms, OffloadTerms]:
    hardware = cpu_of(plan.world_size).model_copy(update={"disk_bytes_per_second": 1e9})
    prediction = predict(described(plan, frozen=frozen), plan, hardware).prediction
    assert prediction is not None
    assert prediction.offload is not None
    return prediction.memory, prediction.offload


SETTINGS: dict[str, tuple[int, int, str, tuple[str, ...]]] = {
    "full_shard": (2, 1, "", ("sharding.strategy=full_shard",)),
    "one group": (1, 1, "", ("sharding.strategy=full_shard", "offload.sub_group_parameters=64000000")),
    "accumulated": (2, 3, "", ("sharding.strategy=full_shard", "recompute.mode=full")),
    "kept": (1, 2, "", ("sharding.strategy=shard_grad_op",)),
    "replicas": (4, 2, "", ("sharding.strategy=hybrid_shard", "sharding.shard_degree=2")),
    "frozen": (2, 2, "*.feed_forward.*", ("sharding.strategy=full_shard",)),
    "frozen base": (2, 1, BASE, ("sharding.strategy=full_shard", "precision.mode=bf16")),
    "frozen, kept": (2, 2, BASE, ("sharding.strategy=shard_grad_op",)),
    "frozen, recomputed": (2, 1, BASE, ("sharding.strategy=full_shard", "recompute.mode=full")),
    "frozen, few units": (2, 2, BASE, ("sharding.strategy=full_shard", "model.layers=2")),
    "few units": (2, 2, "", ("sharding.strategy=full_shard", "model.layers=2")),
    "state alone": (2, 1, "", ("offload.tier=optimizer:nvme",)),
    "bf16": (2, 2, "", ("precision.mode=bf16", "offload.moments=bf16")),
}
QUICK_SETTINGS = {"accumulated", "frozen base"}


@pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=[] if s in QUICK_SETTINGS else pytest.mark.long) for s in SETTINGS]
)
def test_drive_traffic_equals_the_plan(ranks, setting: str, tmp_path: Path):
    count, accumulation, frozen, overrides = SETTINGS[setting]
    plan = plan_of(
        count,
        "offload.tier=params+optimizer:nvme",
        "model.layers=6",
        "offload.sub_group_parameters=300000",
        *overrides,
        f"run.dir={tmp_path}",
        accumulation=accumulation,
    )
    _, terms = planned(plan, frozen)
    for steps in ranks(count).run(moved, plan, frozen, 2, 2):
        reads, written = [one.read for one in steps], [one.written for one in steps]
        assert reads == pytest.approx([terms.disk_read_bytes] * len(reads), rel=0.005)
        # Where little is trained, what is written beside it (a manifest) is more than that.
        assert written == pytest.approx([terms.disk_written_bytes] * len(written), rel=0.005, abs=PAGE_BYTES)
