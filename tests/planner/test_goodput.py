"""Goodput: Daly's interval is where his expected time is least, and failures only cost."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import SpecError
from fullshard.planner.goodput import best_interval_seconds, predict_goodput, useful_part
from fullshard.planner.search import plan
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import Shape, decoder_spec, run_for

SHAPE = Shape(layers=5, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
stalls, means = st.floats(0.1, 600), st.floats(3600, 1e7)


@given(stalls, means)
def test_no_other_interval_is_notably_better(stall: float, mean: float):
    best = best_interval_seconds(stall, mean)
    there = useful_part(best, stall_seconds=stall, failure_seconds=mean)
    for factor in (0.5, 0.8, 1.25, 2.0):
        other = useful_part(factor * best, stall_seconds=stall, failure_seconds=mean)
        assert there >= other - 1e-4


@given(stalls, means)
def test_rare_failures_give_youngs_interval(stall: float, mean: float):
    far = 1e6 * mean
    assert best_interval_seconds(stall, far) == pytest.approx(math.sqrt(2 * stall * far), rel=0.01)


@given(st.floats(1, 1e6), stalls, means)
def test_the_useful_part_is_less_than_one_and_falls_with_failures(interval: float, stall: float, mean: float):
    often, seldom = (
        useful_part(interval, stall_seconds=stall, failure_seconds=one) for one in (mean, 2 * mean)
    )
    assert 0 <= often <= seldom < 1


@pytest.mark.parametrize(("mode", "rate"), [("sync", 1e9), ("async", 2e10)])
def test_a_checkpoint_in_the_background_stalls_for_its_copy_and_not_before_the_last_is_written(
    mode: str, rate: float
):
    rates = {"disk_bytes_per_second": 1e9, "host_bytes_per_second": 2e10}
    hardware = hardware_of(1, 8).model_copy(update=rates)
    best = plan(
        decoder_spec(SHAPE), hardware, run_for(SHAPE, "train.global_batch=8", f"checkpoint.mode={mode}")
    )
    assert best.prediction is not None
    size = best.prediction.memory.staged_checkpoint_bytes
    found = predict_goodput(best, hardware, rank_failure_seconds=8e5)
    assert found.stall_seconds == pytest.approx(size / rate)
    assert found.interval_seconds >= found.write_seconds == pytest.approx(size / 1e9)
    assert found.failure_seconds == 1e5


def test_an_unknown_drive_is_refused():
    hardware = hardware_of(1, 8)
    best = plan(decoder_spec(SHAPE), hardware, run_for(SHAPE, "train.global_batch=8"))
    with pytest.raises(SpecError, match="how long a checkpoint takes"):
        predict_goodput(best, hardware, rank_failure_seconds=1e6)
