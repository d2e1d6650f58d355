"""The search gives what predicting every candidate gives, and says why where nothing fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.planner.candidates import build_plan, iterate_candidates
from fullshard.planner.memory import peak_bytes
from fullshard.planner.search import (
    RANKED,
    SearchResult,
    plan,
    plan_sort_key,
    predict,
    search,
    step_seconds_with_startup,
)
from fullshard.spec.hardware import Hardware
from fullshard.spec.model import ModelSpec
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import Run, Strategy
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import LLAMA_8B, LLAMA_405B, Shape, decoder_spec, run_for

SMALL = Shape(layers=5, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
PINS: tuple[tuple[str, ...], ...] = (
    (),
    ("run.compile=auto",),
    ("run.compile=auto", "train.steps=20"),
    ("sharding.strategy=hybrid_shard",),
    ("sharding.strategy=shard_grad_op", "train.gradient_sync=last_microbatch"),
    ("sharding.strategy=zero1", "train.microbatch=1"),
    ("sharding.shard_degree=2",),
    ("sharding.reshard_after_forward=2",),
    ("recompute.mode=full", "prefetch.mode=none"),
    ("train.gradient_sync=every_microbatch", "recompute.mode=selective"),
)


def prediction_of(plan: Plan | None) -> Prediction:
    assert plan is not None
    assert plan.prediction is not None
    return plan.prediction


def brute_force(
    spec: ModelSpec, hardware: Hardware, run: Run
) -> list[tuple[Plan, str, bool, tuple[int, int]]]:
    """Every candidate: its plan, kind, whether it is another's double, and what it is ranked by."""
    return [
        (
            one,
            c.mesh.strategy_or_hpz_name,
            c.is_duplicate,
            plan_sort_key(step_seconds_with_startup(one), index),
        )
        for index, c in enumerate(iterate_candidates(spec, hardware, run=run))
        for one in (predict(spec, build_plan(c, run, hardware=hardware), hardware),)
    ]


@settings(max_examples=5)
@given(st.data())
def test_the_search_equals_brute_force(data: st.DataObject):
    assert_the_search_equals_brute_force(data)


@pytest.mark.long
@settings(max_examples=20)
@given(st.data())
def test_the_search_equals_brute_force_many_times(data: st.DataObject):
    assert_the_search_equals_brute_force(data)


def assert_the_search_equals_brute_force(data: st.DataObject) -> None:
    nodes, ranks = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (1, 8)]))
    spread, pins = data.draw(st.floats(0, 1)), data.draw(st.sampled_from(PINS))
    scale = data.draw(st.sampled_from([0.02, 1.0, 20.0]))
    device = data.draw(st.sampled_from(["cuda", "cpu"]))
    hardware = hardware_of(nodes, ranks, scale=scale) if device == "cuda" else cpu_of(nodes * ranks)
    spec = decoder_spec(SMALL, compiled="run.compile=auto" in pins)
    run = run_for(SMALL, f"train.global_batch={4 * nodes * ranks}", *pins)
    if hardware.world_size == 1 and {"sharding.shard_degree=2", "sharding.reshard_after_forward=2"} & set(
        pins
    ):
        return
    everything = brute_force(spec, hardware, run)
    needs = sorted(prediction_of(one).required_device_bytes for one, *_ in everything)
    # Nothing fits, or all does, or anything between.
    capacity = int(needs[0] * 0.99 + spread * (needs[-1] - needs[0] * 0.98))
    found = search(spec, hardware, run, capacity_bytes=capacity)
    fit = [one for one in everything if prediction_of(one[0]).required_device_bytes <= capacity]
    ranked = sorted((one for one in fit if not one[2]), key=lambda one: one[3])
    assert times(found.ranked) == times([one for one, *_ in ranked[:RANKED]])
    assert bare(found.best) == (bare(ranked[0][0]) if ranked else None)
    assert found.considered == sum(not double for *_, double, _ in everything)
    assert bare(found.fastest) == bare(min(everything, key=lambda one: one[3])[0])
    check_kinds(found, everything, capacity=capacity)


def check_kinds(
    found: SearchResult, everything: list[tuple[Plan, str, bool, tuple[int, int]]], *, capacity: int
) -> None:
    for kind in {kind for _, kind, *_ in everything}:
        own = [(plan, order) for plan, its_kind, _, order in everything if its_kind == kind]
        fit = [(plan, order) for plan, order in own if prediction_of(plan).required_device_bytes <= capacity]
        if fit:
            assert bare(found.by_strategy[kind]) == bare(min(fit, key=lambda one: one[1])[0])
        else:
            least = min(own, key=lambda one: (prediction_of(one[0]).required_device_bytes, one[1][1]))[0]
            assert bare(found.by_strategy[kind]) == bare(least)
    least_bytes = min(prediction_of(plan).required_device_bytes for plan, *_ in everything)
    assert (found.closest is None) == (found.best is not None)
    if found.closest is not None:
        assert prediction_of(found.closest).required_device_bytes == least_bytes


def bare(plan: Plan | None) -> Plan | None:
    return plan and plan.model_copy(update={"prediction": None})


def times(plans: tuple[Plan, ...] | list[Plan]) -> list[float]:
    return [prediction_of(plan).time.total for plan in plans]


def test_a_405b_is_searched_over_ten_thousand_candidates_and_few_are_predicted():
    spec, run = decoder_spec(LLAMA_405B), run_for(LLAMA_405B, "train.global_batch=65536")
    found = search(spec, hardware_of(2048, 8), run)
    assert found.considered >= 10_000
    assert found.predicted < 200
    assert prediction_of(found.best).fits_in_memory


def test_the_best_plan_is_complete_and_fits():
    spec, hardware = decoder_spec(LLAMA_8B), hardware_of(1, 8)
    best = plan(spec, hardware, run_for(LLAMA_8B, "train.global_batch=16"))
    prediction = prediction_of(best)
    assert prediction.fits_in_memory
    assert prediction.memory == peak_bytes(spec, best)
    assert prediction.tokens_per_second == pytest.approx(16 * 8192 / prediction.time.total)
    flops = (spec.flops_per_token or 0) * prediction.tokens_per_second
    assert prediction.mfu == pytest.approx(flops / (8 * 1e15))
    assert bare(best) == Plan.from_run(best.run, world_size=8, device="cuda")


@pytest.mark.parametrize(
    ("pin", "field", "value"),
    [
        ("sharding.strategy=zero1", "strategy", Strategy.ZERO1),
        ("train.microbatch=2", "microbatch", 2),
        ("sharding.shard_degree=4", "shard_degree", 4),
        ("sharding.reshard_after_forward=4", "reshard_after_forward", 4),
        ("train.gradient_sync=last_microbatch", "sync_each_microbatch", False),
    ],
)
def test_what_is_pinned_is_taken_as_it_is(pin: str, field: str, value: object):
    found = search(decoder_spec(SMALL), hardware_of(1, 8), run_for(SMALL, "train.global_batch=32", pin))
    assert {getattr(plan, field) for plan in (*found.ranked, *found.by_strategy.values())} == {value}


def test_a_plan_says_how_the_loss_was_traced():
    spec, run = (
        decoder_spec(SMALL).model_copy(update={"loss_chunk": 64}),
        run_for(SMALL, "train.loss_chunk=auto"),
    )
    assert plan(spec, hardware_of(1, 8), run).run.train.loss_chunk == 64


def test_the_plainer_of_two_that_are_as_fast_is_taken():
    """On one rank nothing is gathered, and so it is all the same how far ahead."""
    run = run_for(SMALL, "train.global_batch=1", "sharding.strategy=full_shard")
    found = search(decoder_spec(SMALL), hardware_of(1, 1), run)
    assert found.best is not None
    assert found.best.run.prefetch.mode == "implicit"


def test_nothing_fits_says_what_is_closest_what_is_largest_and_what_would_fit():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=8", "recompute.mode=none")
    with pytest.raises(PlanError) as error:
        plan(spec, hardware_of(1, 4, gib=60), run)
    for part in (
        "no plan fits 58.80 GiB",
        "closest: full_shard, dp_shard=4",
        "over)",
        "largest: activations",
    ):
        assert part in str(error.value)
    assert 'try: recompute.mode = "auto"' in str(error.value)


def test_more_ranks_are_advised_where_no_pin_is_to_blame():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=8")
    with pytest.raises(PlanError, match="try: 8 ranks: full_shard"):
        plan(spec, hardware_of(1, 2, gib=48), run)


def test_a_batch_that_cannot_be_shared_out_is_refused():
    with pytest.raises(PlanError, match="shared out"):
        search(decoder_spec(SMALL), hardware_of(1, 8), run_for(SMALL, "train.global_batch=12"))


def test_a_spec_of_another_sequence_is_refused():
    other = Shape(layers=5, sequence=512)
    with pytest.raises(PlanError, match="sequence_length"):
        search(decoder_spec(other), hardware_of(1, 8), run_for(SMALL, "train.global_batch=8"))


@settings(max_examples=15)
@given(st.data())
def test_more_ranks_never_hold_more_shards_each(data: st.DataObject):
    """Up to padding: dim 0 of a parameter is padded to a multiple of the ranks."""
    shape = data.draw(st.builds(Shape, d_model=st.sampled_from([64, 256]), layers=st.integers(3, 9)))
    ranks = data.draw(st.sampled_from([1, 2, 4, 8]))
    spec, shards = decoder_spec(shape), []
    for world in (ranks, ranks * data.draw(st.sampled_from([2, 3, 8]))):
        run = run_for(shape, f"train.global_batch={world}", "sharding.strategy=full_shard")
        found = search(spec, hardware_of(1, world), run)
        memory = prediction_of(found.best).memory
        shards.append(memory.parameter_shards + memory.optimizer_state)
    assert shards[1] <= shards[0]


@pytest.mark.parametrize("shape", [SMALL, LLAMA_8B, LLAMA_405B])
def test_recompute_never_saves_more(shape: Shape):
    spec = decoder_spec(shape)
    saved = {
        trace.recompute.mode: max(phase.end.activations.value_at(1) for phase in trace.phases)
        for trace in spec.traces
    }
    assert all(saved[mode] <= saved["none"] for mode in saved)


def test_one_rank_with_room_keeps_its_parameters_gathered_over_the_step():
    """Over one rank FSDP2 copies parameters whenever it gathers them."""
    run, spec = run_for(Shape(layers=4, d_model=1024)), decoder_spec(Shape(layers=4, d_model=1024))
    best = search(spec, hardware_of(1, 1), run).best
    assert best is not None
    assert best.reshard_after_forward is False
