"""Activations on the host: what their copies make a step wait for, and where a search may choose them."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.planner.predict.fsdp_time import StreamClocks
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.offload import ActivationIoTicks
from fullshard.planner.predict.phases import MicrobatchSchedule, ScheduledPhase, ScheduleSegment
from fullshard.planner.predict.simulate import EventOrderSettings, MicrobatchWork, StepSimulation
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.planner.search.candidates import iterate_candidates
from fullshard.planner.search.explain import explain_plan
from fullshard.planner.search.search import plan as plan_best
from fullshard.planner.search.search import search
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.model import LinearInMicrobatch, MicrobatchTrace, ModelSpec, TracePhase
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import ActivationOffloadTerms, OffloadTerms, fits_in_host_memory
from fullshard.spec.run import Run
from fullshard.spec.settings.train_section import RecomputeSection
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import Shape, decoder_spec, run_for
from tests.planner.predict.test_simulate import UNIT
from tests.planner.search.test_search import prediction_of

SHAPE = Shape(layers=9, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
# What a block of SHAPE saves of one sequence: one storage of no power of two, and one.
SAVED = (LinearInMicrobatch(0, 3_000_000), LinearInMicrobatch(0, 1 << 20))
OFFLOAD = RecomputeSection(mode="offload")


@cache
def spec_of(shape: Shape = SHAPE) -> ModelSpec:
    """With a trace under which all blocks but the last move what they save: they compute as without
    recompute, and take as little of the device as with full recompute."""
    spec = decoder_spec(shape)
    run = run_for(shape)
    none, full = (
        spec.choose_trace(RecomputeSection(mode=mode), run.train.microbatch or 1) for mode in ("none", "full")
    )
    blocks = range(1, shape.shown + 1)
    phases = tuple(
        _moving(plain.model_copy(update={"peaks": small.peaks, "end": small.end}), blocks)
        for plain, small in zip(none.phases, full.phases, strict=True)
    )
    moved = MicrobatchTrace(
        recompute=OFFLOAD, batch_bytes=none.batch_bytes, phases=phases, repeats=none.repeats
    )
    return ModelSpec(**{**dict(spec), "traces": (*spec.traces, moved)})


def _moving(phase: TracePhase, blocks: range) -> TracePhase:
    if phase.unit not in blocks:
        return phase
    first, last = phase.unit == blocks[0], phase.unit == blocks[-1]
    if phase.event == "pre_forward":
        return phase.model_copy(update={"out": () if last else SAVED, "waits": not first})
    if phase.event == "pre_backward":
        return phase.model_copy(update={"back": () if first else SAVED, "waits": not last})
    return phase


def gpus(rate: float | None = 5e10, *, ranks: int = 8) -> Hardware:
    return hardware_of(1, ranks).model_copy(update={"host_bytes_per_second": rate})


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    accumulation = draw(st.sampled_from([1, 2, 5]))
    run = run_for(
        SHAPE,
        f"sharding.strategy={draw(st.sampled_from(['full_shard', 'shard_grad_op', 'no_shard']))}",
        f"train.global_batch={8 * accumulation}",
        "train.microbatch=1",
        f"train.gradient_sync={draw(st.sampled_from(['every_microbatch', 'last_microbatch']))}",
        "recompute.mode=offload",
    )
    return Plan.from_run(run, world_size=8, device="cuda")


# The streams #
def played(copy: int, *, computing: int = 10) -> StreamClocks:
    """Three units without parameters, forward and backward; the last keeps what it saves."""
    acts = [("pre_forward", 0), ("pre_forward", 1), ("pre_forward", 2)]
    acts += [("pre_backward", 2), ("pre_backward", 1), ("pre_backward", 0)]
    moved = (
        *(ActivationIoTicks(copy, 0, False), ActivationIoTicks(copy, 0, True), ActivationIoTicks(0, 0, True)),
        *(ActivationIoTicks(0, copy, False), ActivationIoTicks(0, copy, True), ActivationIoTicks(0, 0, True)),
    )
    steps = tuple(ScheduledPhase(event, unit, unit, at) for at, (event, unit) in enumerate(acts))
    program = MicrobatchSchedule((ScheduleSegment(steps),), (1,) * 6, (0, 1, 2), ((),) * 3)
    work = MicrobatchWork(program, ((computing, 0),) * 6, (), moved)
    policy = EventOrderSettings(keeps=False, syncs=True, act=0)
    streams = StreamClocks(serial=False)
    bare_unit = replace(UNIT, has_parameters=False)
    StepSimulation(streams, (bare_unit,) * 3, policy).simulate_step(work, accumulating=work, accumulation=1)
    return streams


def test_copies_shorter_than_a_block_take_no_time():
    streams = played(copy=10)
    assert (streams.compute, streams.waited_host) == (60, 0)


def test_longer_copies_are_waited_for():
    """Out: 10 to 24 and 24 to 38, waited for at 20 and at 34; back: 38 to 52, at 48, and 52 to 66, at 62."""
    streams = played(copy=14)
    assert (streams.compute, streams.waited_host) == (76, 4 * 4)


# A step #
@settings(max_examples=25)
@given(plans(), st.sampled_from([1e8, 1e9, 1e10, 1e11]), st.floats(0.01, 1))
def test_a_slower_host_is_never_a_shorter_step(plan: Plan, rate: float, part: float):
    fast, slow, ideal = (
        StepTimePredictor(spec_of(), gpus(one)).predict_time(plan) for one in (rate, rate * part, 1e30)
    )
    assert slow.total >= fast.total * (1 - 1e-9)
    assert ideal.offload == 0
    # All else is as if nothing moved.
    assert fast.total - fast.offload - fast.stragglers == pytest.approx(ideal.total - ideal.stragglers)


@settings(max_examples=25)
@given(plans(), st.sampled_from([1e8, 1e9, 1e10]))
def test_a_step_is_no_shorter_than_its_copies_and_its_bound(plan: Plan, rate: float):
    timer = StepTimePredictor(spec_of(), gpus(rate))
    terms, total = timer.predict_activation_offload(plan), timer.predict_time(plan).total
    assert terms is not None
    assert terms.copy_seconds == pytest.approx(2 * 8 * plan.accumulation * (3_000_000 + (1 << 20)) / rate)
    assert terms.copy_seconds <= total * (1 + 1e-9)
    bound = timer.lower_bound_seconds(timer.sum_phase_ticks(plan), timer.least_stream_ticks(plan))
    assert bound <= total


@settings(max_examples=25)
@given(plans(), st.sampled_from([1e8, 1e9, 1e10, 1e12]))
def test_skipping_repeated_blocks_equals_walking_with_offload(plan: Plan, rate: float):
    whole = spec_of(replace(SHAPE, compressed=False))
    assert StepTimePredictor(spec_of(), gpus(rate)).predict_time(plan) == StepTimePredictor(
        whole, gpus(rate), skips=False
    ).predict_time(plan)
    assert peak_bytes(spec_of(), plan).total == peak_bytes(whole, plan).total


# The host #
def offloading(*overrides: str) -> Run:
    settings = ("train.global_batch=16", "train.microbatch=2", "recompute.mode=offload")
    return run_for(SHAPE, *settings, "sharding.strategy=full_shard", *overrides)


def test_host_keeps_one_microbatch_in_powers_of_two():
    terms = prediction_of(plan_best(spec_of(), gpus(), offloading())).activations
    assert terms is not None
    # 2 sequences: 6,000,000 bytes take 8 MiB.
    assert terms.host_bytes == 8 * ((1 << 23) + (1 << 21))
    assert terms.copied_bytes == 8 * (6_000_000 + (1 << 21))


@pytest.mark.parametrize("setting", ["hardware", "run"])
def test_where_the_host_has_too_little_nothing_fits(setting: str):
    held = 8 * ((1 << 23) + (1 << 21))
    for short, fits in ((0, True), (1, False)):
        hardware, run = gpus(), offloading()
        if setting == "run":
            run = offloading(f"offload.host_bytes={held - short}")
        else:
            hardware = hardware.model_copy(update={"host_memory_bytes": held - short})
        found = search(spec_of(), hardware, run)
        assert (found.best is not None) == fits
        if not fits:
            with pytest.raises(PlanError, match="no plan fits 80.00 MiB of host memory per rank"):
                plan_best(spec_of(), hardware, run)


def test_activations_and_a_tiers_state_share_the_host():
    state, moved = (
        kind(host_bytes=60, host_capacity_bytes=100) for kind in (OffloadTerms, ActivationOffloadTerms)
    )
    assert fits_in_host_memory(state, None)
    assert fits_in_host_memory(None, moved)
    assert not fits_in_host_memory(state, moved)


def test_activation_offload_to_a_host_of_unknown_speed_is_refused():
    with pytest.raises(PlanError, match="how fast its host is is not known"):
        plan_best(spec_of(), gpus(None), offloading())


# A search #
@pytest.mark.parametrize(("hardware", "is_there"), [(gpus(), True), (gpus(None), False), (cpu_of(8), False)])
def test_activation_offload_is_a_candidate_with_a_known_host(hardware: Hardware, is_there: bool):
    run = run_for(SHAPE, "train.global_batch=16")
    modes = {one.recompute.mode for one in iterate_candidates(spec_of(), hardware, run=run)}
    assert ("offload" in modes) == is_there
    assert {"none", "full"} <= modes


def test_explanation_blames_the_host_for_slow_copies_of_activations():
    hardware, run = gpus(1e8), offloading()
    found = search(spec_of(), hardware, run)
    said = explain_plan(found, hardware, spec=spec_of(), run=run)
    assert said.binds == "host"
    assert "copies of activations" in said.because
