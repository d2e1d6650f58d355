"""Peak bytes a rank are what the formula says from shapes alone, term by term."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import PlanError
from fullshard.observe.memory import measure_peak_memory
from fullshard.parallel.model_parameters import TORCH_DTYPE
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.unit_bytes import padded_numel, unit_bytes, unpadded_shard_numel
from fullshard.spec.model import ParamSpec, UnitSpec
from fullshard.spec.prediction import MemoryTerms
from tests.planner.measured import described, measured, meta_model, plan_of, predicted

STRATEGIES = {
    "no_shard": ["sharding.strategy=no_shard"],
    "zero1": ["sharding.strategy=zero1"],
    "shard_grad_op": ["sharding.strategy=shard_grad_op"],
    "full_shard": ["sharding.strategy=full_shard"],
    "hybrid_shard": ["sharding.strategy=hybrid_shard", "sharding.shard_degree=2"],
    "hybrid_shard_zero2": ["sharding.strategy=hybrid_shard_zero2", "sharding.shard_degree=2"],
}
MIXED_UNITS = (
    'sharding.units.overrides=[{match="blocks.0", strategy="no_shard"}, '
    '{match="blocks.1", precision="fp32"}, {match="blocks.2", reshard_after_forward=false}]'
)
UNEVEN = ["model.vocabulary=1021", "model.d_ff=383", "model.d_model=120"]


def parameters(plan) -> int:
    return sum(p.numel() for p in meta_model(plan).parameters())


def check(plan, parts_of_ranks, *, frozen: str = "") -> MemoryTerms:
    """The prediction: within 2 % of the fullest rank in all; of what lasts from step to step, to the byte."""
    terms = predicted(plan, frozen=frozen)
    parts = max(parts_of_ranks, key=lambda one: sum(one.values()))
    total = sum(parts.values())
    assert terms.total == pytest.approx(total, rel=0.02)
    assert terms.parameter_shards == parts["parameter_shards"]
    assert terms.optimizer_state == parts["optimizer_state"]
    assert terms.buffers == parts["buffers"]
    return terms


def check_terms(plan, parts_of_ranks) -> None:
    """Also each term that comes and goes within a step."""
    terms, parts = check(plan, parts_of_ranks), parts_of_ranks[0]
    assert terms.gradients == parts["gradients"]
    assert terms.units_in_flight == parts["units_in_flight"]
    computation = terms.whole_gradients + terms.activations + terms.loss + terms.backward
    assert computation + terms.batch == pytest.approx(parts["rest"], rel=0.001)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_reduce"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_copies_of_gradients_on_their_way_to_the_reduction(ranks, precision):
    plan = plan_of(ranks, f"precision.mode={precision}")
    shapes = [(300, 64), (301, 64), (6000, 32), (64,)]
    unit = UnitSpec(name="", position=0, parameters=tuple(ParamSpec(name="", shape=one) for one in shapes))
    size = unit_bytes(unit, plan)
    gathered, reduced = TORCH_DTYPE[plan.precision.param], TORCH_DTYPE[plan.precision.reduce]
    buffer = torch.empty(ranks, size.reduce_output // reduced.itemsize, dtype=reduced)
    for dtype, expected in ((gathered, size.reduce_copies), (reduced, size.reduce_copies_of_kept)):
        gradients = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        with measure_peak_memory(torch.device("cpu")) as peak:
            torch._chunk_cat(gradients, 0, ranks, out=buffer)
        assert peak.bytes == expected


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("hybrid_shard", "bf16"),
        pytest.param("zero1", "bf16", marks=pytest.mark.long),
        pytest.param("full_shard", "fp32", marks=pytest.mark.long),
    ],
)
def test_peak_is_the_sum_of_its_terms(ranks, strategy, precision):
    n = 4 if len(STRATEGIES[strategy]) > 1 else 2
    plan = plan_of(n, *STRATEGIES[strategy], f"precision.mode={precision}")
    check_terms(plan, ranks(n).run(measured, plan))


@pytest.mark.parametrize(
    ("strategy", "precision", "recompute"),
    [
        ("full_shard", "bf16", "offload"),
        pytest.param("full_shard", "fp32", "full recompute.blocks=2", marks=pytest.mark.long),
        ("zero1", "bf16", "selective"),
    ],
)
def test_peak_under_recompute(ranks, strategy, precision, recompute):
    settings = (*STRATEGIES[strategy], f"precision.mode={precision}")
    plan = plan_of(2, *settings, *f"recompute.mode={recompute}".split())
    check(plan, ranks(2).run(measured, plan))


@pytest.mark.parametrize(
    ("n", "strategy", "precision", "recompute"),
    [
        (2, "zero1", "fp8", "none"),
        pytest.param(2, "zero1", "fp8", "selective", marks=pytest.mark.long),
        pytest.param(4, "hybrid_shard", "fp8", "full", marks=pytest.mark.long),
        pytest.param(2, "no_shard", "fp8", "none", marks=pytest.mark.long),
        pytest.param(1, "full_shard", "fp8", "full", marks=pytest.mark.long),
        pytest.param(2, "full_shard", "fp8_rowwise", "selective", marks=pytest.mark.long),
    ],
)
def test_peak_of_matmuls_in_fp8(ranks, n, strategy, precision, recompute):
    pytest.importorskip("torchao")
    settings = [f"precision.mode={precision}", "precision.fp8_min_features=16", f"recompute.mode={recompute}"]
    plan = plan_of(n, *STRATEGIES[strategy], *settings)
    parts = ranks(n).run(measured, plan)
    terms = check(plan, parts)
    assert (terms.units_in_flight, terms.gradients) == (parts[0]["units_in_flight"], parts[0]["gradients"])


def test_peak_under_accumulation(ranks):
    """Reduced after the last microbatch only, gradients are whole (pytorch's no_sync)."""
    plan = plan_of(
        2,
        "sharding.strategy=full_shard",
        "train.gradient_sync=last_microbatch",
        "precision.mode=bf16",
        "recompute.mode=full",
        accumulation=3,
    )
    check(plan, ranks(2).run(measured, plan))


@pytest.mark.parametrize("strategy", ["no_shard", "zero1"])
def test_whole_gradients_are_not_counted_as_units_in_flight(ranks, strategy: str):
    """In bf16, they are cast to fp32 where a unit's backward ends: by FSDP2."""
    plan = plan_of(
        2,
        f"sharding.strategy={strategy}",
        "precision.mode=bf16",
        "recompute.mode=full",
        "train.gradient_sync=last_microbatch",
        accumulation=3,
    )
    terms, found = predicted(plan), ranks(2).run(measured, plan)[0]
    assert terms.whole_gradients + terms.gradients > terms.units_in_flight
    assert found["units_in_flight"] == pytest.approx(terms.units_in_flight, rel=0.02)


def test_peak_of_moments_in_eight_bits(ranks):
    pytest.importorskip("torchao")
    more = ["model.d_model=256", "recompute.mode=full"]
    plan = plan_of(2, "optimizer.name=adamw8bit", *more)
    terms = check(plan, ranks(2).run(measured, plan))
    assert terms.optimizer_state < 0.3 * predicted(plan_of(2, *more)).optimizer_state


def test_moments_in_eight_bits_save_memory_on_a_gpu_however_large_one_parameter_is():
    """The state shrinks by 6 bytes per parameter. The compiled update holds two moments of one of them."""
    wide = ["model.vocabulary=65536", "model.layers=1", "recompute.mode=full"]
    plans = [plan_of(1, *wide, f"optimizer.name={name}") for name in ("adamw", "adamw8bit")]
    full, eight = (predicted(plan.model_copy(update={"device": "cuda"})) for plan in plans)
    assert full.optimizer_state - eight.optimizer_state > 5.9 * parameters(plans[0])
    assert eight.total < full.total


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.tied=true", "optimizer.name=sgd", "optimizer.options={momentum=0.9}"],
        pytest.param(["sharding.units.min_parameters=60000"], marks=pytest.mark.long),
        ["model.layers=3", MIXED_UNITS],
    ],
    ids=["tied, sgd", "by size", "mixed units"],
)
def test_predicted_peak_of_mixed_units_is_the_measured_one(ranks, overrides):
    plan = plan_of(2, *overrides, "precision.mode=bf16", "recompute.mode=full")
    check(plan, ranks(2).run(measured, plan))


@pytest.mark.parametrize("frozen", ["blocks.*.feed_forward.*", "[be]*"])
def test_peak_with_frozen_parameters(ranks, frozen):
    """If all except the head is frozen, the peak is in forward: two gathered units, and two buffers."""
    plan = plan_of(2, "precision.mode=bf16", "model.vocabulary=64", "model.d_ff=1024")
    terms = check(plan, ranks(2).run(measured, plan, frozen), frozen=frozen)
    assert ("forward" in terms.moment) == (frozen == "[be]*")


def test_peak_of_each_rank_is_as_predicted(ranks):
    plan = plan_of(3, *UNEVEN)
    peaks = [sum(parts.values()) for parts in ranks(3).run(measured, plan)]
    assert [predicted(plan, rank=rank).total for rank in range(3)] == pytest.approx(peaks, rel=0.001)
    assert peaks[0] == max(peaks)


def test_shards_and_adamw_state_are_twelve_bytes_per_parameter_over_ranks():
    spec = described(plan_of(1))
    for n in (1, 2, 4):
        plan = plan_of(n)
        terms = peak_bytes(spec, plan)
        steps = 4 * len(list(meta_model(plan).parameters()))
        assert terms.parameter_shards == 4 * parameters(plan) // n
        assert terms.optimizer_state == 8 * parameters(plan) // n + steps


@pytest.mark.parametrize(
    ("strategy", "precision"), [("full_shard", "fp32"), ("shard_grad_op", "bf16"), ("zero1", "fp32")]
)
def test_compressed_communication_is_measured_as_planned(ranks, strategy: str, precision: str):
    form = ("communication.gather=int8", "communication.reduce=int8")
    plan = plan_of(2, f"sharding.strategy={strategy}", f"precision.mode={precision}", *form)
    check(plan, ranks(2).run(measured, plan))


@pytest.mark.parametrize(("precision", "within"), [("fp32", "none"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_reductions_that_are_the_peak_are_measured_as_planned(ranks, precision: str, within: str):
    form = ("communication.reduce=int8", f"communication.reduce_within={within}")
    small = ("model.vocabulary=128", "model.max_sequence=16", "data.sequence_length=16")
    more = (f"precision.mode={precision}", "communication.ranks_per_node=2", "sharding.strategy=full_shard")
    plan = plan_of(4, *form, *small, *more)
    terms = check(plan, ranks(4).run(measured, plan))
    assert terms.moment == "microbatch 1, post backward of blocks.1"


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_averages_are_measured_as_planned(ranks, precision: str):
    """In fp32, also of shards in bf16."""
    plan = plan_of(3, f"precision.mode={precision}", "ema.decay=0.9", "sharding.strategy=full_shard")
    for rank, found in enumerate(ranks(3).run(measured, plan)):
        assert found["parameter_averages"] == predicted(plan, rank=rank).parameter_averages > 0
    check(plan, ranks(3).run(measured, plan))


def test_a_spec_of_other_settings_is_refused():
    plan = plan_of(2)
    spec = described(plan)
    with pytest.raises(PlanError, match="recompute full, microbatch 2"):
        peak_bytes(spec, plan_of(2, "recompute.mode=full"))
    with pytest.raises(PlanError, match="sequence_length: 64 described, 32 planned"):
        peak_bytes(spec, plan_of(2, "data.sequence_length=32"))


def test_an_optimizer_of_unknown_state_is_refused():
    with pytest.raises(PlanError, match="optimizer's state is not known"):
        predicted(plan_of(2, "optimizer.name=torch.optim.Adagrad"))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 12))
def test_shards_are_torchs_chunks(rows, columns, degree):
    chunks = torch.empty(rows, columns).chunk(degree)
    sizes = [chunk.numel() for chunk in chunks] + [0] * (degree - len(chunks))
    assert [unpadded_shard_numel((rows, columns), degree, rank=rank) for rank in range(degree)] == sizes
    assert padded_numel((rows, columns), degree) == degree * sizes[0]


@pytest.mark.long
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peak_over_the_cross_of_settings(ranks, strategy, n):
    if n != 4 and len(STRATEGIES[strategy]) > 1:
        pytest.skip("groups of 2 need 4 ranks")
    recomputed = itertools.product(
        ("fp32", "bf16", "bf16_reduce", "bf16_pure"),
        ("none", "full", "selective"),
        [(1, "every_microbatch")],
    )
    accumulated = itertools.product(
        ("fp32", "bf16"), ("full",), [(3, "every_microbatch"), (3, "last_microbatch")]
    )
    for precision, recompute, (accumulation, sync) in [*recomputed, *accumulated]:
        plan = plan_of(
            n,
            *STRATEGIES[strategy],
            f"precision.mode={precision}",
            f"recompute.mode={recompute}",
            f"train.gradient_sync={sync}",
            accumulation=accumulation,
        )
        check(plan, ranks(n).run(measured, plan))
