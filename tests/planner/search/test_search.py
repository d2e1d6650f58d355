"""The search gives what predicting every candidate gives, and says why where nothing fits."""

import re
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.search.candidates import (
    build_plan,
    iterate_candidates,
    step_seconds_with_compile_share,
)
from fullshard.planner.search.search import SAME_MEMORY, SAME_SPEED, SearchResult, plan, predict, search
from fullshard.spec.machine.hardware import MOST_RANKS, Hardware
from fullshard.spec.model import LinearInMicrobatch, MicrobatchTrace, ModelSpec, RepeatedUnits
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import Prediction
from fullshard.spec.run import Run, Strategy
from fullshard.spec.settings.train_section import RecomputeSection
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import LLAMA_8B, LLAMA_405B, Shape, decoder_spec, run_for

SMALL = Shape(layers=5, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
PINS: tuple[tuple[str, ...], ...] = (
    (),
    ("plan.memory_margin=0",),
    ("plan.memory_margin=0.3", "train.steps=1000", "run.compile=auto"),
    ("run.compile=auto",),
    ("run.compile=auto", "train.steps=20"),
    ("sharding.strategy=hybrid_shard",),
    ("sharding.strategy=shard_grad_op", "train.gradient_sync=last_microbatch"),
    ("sharding.strategy=zero1", "train.microbatch=1"),
    ("sharding.shard_degree=2",),
    ("recompute.mode=full",),
    ("train.gradient_sync=every_microbatch", "recompute.mode=selective"),
)


def prediction_of(plan: Plan | None) -> Prediction:
    assert plan is not None
    assert plan.prediction is not None
    return plan.prediction


class Known(NamedTuple):
    """A candidate that was predicted in full, with what a choice goes by."""

    plan: Plan
    kind: str
    is_duplicate: bool
    seconds: float
    needed: int
    place: int


def brute_force(spec: ModelSpec, hardware: Hardware, run: Run) -> list[Known]:
    """Every candidate, predicted."""
    known: list[Known] = []
    for index, c in enumerate(iterate_candidates(spec, hardware, run=run)):
        one = predict(spec, build_plan(c, run, hardware=hardware), hardware)
        needed = prediction_of(one).required_device_bytes
        seconds = step_seconds_with_compile_share(one)
        known.append(Known(one, c.strategy_label, c.is_duplicate, seconds, needed, index))
    return known


def best_by_rule(known: list[Known], run: Run, *, capacity: int) -> Known | None:
    """The rule of the choice, word for word: margin, then ties in time, then in memory, then the plainest."""
    fit = [one for one in known if one.needed <= int(capacity * (1 - run.memory_margin))]
    if not fit:
        return None
    fastest = min(one.seconds for one in fit)
    ties = [one for one in fit if one.seconds <= (1 + SAME_SPEED) * fastest]
    least = min(one.needed for one in ties)
    return min(
        (one for one in ties if one.needed <= least + SAME_MEMORY * capacity), key=lambda one: one.place
    )


@settings(max_examples=6)
@given(st.data())
def test_the_search_equals_brute_force(data: st.DataObject):
    nodes, ranks = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (1, 8)]))
    spread, pins = data.draw(st.floats(0, 1)), data.draw(st.sampled_from(PINS))
    scale = data.draw(st.sampled_from([0.02, 1.0, 20.0]))
    device = data.draw(st.sampled_from(["cuda", "cpu"]))
    hardware = hardware_of(nodes, ranks, scale=scale) if device == "cuda" else cpu_of(nodes * ranks)
    spec = decoder_spec(SMALL, compiled="run.compile=auto" in pins)
    run = run_for(SMALL, f"train.global_batch={4 * nodes * ranks}", *pins)
    if hardware.world_size == 1 and "sharding.shard_degree=2" in pins:
        return
    check_search(spec, hardware, run, spread=spread)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_the_search_equals_brute_force_where_only_experts_are_sharded(spread: float):
    """Ranks that share matmuls shard experts, though no others shard; with `no_shard` they do not."""
    whole = decoder_spec(SMALL)
    units = tuple(one.model_copy(update={"has_experts": one.is_block}) for one in whole.units)
    degrees = {"tensor_parallel": 4, "expert_parallel": 2}
    spec = whole.model_copy(update={"units": units, **degrees})
    run = run_for(SMALL, "model.experts=4", "train.global_batch=4").with_settings({"sharding": degrees})
    check_search(spec, hardware_of(1, 4, scale=0.02), run, spread=spread)


def check_search(spec: ModelSpec, hardware: Hardware, run: Run, *, spread: float) -> None:
    """Compares a search with all candidates, where nothing fits, or all does, or anything between."""
    everything = brute_force(spec, hardware, run)
    needs = sorted(one.needed for one in everything)
    capacity = int(needs[0] * 0.99 + spread * (needs[-1] - needs[0] * 0.98))
    found = search(spec, hardware, run, capacity_bytes=capacity)
    own = [one for one in everything if not one.is_duplicate]
    chosen = best_by_rule(own, run, capacity=capacity)
    assert bare(found.best) == (chosen and bare(chosen.plan))
    brief = search(spec, hardware, run, capacity_bytes=capacity, only_best=True)
    assert (brief.best, brief.fastest) == (found.best, found.fastest)
    assert found.considered == len(own)
    assert step_seconds_with_compile_share(found.fastest) == min(one.seconds for one in everything)
    check_kinds(found, everything, run, capacity=capacity)


def check_kinds(found: SearchResult, everything: list[Known], run: Run, *, capacity: int) -> None:
    for kind in {one.kind for one in everything}:
        own = [one for one in everything if one.kind == kind]
        smallest = min(own, key=lambda one: (one.needed, one.place))
        expected = best_by_rule(own, run, capacity=capacity) or smallest
        assert bare(found.by_strategy[kind]) == bare(expected.plan)
    assert (found.closest is None) == (found.best is not None)
    if found.closest is not None:
        least = min(one.needed for one in everything)
        assert prediction_of(found.closest).required_device_bytes == least


def bare(plan: Plan | None) -> Plan | None:
    return plan and plan.model_copy(update={"prediction": None})


def test_few_of_the_candidates_of_a_405b_are_predicted():
    spec, run = decoder_spec(LLAMA_405B), run_for(LLAMA_405B, "train.global_batch=65536")
    found = search(spec, hardware_of(2048, 8, gib=96), run)
    assert found.considered > 400
    assert found.predicted < found.considered / 20
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
        ("train.gradient_sync=last_microbatch", "sync_each_microbatch", False),
    ],
)
def test_pinned_settings_are_kept_by_the_search(pin: str, field: str, value: object):
    found = search(decoder_spec(SMALL), hardware_of(1, 8), run_for(SMALL, "train.global_batch=32", pin))
    assert {getattr(plan, field) for plan in (found.best, *found.by_strategy.values())} == {value}


def test_a_plan_says_how_the_loss_was_traced():
    spec, run = (
        decoder_spec(SMALL).model_copy(update={"loss_chunk": 64}),
        run_for(SMALL, "train.loss_chunk=auto"),
    )
    assert plan(spec, hardware_of(1, 8), run).run.train.loss_chunk == 64


def test_a_spec_valid_for_one_microbatch_size_is_planned_with_that_size():
    spec = decoder_spec(SMALL)
    alone = spec.model_copy(
        update={"traces": tuple(one.model_copy(update={"microbatch": 1}) for one in spec.traces)}
    )
    for pins in ((), ("recompute.mode=full",)):
        found = search(alone, hardware_of(1, 2), run_for(SMALL, "train.global_batch=8", *pins))
        assert {plan.microbatch for plan in found.by_strategy.values()} == {1}


def test_quarters_of_the_blocks_are_candidates_for_recompute():
    kinds = (RepeatedUnits(first=2, units=1, times=13), RepeatedUnits(first=6, units=1, times=13))
    section, none = RecomputeSection(mode="full", blocks=16), LinearInMicrobatch()
    some = MicrobatchTrace(recompute=section, batch_bytes=none, phases=(), repeats=kinds, blocks=32, border=0)
    assert some.recomputed_block_counts() == range(4, 29)
    assert [one.times for one in some.with_recomputed_blocks(20).repeats] == [17, 9]
    spec = decoder_spec(SMALL).model_copy(update={"traces": (some,)})
    candidates = iterate_candidates(spec, hardware_of(1, 8), run=run_for(SMALL, "train.global_batch=8"))
    assert {candidate.recompute.blocks for candidate in candidates} == {8, 16, 24}


def test_error_names_closest_plan_largest_term_and_remedy():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=8", "recompute.mode=none")
    with pytest.raises(PlanError) as error:
        plan(spec, hardware_of(1, 4, gib=60), run)
    for part in (
        *("no plan fits 58.80 GiB", "closest: full_shard, dp_shard=4", "over)", "largest: activations"),
    ):
        assert part in str(error.value)
    assert 'try: recompute.mode = "auto"' in str(error.value)


def test_more_ranks_are_advised_where_no_pin_is_to_blame():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=8")
    with pytest.raises(PlanError, match="try: 8 ranks: full_shard"):
        plan(spec, hardware_of(1, 2, gib=48), run)


def test_more_cpu_ranks_of_one_machine_are_not_advised():
    """They share its memory, so that each of more ranks has less."""
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=8")
    machine = cpu_of(2).model_copy(update={"across": None})
    small = machine.chip.model_copy(update={"memory_bytes": 48 * 2**30})
    with pytest.raises(PlanError, match="or fewer ranks") as raised:
        plan(spec, machine.model_copy(update={"chip": small}), run)
    assert not re.search(r"\d ranks: ", str(raised.value))


@pytest.mark.parametrize(("nodes", "gib"), [(1, 2e-9), (MOST_RANKS // 8, 1)])
def test_neither_a_byte_of_memory_nor_the_most_ranks_is_an_error_of_another_kind(nodes: int, gib: float):
    with pytest.raises(PlanError, match="no plan fits"):
        plan(
            decoder_spec(SMALL),
            hardware_of(nodes, 8, gib=gib),
            run_for(SMALL, f"train.global_batch={8 * nodes}"),
        )


def test_indivisible_batch_is_refused():
    with pytest.raises(PlanError, match="shared out"):
        search(decoder_spec(SMALL), hardware_of(1, 8), run_for(SMALL, "train.global_batch=12"))


def test_a_spec_of_another_sequence_is_refused():
    other = Shape(layers=5, sequence=512)
    with pytest.raises(PlanError, match="sequence_length"):
        search(decoder_spec(other), hardware_of(1, 8), run_for(SMALL, "train.global_batch=8"))


def test_one_rank_with_room_keeps_its_parameters_gathered_over_the_step():
    """Over one rank FSDP2 copies parameters whenever it gathers them."""
    run, spec = run_for(Shape(layers=4, d_model=1024)), decoder_spec(Shape(layers=4, d_model=1024))
    best = search(spec, hardware_of(1, 1), run).best
    assert best is not None
    assert not best.reshard_after_forward
