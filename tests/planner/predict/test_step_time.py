"""Laws of the simulated step time, on specs made by formula."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.planner.predict.fsdp_time import TICKS
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import LLAMA_8B, Shape, decoder_spec, plan_for, predict_terms

STRATEGIES = (
    ("sharding.strategy=full_shard",),
    ("sharding.strategy=shard_grad_op",),
    ("sharding.strategy=zero1",),
    ("sharding.strategy=no_shard",),
    ("sharding.strategy=hybrid_shard", "sharding.shard_degree=4"),
    ("sharding.strategy=hybrid_shard_zero2", "sharding.shard_degree=2"),
)
SHAPES = st.builds(
    Shape,
    layers=st.integers(3, 40),
    d_model=st.sampled_from([64, 512, 2048]),
    d_ff=st.sampled_from([192, 4096]),
    vocabulary=st.sampled_from([256, 32_000]),
    sequence=st.sampled_from([64, 2048]),
)


@st.composite
def plans(draw: st.DrawFn, shape: Shape, *, world: int = 16) -> Plan:
    accumulation = draw(st.sampled_from([1, 2, 3, 9]))
    return plan_for(
        shape,
        world,
        *draw(st.sampled_from(STRATEGIES)),
        f"train.global_batch={world * accumulation}",
        "train.microbatch=1",
        f"train.gradient_sync={draw(st.sampled_from(['auto', 'every_microbatch', 'last_microbatch']))}",
        f"recompute.mode={draw(st.sampled_from(['none', 'full', 'selective']))}",
    )


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    hardware = hardware_of(2, 8, scale=draw(st.sampled_from([0.01, 0.3, 1.0, 30.0])))
    host = draw(st.sampled_from([(0.0, 0.0), (6e-6, 3e-4), (3e-5, 1e-4), (1e-4, 1e-3), (2e-4, 1e-2)]))
    rates = hardware.rates.model_copy(update={"launch_seconds": host[0], "unit_seconds": host[1]})
    overlap = draw(st.sampled_from([0.0, 0.7, 1.0, 1.0]))
    device = draw(st.sampled_from(["cuda", "cuda", "cpu"]))
    return hardware.model_copy(update={"rates": rates, "overlap": overlap, "device": device})


@settings(max_examples=30)
@given(st.data())
def test_skipping_repeated_blocks_equals_walking(data: st.DataObject):
    shape, hardware = data.draw(SHAPES), data.draw(hardwares())
    plan = data.draw(plans(shape))
    whole = decoder_spec(replace(shape, compressed=False))
    skipped = StepTimePredictor(decoder_spec(shape), hardware).predict_time(plan)
    assert skipped == StepTimePredictor(whole, hardware, skips=False).predict_time(plan)


@settings(max_examples=20)
@given(st.data())
def test_less_bandwidth_is_never_a_shorter_step(data: st.DataObject):
    shape, hardware = data.draw(SHAPES), data.draw(hardwares())
    plan, part = data.draw(plans(shape)), data.draw(st.floats(0.05, 1.0))
    slower = hardware.model_copy(
        update={name: slowed(hardware, name, part) for name in data.draw(st.sampled_from(LINKS))}
    )
    spec = decoder_spec(shape)
    before, after = (predict_terms(spec, plan, one).total for one in (hardware, slower))
    assert after >= before * (1 - 1e-9)


LINKS = (("within",), ("across",), ("within", "across"))


def slowed(hardware: Hardware, name: str, part: float) -> object:
    link = getattr(hardware, name)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    rates = {kind: getattr(link, kind) for kind in kinds}
    return link.model_copy(
        update={
            kind: rate.model_copy(update={"bytes_per_second": rate.bytes_per_second * part})
            for kind, rate in rates.items()
        }
    )


@settings(max_examples=30)
@given(st.data())
def test_no_step_is_below_its_bound(data: st.DataObject):
    shape, hardware = data.draw(SHAPES), data.draw(hardwares())
    plan, timer = data.draw(plans(shape)), StepTimePredictor(decoder_spec(shape), hardware)
    bound = timer.lower_bound_seconds(timer.sum_phase_ticks(plan), timer.least_stream_ticks(plan))
    assert bound <= timer.predict_time(plan).total


def test_step_on_shared_cores_is_the_sum_of_all_work():
    hardware = cpu_of(2)
    plan = plan_for(Shape(), 2, "train.global_batch=2", "sharding.strategy=full_shard")
    timer = StepTimePredictor(decoder_spec(Shape()), hardware)
    terms, demand, computing = (
        timer.predict_time(plan),
        timer.least_stream_ticks(plan),
        timer.sum_phase_ticks(plan),
    )
    waited = terms.exposed_all_gather + terms.exposed_reduce_scatter
    assert waited == pytest.approx(demand.network / TICKS)
    assert terms.compute == pytest.approx((computing.device + computing.issue) / TICKS, rel=1e-6)
    assert terms.contention == 0


def test_step_waits_for_a_slow_host():
    hardware = hardware_of(1, 8)
    slow = hardware.rates.model_copy(update={"launch_seconds": 1.0})
    plan = plan_for(Shape(), 8, "train.global_batch=8", "sharding.strategy=full_shard")
    timer = StepTimePredictor(decoder_spec(Shape()), hardware.model_copy(update={"rates": slow}))
    terms, ticks = timer.predict_time(plan), timer.sum_phase_ticks(plan)
    assert terms.compute == pytest.approx(ticks.device / TICKS, rel=1e-3)
    assert terms.compute + terms.launch_gaps == pytest.approx(ticks.issue / TICKS, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 8])
def test_unsharded_parameters_are_not_gathered(ranks: int):
    plan = plan_for(Shape(), ranks, f"train.global_batch={ranks}", "sharding.strategy=no_shard")
    terms = predict_terms(decoder_spec(Shape()), plan, hardware_of(1, ranks))
    assert terms.exposed_all_gather == terms.exposed_reduce_scatter == 0
    assert (terms.exposed_all_reduce > 0) == (ranks > 1)


def test_replicas_are_reduced_once_a_step_and_shards_in_every_microbatch():
    hardware = hardware_of(2, 8)
    over = ("sharding.strategy=hybrid_shard", "sharding.shard_degree=8", "train.microbatch=1")
    once, thrice = (plan_for(LLAMA_8B, 16, *over, f"train.global_batch={16 * k}") for k in (1, 3))
    timer = StepTimePredictor(decoder_spec(LLAMA_8B), hardware)
    one, three = timer.least_stream_ticks(once), timer.least_stream_ticks(thrice)
    assert three.network == 3 * one.network
    assert three.replicas == one.replicas > 0


def test_zero1_communicates_once_a_step():
    hardware = hardware_of(2, 8)
    over = ("sharding.strategy=zero1", "train.microbatch=1")
    once, thrice = (plan_for(LLAMA_8B, 16, *over, f"train.global_batch={16 * k}") for k in (1, 3))
    timer = StepTimePredictor(decoder_spec(LLAMA_8B), hardware)
    assert timer.least_stream_ticks(thrice).network == timer.least_stream_ticks(once).network


def test_recompute_has_its_term_of_time():
    hardware, spec = hardware_of(2, 8), decoder_spec(LLAMA_8B)
    none, full = (
        predict_terms(spec, plan_for(LLAMA_8B, 16, "train.global_batch=16", f"recompute.mode={m}"), hardware)
        for m in ("none", "full")
    )
    assert none.recompute == 0
    assert full.recompute > 0.2 * full.compute
    assert full.compute == pytest.approx(none.compute, rel=0.01)


def test_stragglers_are_a_part_of_everything_else():
    spec, plan = decoder_spec(LLAMA_8B), plan_for(LLAMA_8B, 16, "train.global_batch=16")
    terms = predict_terms(spec, plan, hardware_of(2, 8))
    assert terms.stragglers == pytest.approx(0.02 * (terms.total - terms.stragglers))
