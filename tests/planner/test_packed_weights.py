"""The plan of a packed base is what ranks allocate, and large models fit small GPUs."""

from collections.abc import Callable
from typing import Any

import pytest

from fullshard.planner.describe.describe_run import describe_run
from fullshard.planner.search.candidates import require_prediction
from fullshard.planner.search.search import search
from fullshard.planner.target import resolve_model_to_plan
from fullshard.spec.machine.catalog import hardware_on
from tests.planner.measured import measured, plan_of, predicted

MIXTURE = ("model.experts=4", "model.experts_per_token=2")
CASES = [
    (1, "nf4", "precision.mode=bf16"),
    (2, "nf4", "precision.mode=bf16"),
    (2, "nf4", "precision.mode=fp32", "recompute.mode=full"),
    (3, "int8", "precision.mode=bf16", "recompute.mode=selective"),
    (2, "int8", "precision.mode=bf16", "sharding.tensor_parallel=2"),
    (2, "nf4", "sharding.strategy=zero1"),
    (2, "nf4", *MIXTURE, "precision.mode=bf16"),
    (3, "int8", *MIXTURE, "precision.mode=bf16", "recompute.mode=full"),
    (2, "nf4", *MIXTURE, "precision.mode=bf16", "recompute.mode=selective"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_allocates_what_is_predicted(ranks: Callable[[int], Any], case: tuple[Any, ...]) -> None:
    count, form, *settings = case
    data = 1 if any("tensor" in one for one in settings) else count
    batch = f"train.global_batch={2 * data}"
    plan = plan_of(count, "adapter.rank=4", f"adapter.base_dtype={form}", batch, *settings)
    for rank, parts in enumerate(ranks(count).run(measured, plan)):
        terms = predicted(plan, rank=rank)
        assert terms.total == pytest.approx(sum(parts.values()), rel=0.01)
        assert terms.frozen_shards == pytest.approx(parts["frozen_shards"], rel=0.01)


def test_experts_keep_no_matrices_until_backward() -> None:
    """A further layer takes less than its matrices in bf16, also without recompute."""
    fixed = ["adapter.rank=4", "adapter.base_dtype=nf4", "precision.mode=bf16", "data.sequence_length=8"]
    fixed += ["recompute.mode=none", *MIXTURE]
    peaks = [predicted(plan_of(1, *fixed, f"model.layers={layers}")).total for layers in (2, 4)]
    assert peaks[1] - peaks[0] < 2 * 3 * 4 * 128 * 384 * 2


SETTINGS = [
    *("adapter.rank=16", "adapter.base_dtype=nf4", "data.sequence_length=2048", "train.global_batch=16"),
    *("precision.mode=bf16", "recompute.mode=full", "run.compile=false"),
]


@pytest.mark.parametrize(
    ("model", "hardware_name"),
    [("llama3-8b", "1xRTX4090"), pytest.param("llama3-70b", "2xA100-80GB", marks=pytest.mark.long)],
)
def test_a_large_model_fits_small_gpus(model: str, hardware_name: str) -> None:
    """8B parameters fit one GPU of 24 GB, and 70B two of 80 GB."""
    hardware = hardware_on(hardware_name)
    run = resolve_model_to_plan(model).load_run(SETTINGS)
    spec = describe_run(run, "cuda")
    best = search(spec, hardware, run).best
    assert best is not None
    prediction = require_prediction(best)
    assert prediction.required_device_bytes <= 0.95 * prediction.capacity_bytes
    assert best.run.offload.tier == "none"
    assert spec.numel == pytest.approx(float(model[7:-1]) * 1e9, rel=0.02)
