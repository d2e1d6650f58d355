"""Degrees and batches of a plan divide its ranks, or are refused with those that would."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import PlanError, SpecError
from fullshard.spec.plan import ITEMSIZE, Plan, Precision
from fullshard.spec.run import Run, Strategy

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
SMALL = st.integers(1, 24)


def run_of(**sections: dict[str, object]) -> Run:
    return Run.parse(sections, source="a test")


def suggested(error: PlanError) -> list[int]:
    """The numbers that an error suggests for the first key that it names."""
    values = (error.fix or "").partition("=")[2].partition(", or ")[0]
    return [int(number) for number in re.findall(r"\d+", values)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    degree, replicas, microbatch, accumulation = (draw(st.integers(1, 6)) for _ in range(4))
    strategy = draw(st.sampled_from(list(Strategy)))
    hybrid = {"shard_degree": degree} if strategy in HYBRID else {}
    run = run_of(
        sharding={"strategy": strategy, **hybrid},
        train={"global_batch": degree * replicas * microbatch * accumulation, "microbatch": microbatch},
        precision={
            "mode": draw(st.sampled_from(["auto", "fp32", "bf16", "bf16_reduce", "fp16", "bf16_pure"]))
        },
        optimizer={
            "options": draw(st.dictionaries(st.text("abc", min_size=1), st.booleans() | st.floats(0, 1)))
        },
    )
    return Plan.from_run(run, world_size=degree * replicas, device=draw(st.sampled_from(["cpu", "cuda"])))


@given(plans())
def test_a_plan_covers_all_ranks_and_the_whole_batch(plan):
    assert plan.replicate_degree * plan.shard_degree == plan.world_size
    assert plan.world_size * plan.microbatch * plan.accumulation == plan.run.train.global_batch


@given(plans())
def test_a_plan_survives_json(plan):
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_plan_survives_the_disk(tmp_path):
    plan = Plan.from_run(Run(), world_size=2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_with_a_setting_of_an_earlier_version_is_read_without_it_but_not_trained(tmp_path):
    plan, path = Plan.from_run(Run(), world_size=2), tmp_path / "plan.json"
    saved = plan.model_dump(mode="json")
    saved["run"] |= {"fsdp": {"symmetric_memory": True}, "prefetch": {"mode": "none"}}
    path.write_text(json.dumps(saved))
    assert Plan.load(path) == plan
    with pytest.raises(SpecError, match=r"(?s)not a saved plan.*run\.(fsdp|prefetch)"):
        Plan.load(path, ignores_unknown=False)


@pytest.mark.parametrize("content", ["", "{}", '{"run": 3}', "no json"])
def test_files_that_are_not_plans_are_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(SpecError, match=r"plan\.json is not a saved plan"):
        Plan.load(path)
    with pytest.raises(SpecError, match=r"absent\.json is not a saved plan"):
        Plan.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("strategy", "degrees", "reshards", "synced"),
    [
        ("no_shard", (4, 1), False, "last"),
        ("zero1", (1, 4), False, "last"),
        ("shard_grad_op", (1, 4), False, "each"),
        ("full_shard", (1, 4), True, "each"),
        ("hybrid_shard", (2, 2), True, "each"),
        ("hybrid_shard_zero2", (2, 2), False, "each"),
    ],
)
def test_each_strategy_has_its_mesh_reshard_and_sync(strategy, degrees, reshards, synced):
    hybrid = {"shard_degree": 2} if strategy in HYBRID else {}
    plan = Plan.from_run(run_of(sharding={"strategy": strategy, **hybrid}), world_size=4)
    assert (plan.replicate_degree, plan.shard_degree) == degrees
    assert plan.reshard_after_forward is reshards
    assert plan.sync_each_microbatch is (synced == "each")


@given(st.integers(1, 200), SMALL, st.none() | SMALL)
def test_a_batch_is_shared_out_or_refused_with_the_nearest_that_can_be(batch, world_size, microbatch):
    def plan(size: int) -> Plan:
        train = {"global_batch": size, "microbatch": microbatch}
        return Plan.from_run(run_of(train=train), world_size=world_size)

    if batch % (world_size * (microbatch or 1)) == 0:
        assert plan(batch).microbatch == microbatch or microbatch is None
        return
    with pytest.raises(PlanError) as raised:
        plan(batch)
    sizes = suggested(raised.value)
    assert [plan(size).run.train.global_batch for size in sizes] == sizes
    nearest = min(abs(size - batch) for size in sizes)
    for closer in range(max(1, batch - nearest + 1), batch + nearest):
        with pytest.raises(PlanError):
            plan(closer)


@given(st.sampled_from(HYBRID), SMALL, st.none() | SMALL)
def test_a_shard_degree_divides_the_ranks_or_is_refused_with_those_that_do(strategy, world_size, degree):
    def plan(degree: int | None) -> Plan:
        run = run_of(
            sharding={"strategy": strategy, "shard_degree": degree}, train={"global_batch": world_size}
        )
        return Plan.from_run(run, world_size=world_size)

    if degree is not None and world_size % degree == 0:
        assert plan(degree).shard_degree == degree
        return
    with pytest.raises(PlanError) as raised:
        plan(degree)
    assert [plan(good).shard_degree for good in suggested(raised.value)] == [
        good for good in range(1, world_size + 1) if world_size % good == 0
    ]


@pytest.mark.parametrize(
    ("device", "bf16_hardware", "param"),
    [("cpu", None, "fp32"), ("cuda", None, "bf16"), ("cuda", False, "fp32"), ("cpu", True, "bf16")],
)
def test_auto_precision_goes_by_the_hardware(device, bf16_hardware, param):
    plan = Plan.from_run(Run(), world_size=1, device=device, bf16_hardware=bf16_hardware)
    assert plan.precision.param == param
    assert plan.precision.master == plan.precision.reduce == "fp32"


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_reduce", "fp16", "bf16_pure"])
def test_master_dtype_is_at_least_as_wide_as_compute_dtype(mode):
    precision = Precision.from_mode(mode)
    assert ITEMSIZE[precision.master] >= ITEMSIZE[precision.param]
    assert precision.loss_scaling is (precision.param == "fp16")
    assert precision.stochastic_rounding is (precision.master == "bf16")
