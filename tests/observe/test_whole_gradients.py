"""Gradients that wait for the last microbatch are counted on the same line as they are predicted on."""

import pytest

from tests.planner.measured import measured, plan_of, predicted


@pytest.mark.parametrize("strategy", ["no_shard", "zero1"])
def test_whole_gradients_are_not_counted_as_units_in_flight(ranks, strategy: str):
    """In bf16, they are cast to fp32 where a unit's backward ends: by FSDP2."""
    plan = plan_of(
        2,
        f"sharding.strategy={strategy}",
        "precision.mode=bf16",
        "recompute.mode=full",
        "train.gradient_sync=last_microbatch",
        accumulation=3,
    )
    terms, found = predicted(plan), ranks(2).run(measured, plan)[0]
    assert terms.whole_gradients + terms.gradients > terms.units_in_flight
    assert found["units_in_flight"] == pytest.approx(terms.units_in_flight, rel=0.02)
