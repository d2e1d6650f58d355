"""After a rank ran out of memory, the planner names settings that fit into what the rank had."""

import pytest

from fullshard.jobs.after_out_of_memory import available_bytes, choose_fitting_settings
from fullshard.planner.search.search import plan
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.records.event import RunEvent
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import Shape, decoder_spec, run_for

SHAPE = Shape(layers=12, d_model=2048, d_ff=5632, vocabulary=32000, sequence=2048)
GIB = 1 << 30


def failure(*, held: int, requested: int | None) -> RunEvent:
    return RunEvent.now(
        "out_of_memory", attempt=1, details={"held_bytes": held, "requested_bytes": requested}
    )


def prediction_of(plan: Plan) -> Prediction:
    assert plan.prediction is not None
    return plan.prediction


def test_the_named_settings_need_less_than_the_rank_had():
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    needed = prediction_of(failed).memory.total
    text = choose_fitting_settings(
        spec,
        hardware,
        run=run,
        plan=failed,
        failures=[failure(held=needed // 2, requested=needed // 8)],
    )
    assert "(was " in text
    found = {change.split(" = ")[0] for change in text.partition(":")[0].split(", ")}
    assert found & {"train.microbatch", "recompute.mode", "sharding.strategy"}


def test_a_rank_that_needed_twice_the_plan_leaves_half_of_its_memory_to_plan_with():
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    prediction = prediction_of(failed)
    total, beside = prediction.memory.total, prediction.required_device_bytes - prediction.memory.total
    less_available = failure(held=total // 2, requested=total // 4)
    assert available_bytes(prediction, less_available) == total // 2 + beside
    twice_as_large = failure(held=total, requested=total)
    assert available_bytes(prediction, twice_as_large) == pytest.approx(total // 2 + beside, abs=1)


def test_where_no_open_setting_helps_the_pinned_one_is_named():
    pins = (
        "train.global_batch=64",
        "train.microbatch=8",
        "recompute.mode=none",
        "sharding.strategy=full_shard",
    )
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, *pins)
    failed = plan(spec, hardware, run)
    held = prediction_of(failed).memory.total // 2
    text = choose_fitting_settings(
        spec, hardware, run=run, plan=failed, failures=[failure(held=held, requested=None)]
    )
    assert text.startswith("no plan of this run fits into the ")
    assert "train.microbatch" in text or "recompute.mode" in text
