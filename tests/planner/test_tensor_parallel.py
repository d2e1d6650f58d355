"""The tensor-parallel axis: its memory and its bytes, as real ranks have them."""

import pytest

from fullshard.errors import PlanError
from fullshard.planner.predict.memory import peak_bytes
from fullshard.planner.predict.step_time import StepTimePredictor
from fullshard.spec.plan import Plan
from tests.fakes.hardware import hardware_of
from tests.planner.dry_step import dry_peak_bytes
from tests.planner.measured import described, measured, meta_model, model_parallel_bytes, plan_of, predicted
from tests.planner.test_context_parallel import sent_bytes
from tests.planner.test_memory_bound import bound_of

LAYERS, RANKS, LENGTH = 2, 4, 256


def tensor_plan(*overrides: str, tensor: int = RANKS, ranks: int = RANKS) -> Plan:
    sizes = [f"data.sequence_length={LENGTH}", f"model.max_sequence={LENGTH}", "model.heads=8"]
    sizes.append(f"model.layers={LAYERS}")
    return plan_of(ranks, *sizes, f"sharding.tensor_parallel={tensor}", "train.global_batch=8", *overrides)


@pytest.mark.parametrize(
    ("mode", "times"),
    [
        # Forward and backward of a block gather twice and reduce twice; gathered inputs are gathered again.
        pytest.param("none", LAYERS * 10 + 4, marks=pytest.mark.long),
        # Recompute repeats both gathers, and the first reduction; the result of the second is not needed.
        ("full", LAYERS * 11 + 4),
    ],
)
def test_sent_bytes_equal_the_plan(mode: str, times: int, ranks) -> None:
    plan = tensor_plan("sharding.strategy=no_shard", f"recompute.mode={mode}", "model.kv_heads=4")
    hidden = 4 * plan.microbatch * LENGTH * plan.run.decoder_config.d_model
    expected = times * hidden * (RANKS - 1) // RANKS * plan.accumulation
    assert ranks(RANKS).run(sent_bytes, plan) == [expected] * RANKS
    assert model_parallel_bytes(plan) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "overrides",
    [
        ["recompute.mode=none"],
        pytest.param(
            ["recompute.mode=selective", "sharding.tensor_parallel=2", "train.loss_chunk=32"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            [
                *("recompute.mode=full", "sharding.tensor_parallel=2", "precision.mode=fp8"),
                *("precision.fp8_min_features=16", "model.kv_heads=1"),
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=" ".join,
)
def test_peak_equals_plan_and_dry_step(overrides: list[str], ranks) -> None:
    plan = tensor_plan(*overrides)
    real = sum(ranks(RANKS).run(measured, plan)[0].values())
    assert dry_peak_bytes(meta_model(plan), plan) == pytest.approx(real, rel=0.005)
    assert predicted(plan).total == pytest.approx(real, rel=0.01)


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.long), "full"])
@pytest.mark.parametrize("prefetch", ["none", "implicit"])
def test_bounds_hold(mode: str, prefetch: str) -> None:
    more = ("train.microbatch=1", "model.layers=8", "model.kv_heads=8", "precision.mode=bf16")
    plan = tensor_plan(f"recompute.mode={mode}", f"prefetch.mode={prefetch}", *more, tensor=2, ranks=8)
    spec = described(plan)
    timer, inline = StepTimePredictor(spec, hardware_of(1, 8)), prefetch == "none"
    seconds = timer.predict_time(plan)
    assert seconds.model_parallel > 0
    least = timer.lower_bound_seconds(timer.compute_ticks(plan), timer.stream_minima(plan), inline=inline)
    assert least <= seconds.total
    assert bound_of(spec, plan) <= peak_bytes(spec, plan).total


def test_a_spec_of_another_division_is_refused() -> None:
    with pytest.raises(PlanError, match="another division of matmuls"):
        peak_bytes(described(tensor_plan("model.kv_heads=8", tensor=1)), tensor_plan(tensor=2))
    with pytest.raises(PlanError, match="groups of 3"):
        tensor_plan(tensor=3)
