"""After a rank ran out of memory, the planner names settings that fit into what the rank had."""

from datetime import UTC, datetime

import pytest

from fullshard.planner.search import plan
from fullshard.planning.after_out_of_memory import available_bytes, choose_fitting_settings
from fullshard.spec.out_of_memory import OutOfMemoryReport
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import Shape, decoder_spec, run_for

SHAPE = Shape(layers=12, d_model=2048, d_ff=5632, vocabulary=32000, sequence=2048)
GIB = 1 << 30


def report(*, held: int, requested: int | None, plan: Plan) -> OutOfMemoryReport:
    prediction = prediction_of(plan)
    return OutOfMemoryReport(
        at=datetime(2026, 11, 25, tzinfo=UTC),
        rank=3,
        host="node",
        device="cuda:3",
        step=2,
        phase="backward",
        place="model.py:7 in forward",
        error="CUDA out of memory.",
        requested_bytes=requested,
        held={"parameter_shards": held // 4, "rest": held - held // 4},
        reserved_bytes=held + 7,
        planned=prediction.memory,
        planned_limit_bytes=prediction.capacity_bytes,
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
        reports=[report(held=needed // 2, requested=needed // 8, plan=failed)],
    )
    assert "(was " in text
    found = {change.split(" = ")[0] for change in text.partition(":")[0].split(", ")}
    assert found & {"train.microbatch", "recompute.mode", "sharding.strategy"}


def test_a_rank_that_needed_twice_the_plan_leaves_half_of_its_memory_to_plan_with():
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    prediction = prediction_of(failed)
    total, beside = prediction.memory.total, prediction.required_device_bytes - prediction.memory.total
    less_available = report(held=total // 2, requested=total // 4, plan=failed)
    assert available_bytes(prediction, less_available) == total // 2 + beside
    twice_as_large = report(held=total, requested=total, plan=failed)
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
        spec, hardware, run=run, plan=failed, reports=[report(held=held, requested=None, plan=failed)]
    )
    assert text.startswith("no plan of this run fits into the ")
    assert "train.microbatch" in text or "recompute.mode" in text


def test_the_report_has_what_was_held_beside_the_plan_and_says_which_was_wrong():
    spec, hardware, run = decoder_spec(SHAPE), hardware_of(), run_for(SHAPE, "train.global_batch=64")
    failed = plan(spec, hardware, run)
    total = prediction_of(failed).memory.total
    text = report(held=total // 2, requested=GIB, plan=failed).format_text()
    assert "rank 3 (node, cuda:3) ran out of memory in backward of step 2" in text
    assert "asked for   1.00 GiB more" in text
    assert "Less was available than planned" in text
    assert "More was needed than planned" in report(held=2 * total, requested=None, plan=failed).format_text()
