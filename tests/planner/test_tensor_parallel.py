"""The tensor-parallel axis: what it divides, and what it sends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.planner.collectives import collective_seconds, shard_group_layout
from fullshard.planner.memory import (
    PeakLowerBoundSettings,
    mesh_dependent_bytes,
    peak_bytes,
    peak_lower_bound,
    trace_dependent_peak_bytes,
)
from fullshard.planner.search import predict
from fullshard.planner.step_time import StepTimePredictor, predict_terms
from fullshard.planner.tensor_parallel import hidden_width, split_parameter_shape
from fullshard.spec.plan import Plan
from tests.fakes.hardware import hardware_of
from tests.fakes.specs import LLAMA_8B, Shape, decoder_spec, run_for
from tests.planner.test_search import prediction_of
from tests.planner.test_step_time import slowed

SHAPES = st.builds(
    Shape,
    layers=st.integers(3, 20),
    d_model=st.sampled_from([64, 512, 2048]),
    d_ff=st.sampled_from([192, 4096]),
    vocabulary=st.sampled_from([256, 32_000]),
    sequence=st.sampled_from([64, 2048]),
)
WORLD = 8


def plan_of(shape: Shape, degree: int, *overrides: str, world: int = WORLD) -> Plan:
    fixed = [f"sharding.tensor_parallel={degree}", "train.microbatch=1", "model.heads=32", "model.kv_heads=8"]
    sizes = [f"model.d_model={shape.d_model}", f"model.d_ff={shape.d_ff}"]
    run = run_for(shape, f"train.global_batch={world}", *fixed, *sizes, *overrides)
    return Plan.from_run_for_prediction(run, world_size=world, device="cuda")


@st.composite
def plans(draw: st.DrawFn, shape: Shape, *, degrees: tuple[int, ...] = (2, 4, 8)) -> Plan:
    return plan_of(
        shape,
        draw(st.sampled_from(degrees)),
        draw(st.sampled_from(["sharding.strategy=full_shard", "sharding.strategy=shard_grad_op"])),
        f"recompute.mode={draw(st.sampled_from(['none', 'full', 'selective']))}",
        f"prefetch.mode={draw(st.sampled_from(['none', 'implicit', 'explicit']))}",
        f"train.gradient_sync={draw(st.sampled_from(['every_microbatch', 'last_microbatch']))}",
    )


def test_one_rank_for_each_matmul_is_the_same_prediction():
    spec, hardware = decoder_spec(LLAMA_8B), hardware_of(2, 8)
    plain = Plan.from_run(run_for(LLAMA_8B, "train.global_batch=16"), world_size=16, device="cuda")
    named = run_for(LLAMA_8B, "train.global_batch=16", "sharding.tensor_parallel=1")
    split = Plan.from_run_for_prediction(named, world_size=16, device="cuda")
    assert predict(spec, split, hardware) == predict(spec, plain, hardware)
    assert prediction_of(predict(spec, split, hardware)).time.model_parallel == 0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_shards_of_matrices_stay_and_vectors_are_on_every_rank(degree: int):
    spec = decoder_spec(LLAMA_8B)
    one, split = (peak_bytes(spec, plan_of(LLAMA_8B, t)).parameter_shards for t in (1, degree))
    vectors = sum(p.numel for unit in spec.units for p in unit.parameters if len(p.shape) == 1)
    assert split - one == 4 * vectors * (degree - 1) // WORLD


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_activations_are_divided(degree: int):
    spec = decoder_spec(LLAMA_8B)
    one, split = (peak_bytes(spec, plan_of(LLAMA_8B, t, "recompute.mode=none")) for t in (1, degree))
    assert split.activations == pytest.approx(one.activations / degree, rel=1e-6)


@settings(max_examples=25)
@given(st.data())
def test_each_rank_computes_its_part_at_no_better_a_rate(data: st.DataObject):
    """Launches are smaller, and there are as many of them."""
    shape = data.draw(SHAPES)
    plan, spec, hardware = data.draw(plans(shape)), decoder_spec(shape), hardware_of(1, 8)
    whole = plan.model_copy(update={"tensor_parallel": 1})
    timer = StepTimePredictor(spec, hardware)
    sent = timer.predict_time(plan).model_parallel * 1e12
    own, all_of_it = timer.compute_ticks(plan), timer.compute_ticks(whole)
    assert own.issue == all_of_it.issue
    assert (own.device - sent) * plan.tensor_parallel >= all_of_it.device * (1 - 1e-6)
    assert own.device - sent <= all_of_it.device * (1 + 1e-6)


@pytest.mark.parametrize(("mode", "of_a_block"), [("none", 8), ("full", 12)])
def test_a_block_sends_four_times_forward_and_four_backward(mode: str, of_a_block: int):
    """And four more where all of it is computed again; embedding and head once each way."""
    spec, hardware = decoder_spec(LLAMA_8B), hardware_of(1, 8)
    plan = plan_of(LLAMA_8B, 4, f"recompute.mode={mode}")
    group = shard_group_layout(4, per_node=8, world_size=8)
    once = [
        collective_seconds(kind, 2 * 8192 * 4096, group=group, hardware=hardware)
        for kind in ("all_gather", "reduce_scatter")
    ]
    times = 32 * of_a_block + 4
    # One sequence each of 4 ranks' 8: what the two groups do is done four times a step by each.
    told = predict_terms(spec, plan, hardware).model_parallel
    assert told == pytest.approx(times * sum(once) / 2 * plan.accumulation, rel=1e-6)


@settings(max_examples=25)
@given(st.data())
def test_less_bandwidth_is_never_a_shorter_step(data: st.DataObject):
    shape = data.draw(SHAPES)
    plan, spec, hardware = data.draw(plans(shape)), decoder_spec(shape), hardware_of(2, 4)
    name, part = data.draw(st.sampled_from(["within", "across"])), data.draw(st.floats(0.05, 1.0))
    slower = hardware.model_copy(update={name: slowed(hardware, name, part)})
    before, after = (predict_terms(spec, plan, one).total for one in (hardware, slower))
    assert after >= before * (1 - 1e-9)


@settings(max_examples=25)
@given(st.data())
def test_bounds_and_skipping_hold(data: st.DataObject):
    shape = data.draw(SHAPES)
    plan, hardware = data.draw(plans(shape)), hardware_of(1, 8)
    spec, whole = decoder_spec(shape), decoder_spec(replace(shape, compressed=False))
    timer = StepTimePredictor(spec, hardware)
    seconds = timer.predict_time(plan)
    assert seconds == StepTimePredictor(whole, hardware, skips=False).predict_time(plan)
    inline = plan.run.prefetch.mode == "none"
    assert (
        timer.lower_bound_seconds(timer.compute_ticks(plan), timer.stream_minima(plan), inline=inline)
        <= seconds.total
    )
    traits = PeakLowerBoundSettings(
        accumulates=plan.accumulation > 1,
        syncs=plan.sync_each_microbatch,
        keeps=plan.reshard_after_forward is False,
        prefetches=not inline,
    )
    bound = peak_lower_bound(
        trace_dependent_peak_bytes(spec, plan), mesh_dependent_bytes(spec, plan), traits=traits
    )
    assert bound <= peak_bytes(spec, plan).total


def test_ranks_that_share_matmuls_need_less_of_each_for_one_sequence():
    """At one sequence at once, more ranks to a matmul hold less; this is what the axis is for."""
    spec = decoder_spec(LLAMA_8B)
    totals = [peak_bytes(spec, plan_of(LLAMA_8B, t, "recompute.mode=full")).total for t in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)


def test_a_matrix_is_split_by_what_divides():
    assert split_parameter_shape((1024, 64), 8) == (128, 64)
    assert split_parameter_shape((3, 64), 8) == (3, 8)
    assert split_parameter_shape((64,), 8) == (64,)
    assert hidden_width(decoder_spec(LLAMA_8B)) == 4096


def test_what_does_not_divide_is_refused():
    with pytest.raises(PlanError, match="groups of 3"):
        plan_of(LLAMA_8B, 3)
    plan = plan_of(LLAMA_8B, 8, "model.heads=4", "model.kv_heads=2")
    with pytest.raises(PlanError, match=r"model\.heads = 4"):
        peak_bytes(decoder_spec(LLAMA_8B), plan)
