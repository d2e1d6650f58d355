"""What was measured alone is scaled until whole steps come out as measured."""

import pytest

from fullshard.planner.calibration_fit import RateSlowdowns, StepSample, fit_rates, slow_down_hardware
from fullshard.planner.step_time import predict_terms
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import Shape, decoder_spec, plan_for

RANKS = 4
SMALL = Shape(layers=5, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
OVERRIDES = (
    ("sharding.strategy=full_shard",),
    ("sharding.strategy=no_shard",),
    ("sharding.strategy=shard_grad_op", "train.microbatch=1"),
    ("sharding.strategy=zero1", "train.microbatch=2"),
)


def steps_on(hardware) -> list[StepSample]:
    spec = decoder_spec(SMALL)
    plans = [plan_for(SMALL, RANKS, "train.global_batch=16", *more) for more in OVERRIDES]
    return [StepSample(spec, plan, predict_terms(spec, plan, hardware).total) for plan in plans]


def test_steps_that_are_as_predicted_change_nothing():
    hardware = hardware_of(1, RANKS)
    fit = fit_rates(hardware, steps_on(hardware))
    assert fit.factors == pytest.approx(RateSlowdowns(), abs=0.03)
    assert fit.errors == pytest.approx([0.0] * len(OVERRIDES), abs=1e-3)


@pytest.mark.parametrize(
    "factors",
    [
        RateSlowdowns(collective=3.0),
        pytest.param(RateSlowdowns(compute=1.7, memory=1.7), marks=pytest.mark.long),
        pytest.param(RateSlowdowns(unit=4), marks=pytest.mark.long),
    ],
)
def test_steps_of_a_slower_machine_are_found_again(factors):
    hardware = hardware_of(1, RANKS)
    steps = steps_on(slow_down_hardware(hardware, factors))
    fit = fit_rates(hardware, steps)
    before = (predict_terms(one.spec, one.plan, hardware).total / one.seconds - 1 for one in steps)
    assert max(map(abs, fit.errors)) < 0.05
    assert max(map(abs, fit.errors)) < max(map(abs, before)) / 2


def test_without_steps_all_stays_as_it_was_measured():
    hardware = hardware_of(1, RANKS)
    assert fit_rates(hardware, []).factors == RateSlowdowns()
