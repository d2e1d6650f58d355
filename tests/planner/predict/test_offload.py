"""Tiers: what they free on the device, and what a step then waits for."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.offload import TIERS, device_update_buffer_bytes, with_infinitely_fast_drive
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.planner.search.candidates import build_plan, iterate_candidates
from fullshard.planner.search.search import SAME_SPEED, WORTH_MORE_OFFLOAD, predict, search
from fullshard.planner.search.search import plan as plan_best
from fullshard.spec.machine.hardware import Hardware
from fullshard.spec.plan import Plan
from fullshard.spec.prediction import OffloadTerms
from fullshard.spec.run import Tier
from tests.fakes.hardware import cpu_of, hardware_of
from tests.fakes.specs import LLAMA_8B, Shape, decoder_spec, predict_terms, run_for
from tests.planner.search.test_search import prediction_of
from tests.planner.test_memory_bound import bound_of

SMALL = Shape(layers=5, d_model=512, d_ff=1024, vocabulary=4096, sequence=256)
STRATEGIES = (
    ("sharding.strategy=full_shard",),
    ("sharding.strategy=shard_grad_op",),
    ("sharding.strategy=no_shard",),
    ("sharding.strategy=hybrid_shard", "sharding.shard_degree=4"),
)
SHAPES = st.builds(
    Shape,
    layers=st.integers(3, 12),
    d_model=st.sampled_from([64, 512, 2048]),
    vocabulary=st.sampled_from([256, 32_000]),
    sequence=st.sampled_from([64, 2048]),
    precision=st.sampled_from(["fp32", "bf16", "bf16_reduce", "bf16_pure"]),
    frozen=st.booleans(),
)
RATES = ("host_bytes_per_second", "disk_bytes_per_second", "adam_per_second")


def with_host(hardware: Hardware, *, copy: float = 5e10, disk: float = 3e9, adam: float = 5e8) -> Hardware:
    return hardware.model_copy(update=dict(zip(RATES, (copy, disk, adam), strict=True)))


Where = Literal["host", "device"]
UPDATES: st.SearchStrategy[Where] = st.sampled_from(["host", "device"])


def tiered(plan: Plan, tier: Tier, update: Where = "host") -> Plan:
    offload = plan.run.offload.model_copy(update={"tier": tier, "update": update})
    return plan.model_copy(update={"run": plan.run.model_copy(update={"offload": offload})})


@st.composite
def plans(draw: st.DrawFn, shape: Shape, *, world: int = 8) -> Plan:
    accumulation = draw(st.sampled_from([1, 2, 5]))
    run = run_for(
        shape,
        *draw(st.sampled_from(STRATEGIES)),
        f"train.global_batch={world * accumulation}",
        "train.microbatch=1",
        f"train.gradient_sync={draw(st.sampled_from(['auto', 'every_microbatch', 'last_microbatch']))}",
        f"recompute.mode={draw(st.sampled_from(['none', 'full']))}",
    )
    return Plan.from_run(run, world_size=world, device="cuda")


def offload_of(plan: Plan, hardware: Hardware, shape: Shape) -> OffloadTerms:
    terms = StepTimePredictor(decoder_spec(shape), hardware).predict_offload(plan)
    assert terms is not None
    return terms


@settings(max_examples=20)
@given(st.data())
def test_no_tier_needs_more_of_the_device_than_none(data: st.DataObject):
    shape = data.draw(SHAPES)
    plan, spec, update = data.draw(plans(shape)), decoder_spec(shape), data.draw(UPDATES)
    none, *others = (peak_bytes(spec, tiered(plan, tier, update)) for tier in TIERS)
    # Where little is trained, the least pieces of an update on the device may be more than its state.
    pieces = device_update_buffer_bytes(spec, tiered(plan, "optimizer:cpu", update)) if shape.frozen else 0
    assert max(one.total for one in others) <= none.total + pieces
    assert max(sum(one.stream_pools) for one in others) <= sum(none.stream_pools) + pieces  # what is reserved
    # Units whose shards are read in are gathered from copies: beside those in flight it is never more.
    optimizer, parameters = (
        terms.total - terms.units_in_flight
        for terms in (
            peak_bytes(spec, tiered(plan, t, update)) for t in ("optimizer:cpu", "params+optimizer:cpu")
        )
    )
    assert parameters <= optimizer


@settings(max_examples=20)
@given(st.data())
def test_a_slower_host_or_drive_is_never_a_shorter_step(data: st.DataObject):
    shape, tier = data.draw(SHAPES), data.draw(st.sampled_from(TIERS[1:]))
    plan, part = tiered(data.draw(plans(shape)), tier, data.draw(UPDATES)), data.draw(st.floats(0.001, 1.0))
    hardware = with_host(hardware_of(1, 8, scale=data.draw(st.sampled_from([0.01, 1.0]))))
    name, spec = data.draw(st.sampled_from(RATES)), decoder_spec(shape)
    slower = hardware.model_copy(update={name: getattr(hardware, name) * part})
    before, after = (predict_terms(spec, plan, one).total for one in (hardware, slower))
    assert after >= before * (1 - 1e-9)


@settings(max_examples=20)
@given(st.data())
def test_a_step_is_no_shorter_than_drive_update_and_copies_take(data: st.DataObject):
    """The bound of the design: each of the three has all of its own to do in every step."""
    shape, tier = data.draw(SHAPES), data.draw(st.sampled_from(TIERS[1:]))
    hardware = with_host(hardware_of(1, 8), disk=data.draw(st.sampled_from([1e7, 1e9, 1e12])))
    device = data.draw(st.sampled_from(["cuda", "cpu"]))
    hardware = hardware.model_copy(update={"device": device})
    hardware = hardware.model_copy(
        update={"host_bytes_per_second": data.draw(st.sampled_from([1e8, 5e10, 1e13]))}
    )
    plan = tiered(data.draw(plans(shape)), tier, data.draw(UPDATES))
    timer = StepTimePredictor(decoder_spec(shape), hardware)
    terms, total = offload_of(plan, hardware, shape), timer.predict_time(plan).total
    assert max(terms.disk_seconds, terms.update_seconds, terms.copy_seconds) <= total * (1 + 1e-9)
    bound = timer.lower_bound_seconds(timer.sum_phase_ticks(plan), timer.least_stream_ticks(plan))
    assert bound <= total


@settings(max_examples=20)
@given(st.data())
def test_skipping_repeated_blocks_equals_walking_with_tiers(data: st.DataObject):
    shape, tier = data.draw(SHAPES), data.draw(st.sampled_from(TIERS[1:]))
    hardware = with_host(hardware_of(1, 8), disk=data.draw(st.sampled_from([1e8, 1e10])))
    hardware = hardware.model_copy(update={"device": data.draw(st.sampled_from(["cuda", "cpu"]))})
    plan = tiered(data.draw(plans(shape)), tier, data.draw(UPDATES))
    whole = decoder_spec(replace(shape, compressed=False))
    skipped = StepTimePredictor(decoder_spec(shape), hardware).predict_time(plan)
    assert skipped == StepTimePredictor(whole, hardware, skips=False).predict_time(plan)
    assert peak_bytes(decoder_spec(shape), plan).total == peak_bytes(whole, plan).total


@settings(max_examples=20)
@given(st.data())
def test_the_bound_on_memory_holds_with_tiers(data: st.DataObject):
    shape, tier = data.draw(SHAPES), data.draw(st.sampled_from(TIERS[1:]))
    plan, spec = tiered(data.draw(plans(shape)), tier, data.draw(UPDATES)), decoder_spec(shape)
    assert bound_of(spec, plan) <= peak_bytes(spec, plan).total


def plan_8b(tier: Tier, *overrides: str) -> Plan:
    run = run_for(LLAMA_8B, "train.global_batch=8", f"offload.tier={tier}", *overrides)
    return Plan.from_run(run, world_size=8, device="cuda")


def test_bytes_of_each_tier_are_those_of_its_formula():
    """See [Note: tiers]; P: parameters a rank, all of which divide here; c 2, m 4, a group of all of them."""
    hardware, spec = with_host(hardware_of(1, 8)), decoder_spec(LLAMA_8B)
    p = spec.numel // 8
    largest = 128256 * 4096 // 8
    sent, beside = 2 * largest, 2 * 16 * 2**20  # the largest segment; what stands beside two generations
    for tier, host, disk in (
        ("optimizer:cpu", 12 * p + 4 * p + sent, 0),
        ("params+optimizer:cpu", 12 * p + 4 * p + 2 * p, 0),
        ("optimizer:nvme", 4 * p + sent + 12 * p, 24 * p + beside),
        ("params+optimizer:nvme", 4 * p + 12 * p + 4 * 2 * largest, 24 * p + beside + 2 * p),
    ):
        plan = plan_8b(tier, f"offload.sub_group_parameters={spec.numel}")
        terms = offload_of(plan, hardware, LLAMA_8B)
        assert terms.host_bytes == pytest.approx(host, rel=1e-3)
        assert terms.disk_bytes == pytest.approx(disk, rel=1e-3)
        shards = peak_bytes(spec, plan)
        assert shards.parameter_shards == pytest.approx(0 if tier.startswith("params") else 2 * p, rel=1e-3)
        assert shards.optimizer_state == 0
        assert shards.gradients <= 2 * 4 * largest


@pytest.mark.parametrize("tier", TIERS)
def test_frozen_parameters_are_offloaded_with_the_parameters(tier: Tier):
    """In its own dtype, here fp32: F bytes; of a drive's, four units are in host memory."""
    shape = replace(LLAMA_8B, frozen=True)
    hardware, spec, plan = with_host(hardware_of(1, 8)), decoder_spec(shape), plan_8b(tier)
    frozen = 4 * sum(p.numel for unit in spec.units for p in unit.parameters if not p.requires_grad) // 8
    units, others = 4 * 4 * 128256 * 4096 // 8, 2**22  # what the norms and their state take of anything
    shards = peak_bytes(spec, plan)
    if not plan.run.offload.offloads_parameters:
        assert (shards.frozen_shards, shards.parameter_shards) == (frozen, pytest.approx(0, abs=others))
        return
    assert shards.frozen_shards == shards.parameter_shards == 0
    terms = offload_of(plan, hardware, shape)
    if not plan.run.offload.is_on_drive:
        assert frozen <= terms.host_bytes <= frozen + others
        return
    assert units <= terms.host_bytes <= units + others
    assert 0 <= terms.disk_bytes - frozen - 2 * 16 * 2**20 <= others
    # Written before the first step, and read for each gather that does not find it in memory.
    assert terms.disk_written_bytes <= others
    assert 2 * frozen - 2 * units <= terms.disk_read_bytes <= 2 * frozen + others


def test_a_drive_that_binds_reads_and_writes_twelve_bytes_a_parameter():
    hardware, spec = with_host(hardware_of(1, 8), disk=1e8), decoder_spec(LLAMA_8B)
    plan = plan_8b("optimizer:nvme")
    terms = offload_of(plan, hardware, LLAMA_8B)
    assert terms.step_bottleneck == "disk"
    assert terms.disk_written_bytes == pytest.approx(12 * spec.numel / 8, rel=1e-6)
    assert terms.disk_seconds == pytest.approx(24 * spec.numel / 8 / 1e8, rel=1e-6)
    # The step is hardly longer: all else but the last unit's passes beside.
    total = predict_terms(spec, plan, hardware).total / (1 + hardware.stragglers)
    assert terms.disk_seconds < total < 1.2 * terms.disk_seconds


def test_an_update_on_the_device_is_copies_and_two_pieces_of_its_memory():
    """In go state, gradients, and what was updated in the dtype computed in: 12 + 4 + 2 bytes a parameter."""
    hardware, spec = with_host(hardware_of(1, 8), copy=1e10), decoder_spec(LLAMA_8B)
    p = spec.numel / 8
    for moments, state in (("fp32", 12), ("bf16", 8)):
        plan = plan_8b("optimizer:cpu", "offload.update=device", f"offload.moments={moments}")
        terms = offload_of(plan, hardware, LLAMA_8B)
        assert terms.step_bottleneck == "copies"
        assert terms.copy_seconds == pytest.approx((state + 4 + 2) * p / 1e10, rel=1e-3)
        # One of 64 million parameters is cut in sixteen, whole vectors each.
        piece = 64_000_000 // 1024 * 1024 // 16 // 1024 * 1024
        assert peak_bytes(spec, plan).optimizer_state == 2 * (state + 4) * piece
    host, device = (
        offload_of(plan_8b("optimizer:cpu", f"offload.update={where}"), hardware, LLAMA_8B)
        for where in ("host", "device")
    )
    assert device.update_seconds < host.update_seconds
    assert (device.host_bytes, device.disk_bytes) == (host.host_bytes, host.disk_bytes)


@pytest.mark.parametrize(
    "tier", [pytest.param("params+optimizer:cpu", marks=pytest.mark.long), "optimizer:nvme"]
)
def test_update_runs_where_it_is_faster(tier: Tier):
    """16 bytes a parameter at 5e10 a second are 3.1e9 parameters a second, without the update itself."""
    pins = ("train.global_batch=8", "train.microbatch=1", "recompute.mode=full", f"offload.tier={tier}")
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, *pins)
    pinned = run_for(LLAMA_8B, *pins, "offload.update=host")
    for adam, expected in ((5e8, "device"), (2.5e9, "device"), (3.5e9, "host"), (1e11, "host")):
        hardware = with_host(hardware_of(1, 8), adam=adam, disk=1e12)
        found = plan_best(spec, hardware, run)
        assert found.run.offload.update == expected
        other = found.run.offload.model_copy(update={"update": "host" if expected == "device" else "device"})
        slower = found.model_copy(update={"run": found.run.model_copy(update={"offload": other})})
        if adam in (5e8, 1e11):
            assert prediction_of(found).time.total < predict_terms(spec, slower, hardware).total
        assert plan_best(spec, hardware, pinned).run.offload.update == "host"


def test_without_a_gpu_the_host_updates():
    spec, run = decoder_spec(SMALL), run_for(SMALL, "train.global_batch=8", "offload.tier=optimizer:cpu")
    assert plan_best(spec, with_host(cpu_of(4), adam=1.0), run).run.offload.update == "host"
    assert Plan.from_run(run, world_size=4, device="cuda").run.offload.update == "host"


def test_an_infinitely_fast_host_and_drive_cost_no_seconds():
    endless = with_host(hardware_of(1, 8), copy=1e30, disk=1e30, adam=1e30)
    spec = decoder_spec(LLAMA_8B)
    none = predict_terms(spec, plan_8b("none"), endless)
    tier = predict_terms(spec, plan_8b("optimizer:nvme"), endless)
    assert tier.offload == pytest.approx(0, abs=1e-9)
    assert tier.optimizer == 0
    # Shards are in the dtype computed in, and need no cast.
    assert tier.total <= none.total
    assert tier.compute == none.compute


@settings(max_examples=4)
@given(st.data())
def test_the_search_over_tiers_equals_brute_force(data: st.DataObject):
    ranks, device = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from(["cuda", "cpu"]))
    hardware = with_host(hardware_of(1, ranks) if device == "cuda" else cpu_of(ranks))
    pins = ("train.global_batch=8", "train.microbatch=1", "recompute.mode=full")
    spec, run = decoder_spec(SMALL), run_for(SMALL, *pins, "plan.memory_margin=0")
    everything = [
        predict(spec, build_plan(one, run, hardware=hardware), hardware)
        for one in iterate_candidates(spec, hardware, run=run, tiers=TIERS)
    ]

    def needed(plan: Plan) -> int:
        """On the CPU the host is the device."""
        prediction = prediction_of(plan)
        return prediction.required_device_bytes + (
            prediction.host_bytes_per_rank if hardware.device == "cpu" else 0
        )

    needs = sorted(map(needed, everything))
    capacity = int(needs[0] * 0.99 + data.draw(st.floats(0, 1)) * (needs[-1] - needs[0] * 0.98))
    found = search(spec, hardware, run, capacity_bytes=capacity, tiers=TIERS)
    fit = [one for one in everything if needed(one) <= capacity]
    assert (found.best is None) == (not fit)
    if found.best is not None:
        least = min(prediction_of(one).time.total for one in fit)
        assert prediction_of(found.best).time.total <= (1 + SAME_SPEED) * (1 + WORTH_MORE_OFFLOAD) * least
    fastest = min(prediction_of(one).time.total for one in everything)
    assert prediction_of(found.fastest).time.total == pytest.approx(fastest, rel=2e-3)
    assert {one.run.offload.tier for one in found.by_strategy.values()} == set(TIERS)


def test_error_names_a_tier_and_its_cost_if_nothing_fits():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=4", "offload.tier=none")
    with pytest.raises(PlanError) as error:
        plan_best(spec, with_host(hardware_of(1, 4, gib=30)), run)
    assert 'offload.tier = "optimizer:cpu" with ' in str(error.value)
    assert " a step" in str(error.value)


def test_an_optimizer_that_cannot_be_offloaded_is_planned_without():
    spec, run = decoder_spec(LLAMA_8B), run_for(LLAMA_8B, "train.global_batch=4", "optimizer.name=sgd")
    with pytest.raises(PlanError) as error:
        plan_best(spec, with_host(hardware_of(1, 4, gib=10)), run)
    assert "offload.tier" not in str(error.value)


def test_a_tier_that_the_host_has_no_room_for_does_not_fit():
    spec, run = (
        decoder_spec(LLAMA_8B),
        run_for(LLAMA_8B, "train.global_batch=8", "offload.tier=optimizer:cpu"),
    )
    roomy = with_host(hardware_of(1, 8))
    narrow = roomy.model_copy(update={"host_memory_bytes": 2**30})
    assert search(spec, roomy, run).best is not None
    assert search(spec, narrow, run).best is None
    with pytest.raises(PlanError, match=r"1\.00 GiB of host memory"):
        plan_best(spec, narrow, run)


def test_a_drive_that_nobody_measured_is_asked_for():
    spec, hardware = decoder_spec(LLAMA_8B), hardware_of(1, 8)
    with pytest.raises(PlanError, match="disk_bytes_per_second"):
        predict(spec, plan_8b("optimizer:nvme"), hardware.model_copy(update={"host_bytes_per_second": 5e10}))


def test_a_drive_that_nobody_measured_leaves_out_its_time_and_nothing_else():
    spec, hardware, plan = decoder_spec(LLAMA_8B), with_host(hardware_of(1, 8)), plan_8b("optimizer:nvme")
    timed = prediction_of(predict(spec, plan, hardware))
    without = prediction_of(predict(spec, plan, with_infinitely_fast_drive(hardware)))
    assert (timed.has_complete_step_time, without.has_complete_step_time) == (True, False)
    assert without.memory == timed.memory
    assert timed.offload is not None
    assert without.offload == timed.offload.model_copy(update={"disk_seconds": None})
    assert without.time.total <= timed.time.total
    held = prediction_of(predict(spec, plan_8b("optimizer:cpu"), with_infinitely_fast_drive(hardware)))
    assert held.has_complete_step_time  # it has nothing on the drive


def test_host_memory_error_names_bytes_that_fit():
    """The named bytes of the host fit, and one byte less does not."""
    hardware, spec = with_host(hardware_of(1, 8)), decoder_spec(LLAMA_8B)
    batch = ("train.global_batch=8", "train.microbatch=1", "recompute.mode=full")
    settings = (*batch, "offload.tier=optimizer:nvme", "offload.sub_group_parameters=256_000_000")
    with pytest.raises(PlanError, match="of host memory per rank") as error:
        plan_best(spec, hardware, run_for(LLAMA_8B, *settings, "offload.host_bytes=7_000_000_000"))
    fix = error.value.fix or ""
    assert "offload.sub_group_parameters below 256000000" in fix
    least = int(fix.partition("offload.host_bytes = ")[2].split()[0])
    for host_bytes, fits in ((least, True), (least - 1, False)):
        own = run_for(LLAMA_8B, *settings, f"offload.host_bytes={host_bytes}")
        assert (search(spec, hardware, own).best is not None) == fits
